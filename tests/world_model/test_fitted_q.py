"""Fitted Q evaluation on a world small enough to know what policies are worth in it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from world_toys import ROBOT, SIZE, TASKS

from vla_stack.methods.fitted_q import ASKED, FittedQ, asked, policy_value
from vla_stack.world_model.clips import Recording
from vla_stack.world_model.dynamics import DynamicsConfig
from vla_stack.world_model.heads import HeadsConfig
from vla_stack.world_model.model import WorldConfig, WorldModel
from vla_stack.world_model.poses import PoseScale
from vla_stack.world_model.vae import VaeConfig

FRAMES, EPISODES = 8, 120  # three chunks of two, and what they lead to
QUICK = FittedQ(rows=2000, steps=600, batch=64, gamma=0.9, width=64, lr=3e-3, follow=0.05)


def world() -> tuple[WorldModel, Recording, torch.Tensor]:
    """Who closes the gripper in two of the first chunks has succeeded in the third; nothing else is of any use.

    Everybody's frames look like how often it was closed; recorded grippers are closed or open at random.
    """
    config = WorldConfig(
        env="",
        tasks=TASKS[:1],
        poses=PoseScale((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
        vae=VaeConfig(stem=2, widths=(8,), channels=1),
        dynamics=DynamicsConfig(history=2, future=2, width=8, blocks=1, heads=2, patch=2, members=1),
        heads=HeadsConfig(width=8, judges=1, window=4),
    )
    model, rng = WorldModel(config, ROBOT), np.random.default_rng(0)
    n = FRAMES * EPISODES
    closed = rng.random((EPISODES, FRAMES // 2)) < 0.5
    commands = np.zeros((n, 5), np.float32)
    commands[:, 4] = 1.0 - closed.repeat(2, 1).ravel()
    count = np.concatenate([np.zeros((EPISODES, 1), int), closed[:, :-1].cumsum(1)], 1)
    success = np.zeros((EPISODES, FRAMES), bool)
    success[:, 4:] = (count[:, 2] == 2)[:, None]
    chunk = np.tile(np.arange(FRAMES // 2), (EPISODES, 1))
    latents = torch.zeros(n, *model.noise_shape()[1:])
    latents[:, 0, 0, 0, 0] = torch.from_numpy(count.repeat(2, 1).ravel()).float()
    latents[:, 0, 0, 0, 1] = torch.from_numpy(chunk.repeat(2, 1).ravel()).float()
    states = np.zeros((n, len(ROBOT.state)), np.float32)
    start = np.repeat(np.arange(EPISODES) * FRAMES, FRAMES)
    recording = Recording(
        ROBOT,
        TASKS[:1],
        {c: np.zeros((n, SIZE, SIZE, 3), np.uint8) for c in ("front", "wrist")},
        states,
        states[:, :5],
        commands,
        states[:, :5],
        success.ravel(),
        np.zeros(n, np.int64),
        start,
        start + FRAMES,
        np.zeros(n, bool),
    )
    return model, recording, latents


def test_a_policy_is_worth_what_its_own_actions_would_lead_to() -> None:
    model, recording, latents = world()
    starts = np.unique(recording.start)

    def value(opening) -> float:
        def ask(observations, seeds):
            chunks = np.zeros((len(observations), 3, 5), np.float32)  # longer than what is carried out
            chunks[..., 4] = np.array([[opening(o)] for o in observations])
            return chunks

        return policy_value(model, recording, latents, ask, starts, QUICK)

    # Success is within the second chunk, one discount away, for who closes in both; behaviour does in a quarter.
    closes, opens, late = value(lambda o: 0.0), value(lambda o: 1.0), value(lambda o: float(o.step < 2))
    assert closes == pytest.approx(0.9, abs=0.05)
    assert opens < 0.1 and late < 0.1
    assert closes == value(lambda o: 0.0)  # of its seed alone


def test_a_policy_is_asked_about_each_frame_as_it_was_recorded() -> None:
    _, recording, _ = world()
    frames, met = np.arange(ASKED + 5) * 3, []

    def ask(observations, seeds):
        met.extend(zip(observations, seeds, strict=True))
        assert len(observations) <= ASKED
        return np.array([[[o.step]] for o in observations], np.float32)

    chunks = asked(recording, frames, ask, seed=2)
    np.testing.assert_array_equal(chunks[:, 0, 0], frames % FRAMES)
    observation, seed = met[7]
    assert seed == 2 * 2**20 + 21 and observation.task == TASKS[0] and set(observation.images) == {"front", "wrist"}

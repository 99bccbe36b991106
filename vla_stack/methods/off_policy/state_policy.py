"""A policy of the loop ``off_policy`` as evaluations see it: observations in, chunks of commands out."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from vla_stack.envs.state_env import StateEnv, normalised
from vla_stack.errors import UserError
from vla_stack.methods.off_policy.learner import WEIGHTS
from vla_stack.methods.off_policy.loop import load
from vla_stack.schema import Chunks, Continuation, Observation, PolicySpec


class StatePolicy:
    """A trained WSRL or EXPO policy, or one of their baselines, as it is evaluated in training.

    The state of an observation is :data:`vla_stack.envs.state_env.SEEN`, which
    :func:`vla_stack.envs.making.make_env` adds to the observations of an environment; the robot that
    ``spec`` describes is the one of the environment that it was trained in.

    Args:
        directory: ``pretrained_model`` of a checkpoint.

    Raises:
        UserError: The directory holds no such policy, or one of an environment without a robot.
    """

    def __init__(self, directory: Path) -> None:
        self._learner, recipe, self._scale = load(directory)
        env = StateEnv(recipe)
        robot = getattr(env.env.unwrapped, "spec_robot", None)
        env.close()
        if robot is None:
            raise UserError(
                f"{directory} was trained in {recipe.id}, which describes no robot and reports no success",
                "its returns are in metrics.jsonl of the run",
            )
        self.spec = PolicySpec(
            robot=robot,
            horizon=self._learner.horizon,
            normalisation=hashlib.sha256(np.concatenate(self._scale).tobytes()).hexdigest()[:16],
            model_version=hashlib.sha256((directory / WEIGHTS).read_bytes()).hexdigest()[:16],
            extras={"n_action_steps": self._learner.horizon, "trained_in": dataclasses.asdict(recipe)},
        )

    def infer(
        self,
        observations: Sequence[Observation],
        seeds: Sequence[int],
        continuations: Sequence[Continuation | None] = (),
    ) -> Chunks:
        """One chunk of commands an observation, each by its own seed; plans are not continued."""
        low, high = self.spec.robot.action_low, self.spec.robot.action_high
        chunks = []
        for observation, seed in zip(observations, seeds, strict=True):
            obs = normalised(observation.state, *self._scale)[None]
            chunks.append(self._learner.greedy(obs, torch.Generator().manual_seed(seed)).actions[0])
        actions = (high + low) / 2 + (high - low) / 2 * np.clip(np.stack(chunks), -1.0, 1.0)
        return Chunks(actions.astype(np.float32))

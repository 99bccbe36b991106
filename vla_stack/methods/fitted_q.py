"""What a policy is worth by recorded episodes alone, nothing rolled out: fitted Q evaluation.

The cheap rival of imagination. Le et al. 2019, "Batch policy learning under constraints" (arXiv:1903.08738), algorithm
3, with a target network that follows instead of one frozen for an iteration. A state is a frame's latents with its pose
and instruction, an action a chunk of commands, as the critics in imagination have them (imagined_critics.py).
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from vla_stack.methods.imagined_critics import Reach, features, whole_chunks
from vla_stack.schema import Observation
from vla_stack.world_model.clips import Recording
from vla_stack.world_model.model import WorldModel

ASKED = 64  # observations that a policy is asked about at once
Ask = Callable[[list[Observation], list[int]], NDArray[np.float32]]  # observations and their seeds -> chunks [n, L, A]


@dataclass(frozen=True)
class FittedQ:
    """How it is fitted.

    Attributes:
        rows: Recorded chunks, at most.
        steps: Gradient steps.
        batch: Chunks of each.
        gamma: Discount of a chunk: who takes longer may run out of time.
        width: Of two hidden layers.
        lr: Learning rate.
        follow: Share of the way that the target network goes a step.
    """

    rows: int = 12_000
    steps: int = 2000
    batch: int = 256
    gamma: float = 0.97
    width: int = 256
    lr: float = 1e-3
    follow: float = 0.01


def policy_value(
    model: WorldModel,
    recording: Recording,
    latents: Tensor,
    ask: Ask,
    starts: NDArray[np.int64],
    config: FittedQ = FittedQ(),
    seed: int = 0,
) -> float:
    """The mean discounted success probability of a policy over some first frames, by recorded chunks.

    Q(s, a) = P(success within the chunk) + gamma Q(s', pi(s')) where there was none. Values are probabilities, so the
    network ends in a sigmoid and cannot run away.

    Args:
        model: Whose features the states are; on the CPU.
        recording: Episodes of anybody, failures among them.
        latents: Of all its frames [N, V, C, h, w].
        ask: The policy; the first H actions of its chunks are carried out, H being the model's horizon.
        starts: Frames of the recording [n].
        config: How.
        seed: Of drawing, initial weights and the policy's noise.
    """
    h, reach, rng = model.horizon, Reach.of(recording, model.horizon), np.random.default_rng([seed, 13])
    now = whole_chunks(recording, h)
    now = rng.choice(now, min(config.rows, len(now)), replace=False)

    def state(frames: NDArray[np.int64]) -> Tensor:
        rows = torch.from_numpy(frames)
        poses, task = torch.from_numpy(recording.poses[frames]), torch.from_numpy(recording.task[frames])
        return features(model, latents[rows], poses, task)

    def acted(frames: NDArray[np.int64]) -> Tensor:
        commands = torch.from_numpy(asked(recording, frames, ask, seed)[:, :h])
        return reach.unit(torch.from_numpy(recording.poses[frames]), commands)

    done = torch.from_numpy(recording.success[now[:, None] + 1 + np.arange(h)].any(1)).float()
    recorded = torch.from_numpy(recording.commands[now[:, None] + np.arange(h)])
    unit = reach.unit(torch.from_numpy(recording.poses[now]), recorded)
    ahead = acted(now + h)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        sizes = [state(now[:1]).shape[1] + unit.shape[1], config.width, config.width]
        layers = [m for a, b in zip(sizes, sizes[1:], strict=False) for m in (nn.Linear(a, b), nn.SiLU())]
        q = nn.Sequential(*layers, nn.Linear(config.width, 1))
    target = deepcopy(q).requires_grad_(False)
    optimizer = torch.optim.AdamW(q.parameters(), config.lr)
    for _ in range(config.steps):
        pick = rng.integers(len(now), size=config.batch)
        rows = torch.from_numpy(pick)
        with torch.no_grad():
            after = target(torch.cat([state(now[pick] + h), ahead[rows]], 1))[:, 0].sigmoid()
            aim = torch.where(done[rows] > 0, 1.0, config.gamma * after)
        said = q(torch.cat([state(now[pick]), unit[rows]], 1))[:, 0]
        optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(said, aim).backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), q.parameters(), strict=True):
                slow.lerp_(fast, config.follow)
    with torch.no_grad():
        return float(q(torch.cat([state(starts), acted(starts)], 1)).sigmoid().mean())


def asked(recording: Recording, frames: NDArray[np.int64], ask: Ask, seed: int) -> NDArray[np.float32]:
    """What a policy would command in recorded frames [n]: chunks float32 [n, L, A]."""
    chunks = []
    for part in np.split(frames, range(ASKED, len(frames), ASKED)):
        seen = [
            Observation(
                recording.states[f],
                {camera: pictures[f] for camera, pictures in recording.pictures.items()},
                recording.tasks[recording.task[f]],
                int(f - recording.start[f]),
            )
            for f in part
        ]
        chunks.append(ask(seen, [seed * 2**20 + int(f) for f in part]))
    return np.concatenate(chunks)

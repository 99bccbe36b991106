"""Offline reinforcement learning in the world model: RAVL's critics on imagined chunks (methods/ravl.py).

A state is a frame's latents with its pose and instruction, an action a chunk of commands relative to that pose, in the
range of the recorded ones. Imagined rollouts begin in recorded frames and follow the actor until they succeed, a guard
fires, or k chunks are over; only success ends their value.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from vla_stack.methods import ravl
from vla_stack.methods.ravl import RavlRecipe
from vla_stack.methods.replay_buffer import Batch, ReplayBuffer, Source, Transition
from vla_stack.methods.sac import Sac
from vla_stack.world_model import guards
from vla_stack.world_model.clips import Recording
from vla_stack.world_model.model import End, WorldModel
from vla_stack.world_model.poses import POSE, TOKEN, turned
from vla_stack.world_model.quality import chunk_noise
from vla_stack.world_model.tool import check_commands_poses

ROWS = 32  # rollouts imagined together
EVERY = 50  # updates between rollouts
CAPACITY = 256  # chunks that each of them keeps
TURN = 3  # index of yaw in a pose; before it position, after it the opening


@dataclass(frozen=True)
class Reach:
    """How far commands lead away from the pose at their chunk's start: [H, 4] in metres and radians."""

    far: Tensor

    @classmethod
    def of(cls, recording: Recording, horizon: int) -> Reach:
        """The 99th percentile of training episodes."""
        now = whole_chunks(recording, horizon)
        away = (
            recording.commands[now[:, None] + np.arange(horizon), : TURN + 1] - recording.poses[now, None, : TURN + 1]
        )
        far = np.percentile(np.abs(shorter(torch.from_numpy(away)).numpy()), 99, axis=0).clip(1e-3)
        return cls(torch.from_numpy(far.astype(np.float32)))

    def unit(self, pose: Tensor, commands: Tensor) -> Tensor:
        """Chunks in [-1, 1], [B, 5 H], of commands [B, H, 5] from poses [B, 5]; clipped beyond."""
        away = shorter(commands[..., : TURN + 1] - pose[:, None, : TURN + 1]) / self.far
        return torch.cat([away, commands[..., TURN + 1 :] * 2 - 1], -1).clamp(-1, 1).flatten(1)

    def commands(self, pose: Tensor, unit: Tensor) -> Tensor:
        """Inverse of :meth:`unit`, within the range."""
        chunk = unit.unflatten(1, (-1, POSE))
        away = pose[:, None, : TURN + 1] + chunk[..., : TURN + 1] * self.far
        return torch.cat([away, (chunk[..., TURN + 1 :] + 1) / 2], -1)


def shorter(away: Tensor) -> Tensor:
    """Ways [*, 4] with the shorter of the two turns."""
    return torch.cat([away[..., :TURN], turned(away[..., TURN:])], -1)


def whole_chunks(recording: Recording, horizon: int) -> NDArray[np.int64]:
    """Training frames at which a chunk begins that lies within its episode, the task not done yet."""
    frames = np.arange(len(recording.end))
    return np.flatnonzero(~recording.held_out & ~recording.success & (frames + horizon < recording.end))


def features(model: WorldModel, latents: Tensor, poses: Tensor, task: Tensor) -> Tensor:
    """Observations [B, o] of latents [B, V, C, h, w], poses [B, 5] and instructions int [B]."""
    tokens = model.tokens(poses, torch.zeros(len(poses), device=poses.device))
    told = F.one_hot(task, max(1, len(model.config.tasks))).float()
    return torch.cat([latents.flatten(1), tokens, told], -1)


@dataclass
class Critics:
    """An agent and the range of its actions.

    Attributes:
        model: The world model.
        agent: Critics and actor.
        reach: Of chunks.
    """

    model: WorldModel
    agent: Sac
    reach: Reach

    @classmethod
    def new(cls, model: WorldModel, recording: Recording, recipe: RavlRecipe, seed: int) -> Critics:
        """Untrained; raises :class:`UserError` where the robot does not take poses."""
        check_commands_poses(model.robot, "the critics' actor")
        width = int(np.prod(model.noise_shape()[1:])) + TOKEN + max(1, len(model.config.tasks))
        agent = Sac(recipe.sac, width, model.horizon * POSE, seed)
        return cls(model, agent, Reach.of(recording, model.horizon))

    @torch.no_grad()
    def value(self, now: End, task: int, commands: Tensor) -> Tensor:
        """The smallest of the critics' values of chunks [n, H, 5] that begin in one frame, [n]."""
        n = len(commands)
        pose = now.pose.expand(n, -1)
        obs = features(self.model, now.latent.expand(n, *[-1] * 4), pose, torch.full((n,), task, device=pose.device))
        return self.agent.critic(torch.cat([obs, self.reach.unit(pose, commands)], -1)).amin(0)

    @torch.no_grad()
    def propose(self, now: End, task: int) -> Tensor:
        """The actor's own chunk of commands, [1, H, 5]."""
        pose = now.pose[None]
        obs = features(self.model, now.latent[None], pose, torch.tensor([task], device=pose.device))
        return self.reach.commands(pose, self.agent.act(obs, explore=False))


def recorded(
    critics: Critics, recording: Recording, latents: Tensor, n: int, gamma: float, rng: np.random.Generator
) -> Batch:
    """Transitions of the data; success is what the simulator or a person said.

    Args:
        critics: For features and range.
        recording: The data.
        latents: Of all its frames.
        n: Rows.
        gamma: Discount of a chunk.
        rng: Draws them.
    """
    h = critics.model.horizon
    now = rng.choice(whole_chunks(recording, h), n)
    task = torch.from_numpy(recording.task[now])
    poses, after = (torch.from_numpy(recording.poses[f]) for f in (now, now + h))
    commands = torch.from_numpy(recording.commands[now[:, None] + np.arange(h)])
    won = torch.from_numpy(recording.success[now[:, None] + 1 + np.arange(h)].any(1))
    obs, ahead = (
        features(critics.model, latents[torch.from_numpy(f)], p, task) for f, p in ((now, poses), (now + h, after))
    )
    unknown = torch.full((n,), torch.nan)
    discount = gamma * (~won).float()
    return Batch(obs, critics.reach.unit(poses, commands), won.float(), ahead, discount, unknown, torch.full((n,), -1))


@torch.no_grad()
def imagine(
    critics: Critics, recording: Recording, starts: NDArray[np.int64], chunks: int, seed: int, into: ReplayBuffer
) -> None:
    """Roll the actor out from recorded frames [ROWS], and keep what happens.

    Args:
        critics: Who acts.
        recording: The data.
        starts: First frames.
        chunks: k.
        seed: Of the world model's noise.
        into: Has a slot for each rollout; a step of it is a chunk.
    """
    model, limits = critics.model, critics.model.config.limits
    memories = model.begin(recording.stacked(starts), recording.poses[starts])
    task = torch.from_numpy(recording.task[starts])
    before = torch.from_numpy(recording.before(starts))
    alive, judged = np.ones(len(starts), bool), None
    for c in range(chunks):
        pose = torch.stack([m.current.pose for m in memories])
        obs = features(model, torch.stack([m.current.latent for m in memories]), pose, task)
        unit = critics.agent.act(obs)
        commands = critics.reach.commands(pose, unit)
        poses = model.heads.adapter(pose, before, commands)
        latents, spread = model.chunk(
            memories, poses, chunk_noise(model, [seed * ROWS + i for i in range(len(starts))], c)
        )
        pictures = model.vae.pictures(latents)
        success, judged = model.heads.success(pictures, task, judged)
        seen = guards.seen_poses(model, pictures)
        measured = guards.readings(model, spread, latents, seen, poses, commands, pose)
        tripped = np.array([bool(guards.tripped(model, measured, c + 1, row)) for row in range(len(starts))])
        for row, memory in enumerate(memories):
            memory.push(End(latents[row, -1], poses[row, -1]))
        won = (success > limits.success).any(1).numpy() & ~tripped
        ahead = features(model, latents[:, -1], poses[:, -1], task)
        rows = np.flatnonzero(alive)
        into.add(
            Transition(
                obs[rows].numpy(),
                unit[rows].numpy(),
                won[rows].astype(np.float32),
                won[rows],
                (tripped | (c + 1 == chunks))[rows] & ~won[rows],
                ahead[rows].numpy(),
                np.zeros(len(rows), np.int32),
                np.zeros(len(rows), np.int64),
                np.full(len(rows), int(Source.OFFLINE), np.int8),
            ),
            rows.tolist(),
        )
        alive &= ~(won | tripped)
        before = commands[:, -1]
        if not alive.any():
            break


def train(
    model: WorldModel, recording: Recording, latents: Tensor, recipe: RavlRecipe, steps: int, seed: int
) -> tuple[Critics, list[dict[str, float]]]:
    """Critics and an actor, trained on imagined and a few recorded chunks.

    Args:
        model: The world model, on the CPU.
        recording: Its data.
        latents: Of all frames.
        recipe: Sizes and shares.
        steps: Updates.
        seed: Of everything random.

    Returns:
        Them, and the metrics of every :data:`EVERY`-th update.
    """
    rng = np.random.default_rng([seed, 11])
    critics = Critics.new(model, recording, recipe, seed)
    agent = critics.agent
    width = agent.critic.weights[0].shape[1] - agent.width
    store = ReplayBuffer(CAPACITY, width, agent.width, ROWS, recipe.gamma)
    starts = whole_chunks(recording, model.horizon)
    few = max(1, round(recipe.real * recipe.sac.batch))
    log = []
    for step in range(steps):
        if step % EVERY == 0:
            imagine(critics, recording, rng.choice(starts, ROWS), recipe.horizon, seed * 10_007 + step, store)
        batch = ravl.blend(
            store.sample(recipe.sac.batch - few, 1, rng),
            recorded(critics, recording, latents, few, recipe.gamma, rng),
        )
        metrics = ravl.update(agent, batch, recipe)
        if step % EVERY == 0:
            log.append({k: float(v) for k, v in metrics.items()})
    return critics, log

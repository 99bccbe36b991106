"""Which of several imagined chunks to carry out: likely to succeed, and well known (COPlanner, arXiv:2310.07220)."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from vla_stack.world_model.memory import Memory
from vla_stack.world_model.model import End, WorldModel
from vla_stack.world_model.quality import chunk_noise


class Critics(Protocol):
    """Who says what a chunk is worth; see :mod:`vla_stack.methods.imagined_critics`."""

    def value(self, now: End, task: int, commands: Tensor) -> Tensor:
        """Values [n] of chunks [n, H, 5] that begin in one frame."""
        ...

    def propose(self, now: End, task: int) -> Tensor:
        """A chunk of its own, [1, H, 5]."""
        ...


@torch.no_grad()
def choose(
    model: WorldModel,
    memory: Memory[End],
    before: Tensor,
    candidates: Tensor,
    task: int,
    seed: int,
    caution: float = 0.5,
    critics: Critics | None = None,
) -> tuple[int, Tensor]:
    """The best of n chunks of commands.

    Args:
        model: The world model.
        memory: The rollout so far.
        before: Command before the chunk, [5].
        candidates: Commands [n, L, 5]; L may span several chunks, and is one of them for critics.
        task: Index of the instruction.
        seed: Of the noise, the same for all candidates.
        caution: What a chunk costs whose disagreement is at the guard's limit (``limits.disagreement``; a model without
            one charges nothing). Positive for rollouts that are trained on; negative explores the real robot where the
            model knows least.
        critics: Say what a chunk is worth, instead of the judges.

    Returns:
        The index, and the score of each [n]: success probability at the end, or the smallest of the critics' values,
        less ``caution`` times the members' disagreement, summed over chunks.
    """
    latents, spread = look_ahead(model, memory, before, candidates, seed)
    if critics is not None:
        worth = critics.value(memory.current, task, candidates)
    else:
        told = torch.full((len(candidates),), task, device=candidates.device)
        worth = model.heads.success(model.vae.pictures(latents), told)[0][:, -1]
    limit = model.config.limits.disagreement
    score = worth - caution * spread / limit if 0 < limit < torch.inf else worth  # one member never disagrees
    return int(score.argmax()), score


def look_ahead(
    model: WorldModel, memory: Memory[End], before: Tensor, candidates: Tensor, seed: int
) -> tuple[Tensor, Tensor]:
    """What follows from candidates [n, L, 5]: latents [n, L, V, C, h, w], and disagreement [n], summed over chunks."""
    n, h = len(candidates), model.horizon
    memories = [memory.copy() for _ in range(n)]
    known, doubt = before.expand(n, -1), torch.zeros(n, device=candidates.device)
    seen: list[Tensor] = []
    for c in range(-(-candidates.shape[1] // h)):
        commands = candidates[:, c * h : (c + 1) * h]
        poses = model.heads.adapter(torch.stack([m.current.pose for m in memories]), known, commands)
        noise = chunk_noise(model, [seed], memory.chunks + c).expand(n, *[-1] * 5)
        latents, spread = model.chunk(memories, poses, noise)
        seen.append(latents[:, : commands.shape[1]])
        doubt += spread
        for row, m in enumerate(memories):
            m.push(End(latents[row, -1], poses[row, -1]))
        known = commands[:, -1]
    return torch.cat(seen, 1), doubt

"""What an off-policy learner around a flow policy remembers: decisions, and what the policy saw and offered at each.

The prefix of a VLA is what costs. It is frozen, so what it makes of an observation is computed once, when the policy
decides, and kept in float16; so are the chunks of the base that there were to choose from. An update computes no
picture, no prefix and no flow. Between two decisions k actions are executed: a reward is the discounted sum over them,
and what follows counts gamma^k.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vla_stack.methods.practice import ChunkOf
from vla_stack.methods.replay_buffer import Batch
from vla_stack.policies.decided import Decided


class Drawn(NamedTuple):
    """Rows of decisions.

    Attributes:
        batch: What critics and actors learn from; its ``next_obs`` are what was seen at the decisions that followed.
        offered: float [b, n, d], the base's chunks at those.
    """

    batch: Batch
    offered: Tensor

    def part(self, start: int, end: int) -> Drawn:
        """Some of the rows."""
        return Drawn(Batch(*(x[start:end] for x in self.batch)), self.offered[start:end])

    def to(self, device: torch.device | str) -> Drawn:
        """The same on a device; what is kept stays in main memory."""
        return Drawn(self.batch.to(device), self.offered.to(device))


@dataclass
class Decisions:
    """Observations [o] and the decisions [r] between them.

    Attributes:
        seen: float16 [o, f], what the policy observed.
        offered: float32 [o, n, p], chunks of the base, as wide as the method keeps them.
        at: int64 [r], the observation of each decision.
        after: int64 [r], the one after its executed actions; an end of the task has none, and names its own.
        actions: float32 [r, d].
        reward: float32 [r], discounted sum over the executed steps.
        discount: float32 [r], gamma to the power of the executed steps; 0 where the task ended.
    """

    seen: Tensor
    offered: Tensor
    at: Tensor
    after: Tensor
    actions: Tensor
    reward: Tensor
    discount: Tensor

    def __len__(self) -> int:
        return len(self.at)

    @classmethod
    def none(cls, seen: int, offered: int, width: int, offered_width: int | None = None) -> Decisions:
        """No decisions, of given widths."""
        shapes: tuple[Any, ...] = ((0, seen), (0, offered, offered_width or width))
        empty = torch.zeros(0, dtype=torch.int64)
        known = torch.zeros(shapes[0], dtype=torch.float16), torch.zeros(shapes[1])
        return cls(*known, empty, empty, torch.zeros(0, width), torch.zeros(0), torch.zeros(0))

    @classmethod
    def of(
        cls,
        rows: Decided,
        at: Sequence[int],
        after: Sequence[int],
        reward: Sequence[float],
        discount: Sequence[float],
    ) -> Decisions:
        """Decisions of what was decided [o]; ``at``, ``after``, ``reward`` and ``discount`` are [r]."""
        index = torch.tensor(at, dtype=torch.int64)
        return cls(
            rows.seen.half().cpu(),
            rows.drawn.float().cpu(),
            index,
            torch.tensor(after, dtype=torch.int64),
            rows.actions.float().cpu()[index],
            torch.tensor(reward, dtype=torch.float32),
            torch.tensor(discount, dtype=torch.float32),
        )

    def some(self, rows: NDArray[np.bool_]) -> Decisions:
        """Those of a mask [r], beside the same observations."""
        kept = torch.from_numpy(rows)
        columns = ("at", "after", "actions", "reward", "discount")
        return replace(self, **{name: getattr(self, name)[kept] for name in columns})

    def sample(self, n: int, rng: np.random.Generator, present: bool = False) -> Drawn:
        """Draw decisions uniformly."""
        return self.view(torch.from_numpy(rng.integers(len(self), size=n)), present)

    def view(self, rows: Tensor, present: bool = False) -> Drawn:
        """Given decisions, int64 [n], with what was offered at them (``present``), or at those that followed."""
        after = self.after[rows]
        seen, then = self.seen[self.at[rows]].float(), self.seen[after].float()
        unknown = torch.full((len(rows),), torch.nan)
        batch = Batch(seen, self.actions[rows], self.reward[rows], then, self.discount[rows], unknown, rows)
        return Drawn(batch, self.offered[self.at[rows] if present else after])

    def state_dict(self) -> dict[str, Tensor]:
        """Everything, as tensors."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Inverse of :meth:`state_dict`."""
        for name, column in state.items():
            setattr(self, name, column)


def joined(parts: Iterable[Decisions]) -> Decisions:
    """Several, at least one, in their order; copies each once."""
    every = list(parts)
    before = np.cumsum([0, *(len(part.seen) for part in every)])
    shifted = [replace(p, at=p.at + int(n), after=p.after + int(n)) for p, n in zip(every, before, strict=False)]
    return Decisions(*(torch.cat([getattr(part, f.name) for part in shifted]) for f in fields(Decisions)))


def mixed(own: Drawn, other: Drawn) -> Drawn:
    """Rows of both in turn, so that every slice of even length is half of each."""

    def turns(a: Tensor, b: Tensor) -> Tensor:
        return torch.stack((a, b), 1).flatten(0, 1)

    batch = Batch(*(turns(a, b) for a, b in zip(own.batch, other.batch, strict=True)))
    return Drawn(batch, turns(own.offered, other.offered))


def gathered(parts: Iterable[Decided]) -> Decided:
    """Several batches of decisions as one."""
    return Decided(*(torch.cat(column) for column in zip(*parts, strict=True)))


def row(decided: Decided, i: int) -> Decided:
    """One of a batch, as a batch of one."""
    return Decided(*(column[i : i + 1] for column in decided))


def episode(
    rows: Sequence[Decided], chunks: Sequence[ChunkOf], ended: bool, gamma: float
) -> tuple[list[int], list[int], list[float], list[float]]:
    """``at``, ``after``, ``reward`` and ``discount`` of an episode's decisions.

    Args:
        rows: What was decided; of an episode that was cut off also what would have been next, which its last decision
            bootstraps from.
        chunks: What came of each decision.
        ended: Whether the task ended, done or failed for good.
        gamma: Discount of a step.
    """
    n = len(chunks)
    if len(rows) != n + (not ended):
        raise ValueError(f"{n} chunks of an episode with ended={ended} have {len(rows)} observations")
    after = [*range(1, n), n - 1 if ended else n]
    discount = [gamma**chunk.executed for chunk in chunks]
    discount[-1] *= not ended
    return [*range(n)], after, [chunk.reward for chunk in chunks], discount

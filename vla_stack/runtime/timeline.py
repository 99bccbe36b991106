"""The plan of a robot: which action is due at which control step. The only place where chunks are merged.

A :class:`Timeline` is immutable. :func:`merge` is pure and touches only ticks that have not been dispatched, so a reply
that arrives at any moment cannot rewrite the past, and the same function serves a real robot and a simulated delay.
What happens where an old and a new chunk disagree is a :data:`MergeRule`: a function of the two plans over the ticks
still to come; the rules are in ``merging.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vla_stack.schema import ActionChunk


@dataclass(frozen=True, slots=True)
class Timeline:
    """Consecutive actions from control step ``start`` on, each with where it came from.

    Attributes:
        start: Control step of row 0.
        actions: float32 [N, A], commands in SI units.
        rid: int64 [N], request id of the chunk that a row came from.
        index: int64 [N], position of the row in that chunk.
        k_obs: int64 [N], control step of the observation behind the row.
        votes: int64 [N], chunks that a row averages.
    """

    start: int
    actions: NDArray[np.float32]
    rid: NDArray[np.int64]
    index: NDArray[np.int64]
    k_obs: NDArray[np.int64]
    votes: NDArray[np.int64]

    @classmethod
    def empty(cls, start: int, dims: int) -> Timeline:
        """A plan with no actions at all."""
        none = np.empty(0, np.int64)
        return cls(start, np.empty((0, dims), np.float32), none, none, none, none)

    @classmethod
    def of(cls, chunk: ActionChunk) -> Timeline:
        """A plan that is one chunk."""
        n = chunk.horizon
        return cls(
            start=chunk.origin,
            actions=chunk.actions,
            rid=np.full(n, chunk.rid, np.int64),
            index=np.arange(n, dtype=np.int64),
            k_obs=np.full(n, chunk.k_obs, np.int64),
            votes=np.ones(n, np.int64),
        )

    @property
    def end(self) -> int:
        """First control step that is not planned."""
        return self.start + len(self.actions)

    def row(self, k: int) -> int | None:
        """Row that is due at control step ``k``, None where nothing is planned."""
        return k - self.start if self.start <= k < self.end else None

    def since(self, k: int) -> Timeline:
        """The plan from control step ``k`` on."""
        cut = min(max(k - self.start, 0), len(self.actions))
        return self._rows(slice(cut, None), max(self.start, k))

    def until(self, k: int) -> Timeline:
        """The plan up to, not including, control step ``k``."""
        return self._rows(slice(0, max(k - self.start, 0)), self.start)

    def followed_by(self, later: Timeline) -> Timeline:
        """Both plans in a row; ``later`` starts where this one ends, or this one is empty."""
        if not len(self.actions):
            return later
        if later.start != self.end:
            raise ValueError(f"a plan that starts at {later.start} cannot follow one that ends at {self.end}")
        join = np.concatenate
        return Timeline(
            start=self.start,
            actions=join([self.actions, later.actions]),
            rid=join([self.rid, later.rid]),
            index=join([self.index, later.index]),
            k_obs=join([self.k_obs, later.k_obs]),
            votes=join([self.votes, later.votes]),
        )

    def _rows(self, rows: slice, start: int) -> Timeline:
        return Timeline(start, self.actions[rows], self.rid[rows], self.index[rows], self.k_obs[rows], self.votes[rows])


# (old, new) -> merged; both begin at the first tick that is still open, or are empty.
MergeRule = Callable[[Timeline, Timeline], Timeline]


@dataclass(frozen=True, slots=True)
class MergeReport:
    """What became of a chunk.

    Attributes:
        accepted: Whether the plan changed.
        reason: Why not; empty where accepted.
        delay: Measured delay d = k_next - origin in control steps, as counted, never latency over period.
        used: Rows of the chunk that the plan now holds.
        jump: Largest difference, over the dimensions that are not grippers, between the new and the old plan at
            ``k_next``, in each dimension's unit; 0 where there was no old plan.
    """

    accepted: bool
    reason: str = ""
    delay: int = 0
    used: int = 0
    jump: float = 0.0


def merge(
    timeline: Timeline, chunk: ActionChunk, k_next: int, rule: MergeRule, gripper: NDArray[np.bool_]
) -> tuple[Timeline, MergeReport]:
    """Lay ``chunk`` over ``timeline`` without touching a control step before ``k_next``.

    Args:
        timeline: The plan so far.
        chunk: A chunk that has been checked; ``chunk.actions[i]`` is due at ``chunk.origin + i``.
        k_next: First control step that has not been dispatched.
        rule: What to do where both plan.
        gripper: bool [A], dimensions left out of ``jump``.

    Returns:
        The new plan, which begins at ``k_next`` or later, and a report.
    """
    new = Timeline.of(chunk).since(k_next)
    old = timeline.since(k_next)
    # A chunk whose first step lies ahead leaves the plan until then as it is.
    merged = old.until(new.start).followed_by(rule(old.since(new.start), new))
    a, b = timeline.row(k_next), merged.row(k_next)
    jump = 0.0
    if a is not None and b is not None and not gripper.all():
        jump = float(np.abs(merged.actions[b] - timeline.actions[a])[~gripper].max())
    used = int((merged.rid == chunk.rid).sum())
    return merged, MergeReport(True, delay=k_next - chunk.origin, used=used, jump=jump)

"""What an actor hands to a learner: transitions at control steps, kept by episode, read as chunks.

Nothing about chunks is stored: a *chunk view* of length h that starts at any step is computed when a batch is drawn,

    R = sum_{i<k} gamma^i r_{t+i},   y = R + gamma^k * (0 if terminated else V(o_{t+k})),

where k is h, or less where the episode ends inside. A time limit is not an end of the task: the view then bootstraps
from the final observation, with gamma^k (Pardo et al., "Time Limits in Reinforcement Learning", arXiv:1712.00378).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vla_stack.errors import UserError

Array = NDArray[np.generic]


class Source(IntEnum):
    """Who acted."""

    OFFLINE = 0
    WARMUP = 1
    ONLINE = 2
    HUMAN = 3


class Transition(NamedTuple):
    """One control step of n environments side by side.

    Attributes:
        obs: float32 [n, o].
        action: float32 [n, a], executed, in [-1, 1].
        reward: float32 [n].
        terminated: bool [n]; the task ended. A time limit alone is not it.
        truncated: bool [n]; the episode was cut off.
        next_obs: float32 [n, o]; at an episode's end its final observation, not the next episode's first.
        chunk_index: int32 [n]; position of the action in the chunk that it was planned in.
        version: int64 [n]; which published policy planned it.
        source: int8 [n]; a :class:`Source`.
        extras: What else a method stores a step, [n, ...] each: e.g. log-probabilities or a denoising chain.
    """

    obs: Array
    action: Array
    reward: Array
    terminated: Array
    truncated: Array
    next_obs: Array
    chunk_index: Array
    version: Array
    source: Array
    extras: Mapping[str, Array] = {}

    def rows(self, which: slice) -> Transition:
        """The same of some environments."""
        columns = (column[which] for column in self[:-1])
        return Transition._make([*columns, {name: column[which] for name, column in self.extras.items()}])


class Batch(NamedTuple):
    """Chunk views.

    Attributes:
        obs: float32 [b, o] at the chunk's start.
        actions: float32 [b, h * a]; past an episode's end the last action is repeated.
        reward: float32 [b], discounted over the k executed steps.
        next_obs: float32 [b, o] after them.
        discount: float32 [b]: gamma^k, or 0 where the task ended.
        returns: float32 [b], Monte-Carlo return from the start on; NaN in episodes that have not ended.
        index: int64 [b], rows of the store.
    """

    obs: Tensor
    actions: Tensor
    reward: Tensor
    next_obs: Tensor
    discount: Tensor
    returns: Tensor
    index: Tensor

    def to(self, device: torch.device | str) -> Batch:
        """The same on a device; the buffer stays in main memory."""
        return Batch(*(x.to(device) for x in self))


class ReplayBuffer:
    """A ring of transitions for each environment, so that episodes lie in order of time.

    Args:
        capacity: Control steps of each environment that are kept.
        obs: Width of an observation.
        action: Width of an action.
        slots: Environments that are added side by side.
        gamma: Discount a control step.
        tail: Return after a truncation, for Monte-Carlo returns: r / (1 - gamma) where a failure would go on earning
            r for ever (Cal-QL's convention for sparse rewards).
        extras: Name -> shape of what else is stored a step, float32.
    """

    def __init__(
        self,
        capacity: int,
        obs: int,
        action: int,
        slots: int = 1,
        gamma: float = 0.99,
        tail: float = 0.0,
        extras: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        self.capacity, self.slots, self.gamma, self.tail = capacity, slots, gamma, tail
        n = capacity * slots
        shapes: dict[str, tuple[tuple[int, ...], type]] = {
            "obs": ((obs,), np.float32),
            "action": ((action,), np.float32),
            "reward": ((), np.float32),
            "terminated": ((), np.bool_),
            "truncated": ((), np.bool_),
            "next_obs": ((obs,), np.float32),
            "chunk_index": ((), np.int32),
            "version": ((), np.int64),
            "source": ((), np.int8),
            "returns": ((), np.float32),
        } | {name: (shape, np.float32) for name, shape in (extras or {}).items()}
        self.columns: dict[str, NDArray] = {name: np.zeros((n, *s), t) for name, (s, t) in shapes.items()}
        self._extras = tuple(extras or ())
        self._tensors = {name: torch.from_numpy(self.columns[name]) for name in ("obs", "action", "next_obs")}
        self._won = np.zeros(n, np.bool_)  # of each step, whether its episode has ended with the task
        self._base = np.arange(slots) * capacity
        self.steps = np.zeros(slots, np.int64)  # of each environment, ever added to this ring
        self._before = np.zeros(slots, np.int64)  # of each environment, those that a ring it was loaded from had lost
        self._since = np.zeros(slots, np.int64)  # step at which each environment's open episode began

    def __len__(self) -> int:
        return int(np.minimum(self.steps, self.capacity).sum())

    @property
    def total(self) -> int:
        """Control steps ever added, of all environments."""
        return int(self.steps.sum() + self._before.sum())

    def add(self, t: Transition, slots: Sequence[int] | slice = slice(None)) -> None:
        """Append one control step of every environment, or of those in ``slots``; closes episodes that ended in it."""
        at = self._base[slots] + self.steps[slots] % self.capacity
        for name in Transition._fields[:-1]:
            self.columns[name][at] = getattr(t, name)
        for name in self._extras:
            self.columns[name][at] = t.extras[name]
        self.columns["returns"][at] = np.nan
        self._won[at] = False
        self.steps[slots] += 1
        for slot in np.arange(self.slots)[slots][np.logical_or(t.terminated, t.truncated)]:
            self._close(int(slot))

    def clear(self) -> None:
        """Forget everything, as an on-policy method does after each iteration; episodes that are open go on."""
        self.steps[:] = self._before[:] = 0
        self._since[:] = 0

    def cut(self, slots: Sequence[int] | slice = slice(None)) -> None:
        """Close episodes that are open, as if a time limit had ended them: a stopped actor cannot go on with them."""
        for slot in np.arange(self.slots)[slots]:
            if self._since[slot] == self.steps[slot]:
                continue
            newest = self._base[slot] + (self.steps[slot] - 1) % self.capacity
            self.columns["truncated"][newest] = True
            self._close(int(slot))

    def rows(self, slot: int = 0) -> NDArray[np.int64]:
        """Rows of an environment in order of time, oldest first."""
        first = max(0, self.steps[slot] - self.capacity)
        return self._base[slot] + np.arange(first, self.steps[slot]) % self.capacity

    def at(self, row: int) -> Transition:
        """The control step of a row, of one environment."""
        values = {name: self.columns[name][row][None] for name in Transition._fields[:-1]}
        return Transition(**values, extras={name: self.columns[name][row][None] for name in self._extras})

    def sample(
        self, n: int, horizon: int, rng: np.random.Generator, closed: bool = False, succeeded: bool = False
    ) -> Batch:
        """Draw chunk views uniformly from all steps at which one begins.

        Args:
            n: Number of views.
            horizon: h.
            rng: Source of the draw.
            closed: From finished episodes alone, whose Monte-Carlo returns are known.
            succeeded: From finished episodes alone that the task ended and no time limit did; for rewards under which
                nothing but success ends an episode.

        Raises:
            ValueError: There is nothing to draw.
        """
        if not len(self):
            raise ValueError("the store is empty")
        index = self._draw(n, rng)
        if horizon > 1 or closed or succeeded:
            for _ in range(1000):
                bad = ~self._whole(index, horizon)
                if closed:
                    bad |= np.isnan(self.columns["returns"][index])
                if succeeded:
                    bad |= ~self._won[index]
                if not (count := int(bad.sum())):
                    break
                index[bad] = self._draw(count, rng)
            else:
                raise ValueError(f"no chunk of {horizon} steps" + " in a finished episode" * closed)
        return self.view(index, horizon)

    def view(self, index: NDArray[np.int64], horizon: int) -> Batch:
        """Chunk views that begin at given rows."""
        columns, rows = self.columns, torch.from_numpy(index)
        returns = torch.from_numpy(columns["returns"][index])
        obs = self._tensors["obs"].index_select(0, rows)
        if horizon == 1:
            reward = torch.from_numpy(columns["reward"][index])
            discount = torch.from_numpy(np.float32(self.gamma) * ~columns["terminated"][index])
            action = self._tensors["action"].index_select(0, rows)
            return Batch(obs, action, reward, self._tensors["next_obs"].index_select(0, rows), discount, returns, rows)
        window, k = self._window(index, horizon)
        offset = np.minimum(np.arange(horizon), k[:, None] - 1)
        window = np.take_along_axis(window, offset, 1)  # past the end: the last step again
        last = window[:, -1]
        powers = self.gamma ** np.arange(horizon + 1)
        executed = np.arange(horizon) < k[:, None]
        reward = (columns["reward"][window] * powers[:horizon] * executed).sum(1)
        discount = powers[k] * ~columns["terminated"][last]
        return Batch(
            obs,
            self._tensors["action"].index_select(0, torch.from_numpy(window.reshape(-1))).view(len(index), -1),
            torch.from_numpy(reward.astype(np.float32)),
            self._tensors["next_obs"].index_select(0, torch.from_numpy(last)),
            torch.from_numpy(discount.astype(np.float32)),
            returns,
            rows,
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Everything, as tensors; arrays are not copied."""
        columns = {f"column.{name}": torch.from_numpy(c) for name, c in self.columns.items()}
        counts = {"steps": self.steps, "before": self._before, "since": self._since}
        return columns | {name: torch.from_numpy(count) for name, count in counts.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Inverse of :meth:`state_dict`, for a store of the same arguments, or of another capacity.

        In the latter rings that have gone round are laid out anew, with the newest steps that fit.

        Raises:
            UserError: It is of another number of environments.
        """
        steps = state["steps"].numpy()
        if len(steps) != self.slots:
            raise UserError(
                f"what the run remembers is of {len(steps)} environments, not of {self.slots}",
                "go on with its own method.rollouts, method.workers and method.num_envs",
            )
        saved = len(state["column.reward"]) // self.slots
        same = saved == self.capacity
        kept = steps if same else np.minimum(steps, min(saved, self.capacity))
        for slot in range(self.slots):
            order = np.arange(saved) if same else np.arange(steps[slot] - kept[slot], steps[slot]) % saved
            for name, column in self.columns.items():
                rows = state[f"column.{name}"].numpy()
                column[self._base[slot] + np.arange(len(order))] = rows[slot * saved + order]
        self.steps[:] = kept
        self._before[:] = steps - kept + (state["before"].numpy() if "before" in state else 0)
        self._since[:] = np.maximum(state["since"].numpy() - (steps - kept), 0)
        for slot in range(self.slots):
            rows = self.rows(slot)
            ends = np.flatnonzero(self.columns["terminated"][rows] | self.columns["truncated"][rows])
            closed = rows[: ends[-1] + 1] if len(ends) else rows[:0]
            last = rows[ends[np.searchsorted(ends, np.arange(len(closed)))]]
            self._won[closed] = self.columns["terminated"][last]

    # Internals ------------------------------------------------------------------------------------------------------

    def _draw(self, n: int, rng: np.random.Generator) -> NDArray[np.int64]:
        filled = np.minimum(self.steps, self.capacity)
        if self.slots == 1:
            return rng.integers(filled[0], size=n)
        ends = filled.cumsum()
        flat = rng.integers(ends[-1], size=n)
        slot = np.searchsorted(ends, flat, side="right")
        return self._base[slot] + flat - (ends - filled)[slot]

    def _window(self, index: NDArray[np.int64], horizon: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Rows [b, h] of the h steps from each row on, and how many of them, k [b], belong to its episode."""
        slot, at = np.divmod(index, self.capacity)
        window = slot[:, None] * self.capacity + (at[:, None] + np.arange(horizon)) % self.capacity
        over = self.columns["terminated"][window] | self.columns["truncated"][window]
        return window, np.where(over.any(1), over.argmax(1) + 1, horizon)

    def _whole(self, index: NDArray[np.int64], horizon: int) -> NDArray[np.bool_]:
        """Whether the store holds all k steps of a view: chunks that are still being executed are not drawn."""
        slot, at = np.divmod(index, self.capacity)
        available = (self.steps[slot] - 1 - at) % self.capacity + 1  # steps from the row to the newest
        return self._window(index, horizon)[1] <= available

    def _close(self, slot: int) -> None:
        """Fill in the Monte-Carlo returns of the episode that the newest step ended, and whether it succeeded."""
        end = int(self.steps[slot])
        start = max(int(self._since[slot]), end - self.capacity)
        rows = self._base[slot] + np.arange(start, end) % self.capacity
        value = 0.0 if self.columns["terminated"][rows[-1]] else self.tail
        for row in rows[::-1]:
            value = float(self.columns["reward"][row]) + self.gamma * value
            self.columns["returns"][row] = value
        self._won[rows] = self.columns["terminated"][rows[-1]]
        self._since[slot] = end


def mix(own: Batch, other: Batch) -> Batch:
    """Rows of two batches of equal size in turn, so that every slice of even length is half of each."""
    return Batch(*(torch.stack(pair, 1).flatten(0, 1) for pair in zip(own, other, strict=True)))

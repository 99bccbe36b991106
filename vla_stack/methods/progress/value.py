"""How much time an episode still takes to succeed, as a distribution, and what follows: values and advantages.

Amin et al., "pi*0.6: a VLA That Learns From Experience" (arXiv:2511.14759), section IV: the value of an observation is
the expectation of a distribution over binned returns, which is fitted by cross-entropy to the returns that recorded
episodes had, whoever acted; a return is minus the time to success, and a large negative number for a failure. Here

    G_t = -min(left_t / T, 1) in an episode that succeeds, -2 in one that fails,
    V(o_t) = sum_k p(k | o_t) G_k,         A_t = V(o_{t+n}) - n / T - V(o_t),

in units of T, the time that most successes need: an action that loses no time has A = 0, one that gets ahead of what
is usual there A > 0. Unlike there, features are those of a frozen policy, and no frame is valued by a head that has
seen its episode: such a head knows how the episode ends, which leaves no advantage to be seen.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor, nn

FAILED = -2.0  # return of an episode that fails, where success at the last moment has -1
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Bins:
    """What a return may be: ``count`` of equal width in [-1, 0], and a failure as the last.

    Attributes:
        count: How many, without the failure.
        horizon: T, control steps.
    """

    count: int
    horizon: float

    @property
    def returns(self) -> Float[Tensor, " k"]:
        """Of each bin, the middle of it."""
        return torch.cat([-(torch.arange(self.count) + 0.5) / self.count, torch.tensor([FAILED])])

    def of(self, left: Floats) -> NDArray[np.int64]:
        """Bin of each number of steps that are left, infinite where none will succeed."""
        inside = np.minimum(left / self.horizon * self.count, self.count - 1)
        return np.where(np.isfinite(left), inside, self.count).astype(np.int64)


class ValueHead(nn.Module):
    """Logits of the bins.

    Args:
        inputs: Width of what a policy observed.
        hidden: Width of the hidden layer.
        bins: What is told apart.
    """

    def __init__(self, inputs: int, hidden: int, bins: Bins) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(inputs, hidden), nn.SiLU(), nn.Linear(hidden, bins.count + 1))
        self.returns: Tensor
        self.register_buffer("returns", bins.returns)

    def forward(self, seen: Float[Tensor, "b f"]) -> Float[Tensor, "b k"]:
        return self.layers(seen)  # type: ignore[no-any-return]

    def told(self, seen: Float[Tensor, "b f"]) -> tuple[Tensor, Tensor, Tensor]:
        """Value [b], probability of success [b], and of being there but for one bin [b]."""
        p = self(seen).softmax(-1)
        return p @ self.returns, 1.0 - p[:, -1], p[:, 0]


def train(
    seen: Float[Tensor, "n f"], bins: NDArray[np.int64], head: ValueHead, steps: int, batch: int, lr: float, seed: int
) -> None:
    """Fit a head by cross-entropy; the learning rate falls to 0 as a cosine does."""
    rng, target = np.random.default_rng(seed), torch.from_numpy(bins).to(seen.device)
    optimizer = torch.optim.AdamW(head.parameters(), lr, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        rows = torch.from_numpy(rng.integers(len(seen), size=batch)).to(seen.device)
        loss = F.cross_entropy(head(seen[rows]), target[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


def steps_left(success: NDArray[np.bool_], first: NDArray[np.int64], end: NDArray[np.int64]) -> Floats:
    """Control steps to each frame's success, float [N], 0 at the frame whose action brings it; infinite without one."""
    left = np.full(len(success), np.inf)
    for a, b in zip(first, end, strict=True):
        if len(at := np.flatnonzero(success[a:b])):
            left[a:b] = np.maximum(at[0] - np.arange(b - a), 0)
    return left


def advantages(
    values: Floats, left: Floats, first: NDArray[np.int64], end: NDArray[np.int64], n: int, T: float
) -> Floats:
    """A of each frame, over ``n`` control steps or what is left of its episode, float [N].

    Behind the last frame the return is known: 0 after a success, that of a failure otherwise.
    """
    out = np.zeros(len(values))
    for a, b in zip(first, end, strict=True):
        known = np.append(values[a:b], 0.0 if np.isfinite(left[b - 1]) else FAILED)
        after = np.minimum(np.arange(b - a) + n, b - a)
        out[a:b] = known[after] - (after - np.arange(b - a)) / T - values[a:b]
    return out

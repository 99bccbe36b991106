"""Heads that predict a chunk in one step, each from the final states of learnt queries.

They share the expert with the flow head: one query vector stands at every step of the chunk, positions tell the steps
apart, and there is no time. All three answer the same questions, so a loss or a sampler need not know which it has.
``noise`` is standard normal scaled by the policy's ``noise_scale``, as the flow starts from: 0 gives the most central
action.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributions import Normal

LOG_STD_RANGE = (-5.0, 2.0)  # in units of the normalised action
BINS = 256


class RegressionHead(nn.Linear):
    """The action itself, learnt by mean absolute error: the head of the regression baseline pi_reg (arXiv:2511.19433).

    Args:
        width: Width of a state.
        action_dim: Entries of one action.
    """

    def point(self, states: Float[Tensor, "b n d"]) -> Float[Tensor, "b n a"]:
        """The predicted action."""
        return self(states)

    def error(self, states: Float[Tensor, "b n d"], actions: Float[Tensor, "b n a"]) -> Float[Tensor, "b n a"]:
        """What training minimises, entry by entry."""
        return (self(states) - actions).abs()

    def sample(self, states: Float[Tensor, "b n d"], noise: Float[Tensor, "b n a"]) -> Float[Tensor, "b n a"]:
        """An action for given noise; this head has none."""
        return self(states)


class GaussianHead(nn.Module):
    """An independent normal distribution for every entry.

    Args:
        width: Width of a state.
        action_dim: Entries of one action.
    """

    def __init__(self, width: int, action_dim: int) -> None:
        super().__init__()
        self.mean, self.log_std = nn.Linear(width, action_dim), nn.Linear(width, action_dim)

    def distribution(self, states: Float[Tensor, "b n d"]) -> Normal:
        """Distributions [b, n, a], in float32."""
        return Normal(self.mean(states).float(), self.log_std(states).float().clamp(*LOG_STD_RANGE).exp())

    def point(self, states: Float[Tensor, "b n d"]) -> Float[Tensor, "b n a"]:
        return self.mean(states)

    def log_prob(self, states: Float[Tensor, "b n d"], actions: Float[Tensor, "b n a"]) -> Float[Tensor, "b n a"]:
        """Log-density of every entry."""
        return self.distribution(states).log_prob(actions)

    def error(self, states: Float[Tensor, "b n d"], actions: Float[Tensor, "b n a"]) -> Float[Tensor, "b n a"]:
        return -self.log_prob(states, actions)

    def sample(self, states: Float[Tensor, "b n d"], noise: Float[Tensor, "b n a"]) -> Float[Tensor, "b n a"]:
        d = self.distribution(states)
        return d.mean + d.stddev * noise


class BinsHead(nn.Linear):
    """A categorical distribution over 256 equal bins for every entry (RT-2, Brohan et al. 2023), all in parallel.

    Args:
        width: Width of a state.
        action_dim: Entries of one action.
        limit: Bins cover [-limit, limit] of the normalised action; what lies beyond falls into the last one.
    """

    def __init__(self, width: int, action_dim: int, limit: float) -> None:
        super().__init__(width, action_dim * BINS)
        self.limit = limit

    def log_probs(self, states: Float[Tensor, "b n d"]) -> Float[Tensor, "b n a bins"]:
        """Log-probability of every bin, in float32."""
        return self(states).float().unflatten(-1, (-1, BINS)).log_softmax(-1)

    def index(self, actions: Float[Tensor, "b n a"]) -> Int[Tensor, "b n a"]:
        """The bin that holds an action."""
        return ((actions / self.limit + 1.0) * (BINS / 2)).floor().long().clamp(0, BINS - 1)

    def centre(self, index: Int[Tensor, "b n a"]) -> Float[Tensor, "b n a"]:
        """The action in the middle of a bin."""
        return ((index.float() + 0.5) * (2.0 / BINS) - 1.0) * self.limit

    def point(self, states: Float[Tensor, "b n d"]) -> Float[Tensor, "b n a"]:
        return self.centre(self.log_probs(states).argmax(-1))

    def log_prob(self, states: Float[Tensor, "b n d"], actions: Float[Tensor, "b n a"]) -> Float[Tensor, "b n a"]:
        """Log-probability of the bin of every entry; not a density, so it never exceeds 0."""
        return self.log_probs(states).gather(-1, self.index(actions)[..., None])[..., 0]

    def error(self, states: Float[Tensor, "b n d"], actions: Float[Tensor, "b n a"]) -> Float[Tensor, "b n a"]:
        return -self.log_prob(states, actions)

    def sample(self, states: Float[Tensor, "b n d"], noise: Float[Tensor, "b n a"]) -> Float[Tensor, "b n a"]:
        """Inverse of the distribution function at the quantile of ``noise``: the median where it is 0."""
        below = self.log_probs(states).exp().cumsum(-1)
        quantile = torch.special.ndtr(noise.float())[..., None]
        return self.centre(torch.searchsorted(below, quantile)[..., 0].clamp(max=BINS - 1))


OneStepHead = RegressionHead | GaussianHead | BinsHead


HEADS: dict[str, Callable[[int, int, float], OneStepHead]] = {  # `VlaConfig.head` -> (width, action_dim, limit)
    "regression": lambda width, action_dim, limit: RegressionHead(width, action_dim),
    "gaussian": lambda width, action_dim, limit: GaussianHead(width, action_dim),
    "bins": BinsHead,
}

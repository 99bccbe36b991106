"""A squashed Gaussian over actions or chunks: a = tanh(u), u ~ N(mu(s), sigma(s)), with its exact density."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vla_stack.policies.critics import NORM_EPS, Ensemble

LOG_STD = (-20.0, 2.0)  # of stable-baselines3 and RLPD; WSRL: log 1e-5, log 10
# Of an action that is imitated. The likelihood of 1 is infinite; WSRL's code clips its data to 0.99999, which lies so
# far out before squashing (6.1) that a Gaussian learns little but which actions are saturated.
LARGEST = 0.9


class GaussianActor(nn.Module):
    """mu and log sigma from one network (Haarnoja et al., "Soft Actor-Critic Algorithms", arXiv:1812.05905).

    Args:
        inputs: Width of the observation.
        actions: Width of the action.
        hidden: Widths of the hidden layers.
        layer_norm: Layer norm before each ReLU.
        generator: Source of the initial weights.
        log_std: Bounds of log sigma.
        norm_eps: Added to the variance of a layer norm.
    """

    def __init__(
        self,
        inputs: int,
        actions: int,
        hidden: Sequence[int] = (256, 256),
        layer_norm: bool = True,
        generator: torch.Generator | None = None,
        log_std: tuple[float, float] = LOG_STD,
        norm_eps: float = NORM_EPS,
    ) -> None:
        super().__init__()
        self.log_std = log_std
        self.net = Ensemble(1, inputs, hidden, 2 * actions, layer_norm, generator, norm_eps)

    def forward(self, obs: Float[Tensor, "b o"]) -> tuple[Float[Tensor, "b a"], Float[Tensor, "b a"]]:
        """mu and log sigma, before squashing."""
        mean, log_std = self.net(obs)[0].chunk(2, -1)
        return mean, log_std.clamp(*self.log_std)

    def mode(self, obs: Float[Tensor, "b o"]) -> Float[Tensor, "b a"]:
        """tanh(mu)."""
        return torch.tanh(self(obs)[0])

    def sample(self, obs: Float[Tensor, "b o"], generator: torch.Generator, draws: int = 1) -> tuple[Tensor, Tensor]:
        """Reparameterised actions and their log-densities.

        Returns:
            ``[b, a]`` and ``[b]``; with several draws ``[draws, b, a]`` and ``[draws, b]``.
        """
        mean, log_std = self(obs)
        shape = mean.shape if draws == 1 else (draws, *mean.shape)
        noise = torch.randn(shape, generator=generator, dtype=mean.dtype).to(mean.device)
        before = mean + log_std.exp() * noise
        return torch.tanh(before), log_density(before, noise, log_std)

    def nll(self, obs: Float[Tensor, "b o"], actions: Float[Tensor, "b a"]) -> tuple[Float[Tensor, " b"], Tensor]:
        """-log pi(a|o) of actions in [-1, 1], at most ``LARGEST`` of them; and log sigma.

        Maximum likelihood of a squashed Gaussian: the term by which the reference code of CQL begins its policies
        (``policy_eval_start``; Kumar et al., arXiv:2006.04779), without the entropy beside it.
        """
        before = torch.atanh(actions.clamp(-LARGEST, LARGEST))
        mean, log_std = self(obs)
        return -log_density(before, (before - mean) * (-log_std).exp(), log_std), log_std


def log_density(before: Tensor, noise: Tensor, log_std: Tensor) -> Tensor:
    """log p of tanh(before), with before = mu + sigma * noise, summed over the last dimension.

    log(1 - tanh(u)^2) = 2 (log 2 - u - softplus(-2u)), which does not underflow.
    """
    squash = 2.0 * (math.log(2.0) - before - F.softplus(-2.0 * before))
    return (-0.5 * noise.square() - log_std - 0.5 * math.log(2.0 * math.pi) - squash).sum(-1)

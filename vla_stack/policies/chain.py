"""The noisy Euler chain: what gives a flow policy a likelihood that policy gradients can use.

Between Euler steps Gaussian noise of a learnt, bounded size is injected, so that the path from noise to action becomes
a Markov chain of normal transitions whose joint probability is exact (ReinFlow, Zhang et al. 2025, arXiv:2505.22094,
sections 4.1 and 4.2). In this project's time, t_k = 1 - k/K falls from 1 (noise) to 0 (actions):

    x^0 ~ N(0, I),   mu_k = x^k - v(x^k, t_k) / K,   x^{k+1} ~ N(mu_k, sigma_k^2)

Deployment leaves the noise out: sigma = 0 is the sampler of :func:`vla_stack.policies.flow.euler`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from vla_stack.policies.contract import Context, FlowPolicy

NOISE_LIMIT = 3.0  # standard deviations beyond which injected noise is cut; a constant factor of the density


def times(steps: int, like: Tensor) -> Float[Tensor, " k"]:
    """Flow times t_k = 1 - k/K at which a chain of K steps asks for the velocity."""
    return 1.0 - torch.arange(steps, dtype=like.dtype, device=like.device) / steps


def transition_mean(x: Tensor, velocity: Tensor, steps: int, limit: float) -> Tensor:
    """Mean of the next point; the one place where it is bounded, for sampling and for the likelihood alike."""
    return (x - 1.0 / steps * velocity).clamp(-limit, limit)


def standard_noise(x: Tensor, generator: torch.Generator | Sequence[torch.Generator]) -> Tensor:
    """Standard normal noise like ``x`` [b, ...], of one source or of one for each row."""
    if isinstance(generator, torch.Generator):
        return torch.randn(x.shape, generator=generator, dtype=x.dtype, device=generator.device).to(x.device)
    return torch.stack([torch.randn(x.shape[1:], generator=g, dtype=x.dtype) for g in generator]).to(x.device)


@torch.no_grad()
def sample_chain(
    policy: FlowPolicy,
    context: Context,
    noise: Float[Tensor, "b h w"],
    std: Float[Tensor, "b_or_1 k h_or_1 w_or_1"],
    generator: torch.Generator | Sequence[torch.Generator],
    limit: float = math.inf,
) -> Float[Tensor, "b k+1 h w"]:
    """Run the noisy chain; its last point is the action chunk, normalised.

    Args:
        policy: The policy.
        context: Its prefix of b observations.
        noise: The first point x^0.
        std: Standard deviation of the noise injected after each of K steps.
        generator: Source of that noise; or one for each row, whose chain then does not depend on its batch.
        limit: Bound of each transition's mean, as in the authors' code (1 there, for actions in [-1, 1]).

    Returns:
        All points x^0 ... x^K, which the likelihood is evaluated on.
    """
    steps = std.shape[1]
    points = [noise]
    for k, t in enumerate(times(steps, noise)):
        x = points[-1]
        velocity = policy.velocity(context, x, t.expand(len(x)))
        eps = standard_noise(x, generator)
        mean = transition_mean(x, velocity, steps, limit)
        points.append(mean + std[:, k] * eps.clamp(-NOISE_LIMIT, NOISE_LIMIT))
    return torch.stack(points, dim=1)


def chain_log_prob(
    policy: FlowPolicy,
    context: Context,
    chain: Float[Tensor, "b k+1 h w"],
    std: Float[Tensor, "b_or_1 k h_or_1 w_or_1"],
    limit: float = math.inf,
) -> Float[Tensor, "b k+1 h w"]:
    """Log-probability of a stored chain under the present policy, entry by entry, with gradients.

    Entry [:, 0] is log N(x^0; 0, 1), entry [:, k + 1] that of the transition from x^k; their sum is that of the chain.
    The velocities of all steps are computed in one batch, in the order of ``context.repeat(K)``.

    Args:
        policy: The policy.
        context: Its prefix of b observations.
        chain: Points of :func:`sample_chain`; never drawn anew.
        std: As in :func:`sample_chain`.
        limit: As in :func:`sample_chain`.
    """
    steps = chain.shape[1] - 1
    x = chain[:, :-1]
    t = times(steps, chain).repeat(len(chain))
    velocity = policy.velocity(context.repeat(steps), x.flatten(0, 1), t).unflatten(0, (-1, steps))
    mean = transition_mean(x, velocity, steps, limit)
    return torch.cat((normal(chain[:, :1], 0.0, torch.ones_like(chain[:, :1])), normal(chain[:, 1:], mean, std)), dim=1)


def normal(x: Tensor, mean: Tensor | float, std: Tensor) -> Tensor:
    """Logarithm of the density of N(mean, std^2) at x, entry by entry."""
    return -0.5 * ((x - mean) / std).square() - std.log() - 0.5 * math.log(2.0 * math.pi)

"""What stands for the log-probability of an executed chunk under a policy, for every head.

* ``bins``, ``gaussian``: its log-probability, the sum over what was executed. A Gaussian's width is the reference's, or
  else a preference is met by shrinking it.
* flow: minus half the regression error of the velocity at given (t, noise). From the likelihood of the denoising chain
  by Jensen's inequality and with the forward kernel in place of the posterior, as Diffusion-DPO (Wallace et al. 2023,
  arXiv:2311.12908) has it; its differences stand for log-ratios only where policy and reference share (t, noise).
* flow with recorded sampling noise: the exact log-probability of the sampling chain (ReinFlow, arXiv:2505.22094).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributions import Normal
from torch.utils.checkpoint import checkpoint

from vla_stack.errors import UserError
from vla_stack.policies import flow
from vla_stack.policies.chain import chain_log_prob
from vla_stack.policies.contract import FlowPolicy
from vla_stack.policies.heads import BinsHead, GaussianHead
from vla_stack.schema import ACTION

CHAIN = "chain"


class Draws(NamedTuple):
    """Noise [n, m, h, d] and times [n, m] for n decisions."""

    noise: Tensor
    t: Tensor


class Score(NamedTuple):
    """Of each decision: log-probability [n], mean imitation error of an entry [n], and a Gaussian head's width."""

    log_prob: Tensor
    error: Tensor
    spread: Tensor | None


def shared_draws(
    policy: FlowPolicy,
    actions: Float[Tensor, "n h a"],
    pair: Int[Tensor, " n"],
    decision: Int[Tensor, " n"],
    m: int,
    generator: torch.Generator,
) -> Draws | None:
    """(t, noise) of every decision, the same for decision c of a pair's winner and loser; None for other heads."""
    if policy.head is not None:
        return None
    pairs, length = int(pair.max()) + 1, int(decision.max()) + 1
    shape, device = (pairs * m, actions.shape[1], policy.noise_dim), actions.device
    drawn = [  # decision by decision, so that longer trajectories share what shorter ones have
        Draws(flow.sample_noise(shape, generator, device), flow.sample_time(shape[0], generator, device))
        for _ in range(length)
    ]
    noise, t = (torch.stack([of.unflatten(0, (pairs, m)) for of in column]) for column in zip(*drawn, strict=True))
    return Draws(noise[decision, pair], t[decision, pair])


def score(
    policy: Any,
    batch: dict[str, Any],
    draws: Draws | None,
    sigma: float = 0.1,
    micro: int = 256,
    spread: Tensor | None = None,
) -> Score:
    """Score all decisions of a batch, ``micro`` at a time; their activations are computed again in the backward pass.

    Args:
        policy: In evaluation mode.
        batch: See :func:`vla_stack.methods.grape.loss.loss`.
        draws: Of :func:`shared_draws`.
        sigma: Noise of each step of ``chain``.
        micro: Rows at a time.
        spread: Width of a Gaussian head; None takes its own.

    Raises:
        UserError: The head has no likelihood.
    """
    n = len(batch[ACTION])

    def rows(lo: int) -> Score:
        part = {k: v[lo : lo + micro] if isinstance(v, Tensor | list) and len(v) == n else v for k, v in batch.items()}
        own = None if draws is None else Draws(*(x[lo : lo + micro] for x in draws))
        return _score(policy, part, own, sigma, None if spread is None else spread[lo : lo + micro])

    again = torch.is_grad_enabled() and n > micro
    parts = [checkpoint(rows, lo, use_reentrant=False) if again else rows(lo) for lo in range(0, n, micro)]
    columns = [None if column[0] is None else torch.cat(column) for column in zip(*parts, strict=True)]
    return Score(*columns)


def _score(
    policy: Any,
    batch: dict[str, Any],
    draws: Draws | None,
    sigma: float,
    spread: Tensor | None,
) -> Score:
    actions, valid, context = batch[ACTION], flow.valid_entries(batch), policy.encode(batch)
    entries = valid.sum((1, 2)).clamp(min=1)
    head = policy.head
    if head is not None:  # no entry is read that does not count; a flow's tokens read the whole chunk
        actions = torch.where(valid, actions, 0.0)
    if isinstance(head, GaussianHead):
        own = head.distribution(policy.query_states(context))
        spread = own.stddev if spread is None else spread
        log_prob = torch.where(valid, Normal(own.mean, spread).log_prob(actions), 0.0).sum((1, 2))
        return Score(log_prob, -log_prob / entries, spread)
    if isinstance(head, BinsHead):
        log_prob = torch.where(valid, head.log_prob(policy.query_states(context), actions), 0.0).sum((1, 2))
        return Score(log_prob, -log_prob / entries, None)
    if head is not None:
        raise UserError(f"the head '{policy.config.head}' has no likelihood", "use head=flow, gaussian or bins")
    assert draws is not None
    m = draws.t.shape[1]
    noise, t = draws.noise.flatten(0, 1), draws.t.flatten()
    several = context.repeat(m) if m > 1 else context
    squared = flow.squared_error(policy, several, actions.repeat_interleave(m, 0), noise, t)
    error = flow.masked_mean(squared, valid.repeat_interleave(m, 0)).view(-1, m)
    if CHAIN in batch:
        std = batch[CHAIN].new_full((1, batch[CHAIN].shape[1] - 1, 1, 1), sigma)
        steps = chain_log_prob(policy, context, batch[CHAIN], std)[:, 1:, :, : actions.shape[-1]]  # x^0 cancels
        return Score(torch.where(valid[:, None], steps, 0.0).sum((1, 2, 3)), error.mean(1), None)
    return Score(-0.5 * error.mean(1), error.mean(1), None)

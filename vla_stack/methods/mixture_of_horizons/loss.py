"""Mixture of horizons: imitation by a policy that predicts several chunk lengths at once.

"Mixture of Horizons in Action Chunking" (arXiv:2511.19433v2, ICML 2026), eq. 17. Trains policies of type ``moh``.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from vla_stack.policies import flow
from vla_stack.policies.mixture_of_horizons import Horizons, load_balance
from vla_stack.policies.modeling_moh import MohPolicy
from vla_stack.schema import ACTION


def loss(
    policy: MohPolicy,
    batch: dict[str, Any],
    generator: torch.Generator,
    balance: float = 1e-3,
    draws: int = 1,
) -> tuple[Tensor, dict[str, Tensor]]:
    """``L_mix + sum_n L_n + balance * L_bal``.

    All branches see the same noise and time. L_n is the mean over the h_n steps of branch n, so early steps, which
    many branches predict, weigh more. Each mean is over steps within the episode.

    Args:
        policy: The policy; whether its gate is noisy, or replaced by the mean, is in its configuration.
        batch: Preprocessed batch of b samples: observations with images uint8 [b, h, w, 3] or float [b, 3, h, w],
            ``action`` [b, h, a] and the padding of :func:`flow.valid_entries`.
        generator: Source of noise, times and the gate's noise.
        balance: Weight of the gate's load balance.
        draws: (noise, time) pairs an observation.

    Returns:
        The loss, and its terms and :func:`gate_metrics`, detached.
    """
    actions = batch[ACTION].repeat_interleave(draws, 0)
    valid = flow.valid_entries(batch).repeat_interleave(draws, 0)
    context, horizons = policy.encode(batch).repeat(draws), policy.config.horizons

    # Velocities at one noise and time for all branches, and squares; or actions, and absolute values.
    mixed, target, distance, given = policy.predict(context, actions, generator)
    valid = valid & ~given[..., None]
    error = distance(mixed.velocity - target)  # [b, h, a]
    l_mix = flow.mean_error(error, valid)
    l_ind = sum(
        flow.mean_error(distance(mixed.branches[:, n, :h] - target[:, :h]), valid[:, :h])
        for n, h in enumerate(horizons)
    )
    l_bal = load_balance(mixed.weights, horizons, valid.any(2))
    value = l_mix + l_ind + balance * l_bal
    terms = {"loss_mixture": l_mix, "loss_individual": l_ind, "loss_balance": l_bal}
    logged = terms | gate_metrics(mixed.weights, policy.horizons) | flow.error_by_source(error, valid, batch)
    return value, {k: v.detach() for k, v in logged.items()}


def gate_metrics(weights: Float[Tensor, "b n h"], horizons: Horizons) -> dict[str, Tensor]:
    """Entropy of the gate, and use of each branch on the steps that it has, both 1 for equal weights."""
    active = horizons.valid.sum(0)
    shared = active > 1
    entropy = torch.special.entr(weights).sum(1) / active.clamp(min=2).log()
    usage = (weights * active).sum((0, 2)) / (len(weights) * horizons.valid.sum(1))
    metrics = {"gate_entropy": (entropy * shared).sum() / (len(weights) * shared.sum().clamp(min=1))}
    return metrics | {f"usage_{h}": usage[n] for n, h in enumerate(horizons.lengths)}

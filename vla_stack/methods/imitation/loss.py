"""Imitation by flow matching: the velocity field that carries noise to the demonstrated chunk.

Lipman et al., "Flow Matching for Generative Modeling" (2023); as a robot policy: Black et al., "pi0" (2024), eq. 1.
With ``max_delay`` of a native policy, training for asynchronous execution: Black et al. 2025, arXiv:2512.05964.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vla_stack.methods.imitation import heads
from vla_stack.policies import flow
from vla_stack.policies.contract import FlowPolicy
from vla_stack.policies.modeling_vla import VlaPolicy
from vla_stack.schema import ACTION, ACTION_IS_PAD

WEIGHTS = (0.5, 5.0)  # least and largest of online_weights


def loss(
    policy: FlowPolicy,
    batch: dict[str, Any],
    generator: torch.Generator,
    draws: int = 2,
    emphasis: Sequence[int] = (),
    reweight: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean squared error of the velocity at random times on the path from each demonstrated chunk to noise.

    Where the policy's ``max_delay`` is set, a chunk's first steps are clean at random (``flow.sample_prefix``): at time
    0, and not counted. Where a chunk's label begins later, since its first steps are what a policy did meanwhile
    (:mod:`vla_stack.data.chunks`), it is all of these.

    Args:
        policy: The policy.
        batch: Preprocessed batch of b samples: observations with images uint8 [b, h, w, 3] or float [b, 3, h, w],
            ``action`` [b, h, a] and the padding of :func:`flow.valid_entries`.
        generator: Source of noise and times.
        draws: (noise, time) pairs an observation; the expert is cheap beside the vision encoder that they share.
        emphasis: Horizons whose mixture (methods/mixture_of_horizons) weighs early steps more; the same weights are
            used here, without the mixture, to tell one effect from the other.
        reweight: Where a chunk's first steps are given, steps that the policy gets wrong count more
            (:func:`online_weights`).

    Returns:
        The loss and ``{"flow_loss": loss}``, detached, and of a mixed batch the loss of each dataset. Where the
        policy's head is another, those of :mod:`vla_stack.methods.imitation.heads`.
    """
    if isinstance(policy, VlaPolicy) and policy.head is not None:
        return heads.loss(policy, batch, generator)
    actions = batch[ACTION].repeat_interleave(draws, 0)
    valid = flow.valid_entries(batch).repeat_interleave(draws, 0)
    noise = flow.sample_noise((*actions.shape[:2], policy.noise_dim), generator, actions.device)
    t = flow.sample_time(len(actions), generator, actions.device)
    if max_delay := policy.max_delay:
        prefix = flow.sample_prefix(len(actions), actions.shape[1], max_delay, generator, actions.device)
        given = batch[ACTION_IS_PAD].cumprod(1).bool().repeat_interleave(draws, 0)
        prefix = torch.where(given.any(1, keepdim=True), given, prefix)
        t, valid = torch.where(prefix, 0.0, t[:, None]), valid & ~prefix[..., None]

    context = policy.encode(batch).repeat(draws)
    velocity = policy.velocity(context, flow.interpolate(actions, noise, t), t)[..., : actions.shape[-1]]
    error = (velocity - flow.target(actions, noise)).square()  # [b, h, a]
    if reweight and max_delay:
        error = error * torch.where(prefix.any(1)[:, None, None], online_weights(error, t, valid), 1.0)
    if emphasis:
        error = error * step_emphasis(emphasis).to(error)[:, None]
    value = flow.mean_error(error, valid)
    return value, {"flow_loss": value.detach(), **flow.error_by_source(error, valid, batch)}


def online_weights(
    error: Float[Tensor, "b h a"], t: Float[Tensor, "b h"], valid: Bool[Tensor, "b h a"]
) -> Float[Tensor, "b h 1"]:
    """Weights of the steps that follow given actions, by the L1 error of the actions that the policy predicts now.

    Copying on from the given actions is right where little happens; what differs is to be learnt from the rest
    (Xiaomi-Robotics-0 2026, arXiv:2602.12684). The prediction is that of one step, ``x_t - t v``, whose error is
    t |v - u|. The authors' formula is not verified beyond the range of the weights, [0.5, 5]; here an error of average
    size weighs 1.

    Args:
        error: Squared error of the velocity.
        t: Flow time of each step.
        valid: Entries that count.
    """
    distance = t[..., None] * error.detach().sqrt()
    of_step = torch.where(valid, distance, 0.0).sum(-1) / valid.sum(-1).clamp(min=1)
    return (of_step / flow.mean_error(distance, valid).clamp(min=1e-9)).clamp(*WEIGHTS)[..., None]


def step_emphasis(horizons: Sequence[int]) -> Float[Tensor, " h"]:
    """What the loss of a mixture of horizons weighs each step with, scaled to a mean of 1.

    Step k counts 1/h in the loss of every branch h > k, and 1/H in that of the mixture:
    c_k = sum over h > k of 1/h, plus 1/H.
    """
    longest = max(horizons)
    c = torch.tensor([sum(1 / h for h in horizons if h > k) + 1 / longest for k in range(longest)])
    return c / c.mean()

"""Imitation by flow matching: the velocity field that carries noise to the demonstrated chunk.

Lipman et al., "Flow Matching for Generative Modeling" (2023); as a robot policy: Black et al., "pi0" (2024), eq. 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vla_stack.policies import flow
from vla_stack.policies.contract import FlowPolicy
from vla_stack.policies.vision import random_shift
from vla_stack.schema import ACTION, OBS_IMAGES


def loss(
    policy: FlowPolicy, batch: dict[str, Any], generator: torch.Generator, draws: int = 2, shift: int = 2
) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean squared error of the velocity at random times on the path from each demonstrated chunk to noise.

    Args:
        policy: The policy.
        batch: Preprocessed batch of b samples: observations with images uint8 [b, h, w, 3] or float [b, 3, h, w],
            ``action`` [b, h, a] and the padding of :func:`flow.valid_entries`.
        generator: Source of noise, times and shifts.
        draws: (noise, time) pairs an observation; the expert is cheap beside the vision encoder that they share.
        shift: Largest random shift of images, pixels.

    Returns:
        The loss and ``{"flow_loss": loss}``, detached.
    """
    batch = {k: random_shift(v, shift, generator) if _is_image(k) else v for k, v in batch.items()}
    actions = batch[ACTION].repeat_interleave(draws, 0)
    valid = flow.valid_entries(batch).repeat_interleave(draws, 0)
    noise = flow.sample_noise((*actions.shape[:2], policy.noise_dim), generator, actions.device)
    t = flow.sample_time(len(actions), generator, actions.device)

    context = policy.encode(batch).repeat(draws)
    velocity = policy.velocity(context, flow.interpolate(actions, noise, t), t)[..., : actions.shape[-1]]
    error = (velocity.float() - flow.target(actions, noise)).square()  # [b, h, a]
    value = torch.where(valid, error, 0.0).sum() / valid.sum().clamp(min=1)
    return value, {"flow_loss": value.detach()}


def _is_image(key: str) -> bool:
    """Whether a batch's entry holds pictures; ``<camera>_is_pad`` beside them says which samples have none."""
    return key.startswith(f"{OBS_IMAGES}.") and not key.endswith("_is_pad")

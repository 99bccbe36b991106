"""The loss that a LeRobot policy brings along, for those that are no flow policies: ACT, Diffusion Policy, VQ-BeT."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vla_stack.lerobot_core import PreTrainedPolicy


def loss(policy: PreTrainedPolicy, batch: dict[str, Any], generator: torch.Generator) -> tuple[Tensor, dict[str, Any]]:
    """The policy's own training loss.

    Args:
        policy: Any LeRobot policy.
        batch: Preprocessed batch.
        generator: Not read: such policies draw from torch's global generator, which the training loop seeds anew from
            (seed, step) before each step.

    Returns:
        The loss, and the numbers that the policy logs.
    """
    value, logged = policy.forward(batch)
    return value, {name: x for name, x in (logged or {}).items() if isinstance(x, int | float)}

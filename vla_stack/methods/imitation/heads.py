"""Imitation by heads that predict a chunk in one step: the error of the demonstrated actions, entry by entry.

* ``regression``: |a - a*|, the mean absolute error of pi_reg (arXiv:2511.19433, section 2).
* ``gaussian``: -log N(a*; mean, std^2), each entry on its own.
* ``bins``: -log p(bin of a*), the cross entropy over 256 bins (RT-2, Brohan et al. 2023).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vla_stack.policies import flow
from vla_stack.policies.modeling_vla import VlaPolicy
from vla_stack.schema import ACTION


def loss(policy: VlaPolicy, batch: dict[str, Any], generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean error of the policy's one-step head.

    Args:
        policy: A policy with ``config.head`` other than ``flow``.
        batch: Preprocessed batch, as in :func:`vla_stack.methods.imitation.loss.loss`.
        generator: Nothing is drawn from it.

    Returns:
        The loss and ``{"<head>_loss": loss}``, detached.
    """
    assert policy.head is not None
    context = policy.encode(batch)
    error = policy.head.error(policy.query_states(context), batch[ACTION])  # [b, h, a]
    valid = flow.valid_entries(batch)
    value = flow.mean_error(error, valid)
    return value, {f"{policy.config.head}_loss": value.detach(), **flow.error_by_source(error, valid, batch)}

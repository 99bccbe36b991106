"""Tensors of a policy's weights: read, and loaded into a policy so that whatever does not fit is said in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor, nn

from vla_stack.errors import UserError
from vla_stack.policies.reading import check_weights


def read_weights(file: Path) -> dict[str, Tensor]:
    """All tensors of a file, on the CPU.

    Raises:
        UserError: It is no safetensors file, or cut short.
    """
    check_weights(file)
    return load_file(file)


def load_weights(policy: nn.Module, weights: dict[str, Tensor], file: Path) -> None:
    """Load weights, every one of them and nothing else; of tensors that are shared one name is enough.

    Raises:
        UserError: Names or shapes differ from the policy's.
    """
    try:
        missing, unknown = policy.load_state_dict(weights, strict=False)
    except RuntimeError as e:  # a shape
        raise UserError(*_mismatch(file, str(e).splitlines()[-1].strip())) from None
    state = policy.state_dict(keep_vars=True)
    loaded = {state[name].data_ptr() for name in weights if name in state}
    missing = [name for name in missing if state[name].data_ptr() not in loaded]
    if missing or unknown:
        kind, names = ("lacks", missing) if missing else ("has an unknown", list(unknown))
        raise UserError(*_mismatch(file, f"it {kind} {names[0]}" + (f" and {len(names) - 1} more" * (len(names) > 1))))


def _mismatch(file: Path, what: str) -> tuple[str, str]:
    return f"{file} does not fit its config.json: {what}", "config and weights must come from the same training"


def parameter_groups(policy: nn.Module) -> list[dict[str, Any]]:
    """Trained parameters for an optimiser: weight decay on matrices alone."""
    matrices = [p for p in policy.parameters() if p.requires_grad and p.ndim >= 2]
    vectors = [p for p in policy.parameters() if p.requires_grad and p.ndim < 2]
    return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]

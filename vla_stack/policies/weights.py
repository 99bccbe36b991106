"""Weights of a policy directory: found, read and loaded so that whatever is wrong with them is said in one line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import safetensors
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from safetensors.torch import load_file
from torch import Tensor, nn

from vla_stack.errors import UserError

WEIGHTS = "model.safetensors"
PEFT = "adapter_config.json"  # of LeRobot's training with PEFT, which saves the adapters without the policy
STATE_FILE = re.compile(r"[\w-][\w.-]*\.safetensors")  # of a processor step: a name, no path
LARGEST_HEADER, MOST_TENSORS = 1 << 24, 1 << 16  # bytes and names; the largest VLAs need 1 % of them


def find_weights(source: str | Path, revision: str | None = None) -> Path:
    """The weights of a policy directory, or of a hub repository (downloaded once, then from the cache).

    Raises:
        UserError: The directory or repository has none, or the hub cannot be reached.
    """
    if Path(source).is_dir():
        if not (Path(source) / WEIGHTS).is_file() and (Path(source) / PEFT).is_file():
            raise UserError(
                f"{source} holds adapters alone ({PEFT})", "merge them into their base policy and save that"
            )
        if not (Path(source) / WEIGHTS).is_file():
            raise UserError(f"{source} holds no weights ({WEIGHTS} is missing)", "give a pretrained_model folder")
        return Path(source) / WEIGHTS
    try:
        return Path(hf_hub_download(str(source), WEIGHTS, revision=revision))
    except (HfHubHTTPError, LocalEntryNotFoundError, ValueError) as e:
        raise UserError(*not_on_hub(source, WEIGHTS, e)) from None


def check_weights(file: Path) -> None:
    """Read the header of a safetensors file, whose size is bounded before memory is spent on it.

    Raises:
        UserError: It is no safetensors file, or cut short.
    """
    try:
        with file.open("rb") as f:
            size = int.from_bytes(f.read(8), "little")
            if size > min(LARGEST_HEADER, file.stat().st_size - 8):
                raise ValueError(f"its header would have {size} bytes")
            count = len(json.loads(f.read(size)))
        if count > MOST_TENSORS:
            raise ValueError(f"it names {count} tensors")
        with safetensors.safe_open(file, framework="pt"):
            pass
    except (safetensors.SafetensorError, OSError, ValueError, TypeError, RecursionError) as e:
        raise UserError(f"{file} is damaged: {first_line(e)}", "copy it again, or use another checkpoint") from None


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


def first_line(error: BaseException) -> str:
    """First line of an error's text, or its kind where it has none."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def not_on_hub(source: str | Path, name: str, error: BaseException) -> tuple[str, str]:
    """Message and remedy where neither this machine nor the hub has a file of a policy."""
    message = f"'{source}' is no directory here, and {name} cannot be had from the hub ({type(error).__name__})"
    return message, "check the name and the connection, or give a local directory"


def _mismatch(file: Path, what: str) -> tuple[str, str]:
    return f"{file} does not fit its config.json: {what}", "config and weights must come from the same training"


def parameter_groups(policy: nn.Module) -> list[dict[str, Any]]:
    """Trained parameters for an optimiser: weight decay on matrices alone."""
    matrices = [p for p in policy.parameters() if p.requires_grad and p.ndim >= 2]
    vectors = [p for p in policy.parameters() if p.requires_grad and p.ndim < 2]
    return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]

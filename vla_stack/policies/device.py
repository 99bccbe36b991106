"""The device that a person named, checked before anything is loaded onto it."""

from __future__ import annotations

import torch

from vla_stack.errors import UserError


def find_device(name: str) -> torch.device:
    """A torch device by its name; ``auto`` is a GPU where there is one, else the CPU.

    LeRobot's configurations would take another device in its place, or refuse the name as one of their own keys.

    Raises:
        UserError: There is no such device on this machine.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as e:
        reason = str(e).splitlines()[0]
        remedy = "'cpu' runs anywhere, 'auto' takes a GPU where there is one"
        raise UserError(f"device '{name}' is not available: {reason}", remedy) from None
    return device

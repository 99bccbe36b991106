"""What a GPU would be asked for, counted without one: operations, and calls that would wait for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


def on_fake_gpu(module: nn.Module, mode: FakeTensorMode) -> Any:
    """A module whose weights say they lie on a GPU and hold nothing: reading one of them raises."""
    with mode, torch.no_grad():
        for part in module.modules():
            for values in (part._parameters, part._buffers):
                values.update({k: mode.from_tensor(v).detach().to("cuda") for k, v in values.items() if v is not None})
    return module


class Counted(TorchDispatchMode):
    """Operations that Python asks torch for."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def counts(self, function: Any) -> bool:
        return True

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += self.counts(function)
        return function(*args, **(kwargs or {}))


class Launched(Counted):
    """Operations that a GPU is asked for: views are none, nor is memory that nothing is written to."""

    FREE = ("device", "promote_types", "_unsafe_view", "empty", "new_empty", "empty_strided")

    def counts(self, function: Any) -> bool:
        return not function.is_view and function.overloadpacket.__name__ not in self.FREE


class OneAttention(TorchFunctionMode):
    """Attention as one operation, which a GPU that is there makes of it."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.nn.functional.scaled_dot_product_attention:
            return torch.ones_like(args[0])
        return function(*args, **(kwargs or {}))

"""Import torch for inference: without its compilers, the command line of an HTTP client, and searches for garbage.

Plain ``import torch`` also imports its exporter, and kernels in Python for tensors without data (device ``meta``): a
quarter of its time and 25 MB. They are imported when somebody exports, compiles, or imports a library that makes such
tensors.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from vla_stack.light_imports import light

_LATER = ("torch._meta_registrations", "torch.export", "httpx._main")
_MAKES_META_TENSORS = ("accelerate", "diffusers", "torch._dynamo", "torch._inductor", "transformers")


def import_torch() -> None:
    """Import torch, LeRobot's core and the HTTP client that it brings; nothing where torch is there already."""
    if "torch" in sys.modules:
        return
    with collecting_later(), light((), _LATER):
        import torch

        import vla_stack.lerobot_core  # noqa: F401
    torch._lazy_modules.add("export")  # torch's own list of what is imported when somebody asks for it
    sys.meta_path.insert(0, _COMPLETING)


@contextmanager
def collecting_later() -> Iterator[None]:
    """A block that makes many objects which stay: no search for garbage among them until its end."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


class _Completing(MetaPathFinder):
    """Imports the kernels for tensors without data before a library that uses them."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name in _MAKES_META_TENSORS:
            import torch._meta_registrations  # noqa: F401
        return None


_COMPLETING = _Completing()

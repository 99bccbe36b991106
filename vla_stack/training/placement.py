"""Where a run computes: one process on one device, or several under Accelerate.

Both classes offer the same few operations; the loop is written against them and the single-process path never imports
Accelerate.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import psutil
import torch
from torch import Tensor, nn

from vla_stack.errors import UserError
from vla_stack.policies.device import find_device


class Local:
    """One process, one device."""

    rank, world, is_main = 0, 1, True

    def __init__(self, device: str) -> None:
        self.device = find_device(device)
        if self.device.type == "cuda" and self.device.index is not None:
            torch.cuda.set_device(self.device)  # what is said to be on "cuda" is to be there too

    def prepare(self, objective: nn.Module) -> nn.Module:
        """The objective as the loop has to call it."""
        return objective

    def accumulating(self, objective: nn.Module) -> AbstractContextManager[Any]:
        """Context of a backward pass whose gradients are not yet needed by other processes."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def gather(self, value: Any) -> list[Any]:
        """``value`` of every process, in order of rank."""
        return [value]

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` is set in any process."""
        return flag

    def barrier(self) -> None:
        """Wait for all processes."""


class Accelerated:
    """Data-parallel processes started by ``torchrun`` or ``accelerate launch``; every rank holds the whole model."""

    def __init__(self, device: str) -> None:
        from accelerate import Accelerator
        from accelerate.utils import DistributedDataParallelKwargs, DistributedType

        # A method need not touch every parameter of a policy (a language model's unused output head, say).
        unused = DistributedDataParallelKwargs(find_unused_parameters=True)
        self._accelerator = Accelerator(cpu=device == "cpu", kwargs_handlers=[unused])
        if self._accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED):
            raise UserError("sharded training is not supported by this launcher", "use data parallelism: torchrun")
        self.device = self._accelerator.device
        self.rank, self.world = self._accelerator.process_index, self._accelerator.num_processes
        self.is_main = self._accelerator.is_main_process

    def prepare(self, objective: nn.Module) -> nn.Module:
        return self._accelerator.prepare(objective)

    def accumulating(self, objective: nn.Module) -> AbstractContextManager[Any]:
        return self._accelerator.no_sync(objective)

    def backward(self, loss: Tensor) -> None:
        self._accelerator.backward(loss)

    def gather(self, value: Any) -> list[Any]:
        from accelerate.utils import gather_object

        return gather_object([value])

    def any(self, flag: bool) -> bool:
        return bool(self._accelerator.reduce(torch.tensor(float(flag), device=self.device)).item())

    def barrier(self) -> None:
        self._accelerator.wait_for_everyone()


def place(launcher: str, device: str) -> Local | Accelerated:
    """The placement that a recipe asks for, or that a launcher's environment makes necessary."""
    distributed = int(os.environ.get("WORLD_SIZE", "1")) > 1
    return Accelerated(device) if distributed or launcher == "accelerate" else Local(device)


def native_precision(device: torch.device) -> Literal["fp32", "bf16"]:
    """What ``precision: auto`` means on a device: bf16 where it has instructions for it."""
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        native = device.type == "cpu" and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return "bf16" if native else "fp32"


def use_threads(threads: int) -> int:
    """Set torch's CPU threads (0: every physical core that this process may use, shared among local ranks).

    The ``vla`` command starts with one thread, which is right for everything that runs beside other processes; a
    training owns its machine.
    """
    if threads == 0:
        allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        physical = psutil.cpu_count(logical=False) or allowed
        threads = max(1, min(allowed, physical) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    torch.set_num_threads(threads)
    return threads

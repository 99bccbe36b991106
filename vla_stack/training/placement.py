"""Where a run computes: one process on one device, or several that share the work. Both classes offer the same few
operations, and the loop is written against them.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import psutil
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from vla_stack.errors import UserError
from vla_stack.policies.reading import find_device


class Local:
    """One process, one device."""

    rank, world, is_main = 0, 1, True

    def __init__(self, device: str) -> None:
        self.device = find_device(device)
        if self.device.type == "cuda" and self.device.index is not None:
            torch.cuda.set_device(self.device)  # what is said to be on "cuda" is to be there too

    def prepare(self, objective: nn.Module, all_used: bool) -> nn.Module:
        """The objective as the loop has to call it.

        Args:
            objective: Computes the loss.
            all_used: Whether every parameter has a part in it.
        """
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

    def close(self) -> None:
        """Part from the other processes."""


class Distributed:
    """Data-parallel processes, started by ``side_by_side``, ``torchrun`` or ``accelerate launch``; every rank holds the
    whole model, and gradients are averaged while they are computed (Li et al., arXiv:2006.15704).
    """

    def __init__(self, device: str) -> None:
        if os.environ.get("ACCELERATE_USE_FSDP") or os.environ.get("ACCELERATE_USE_DEEPSPEED"):
            raise UserError("sharded training is not supported", "use data parallelism: torchrun")
        self.device, local = find_device(device), int(os.environ.get("LOCAL_RANK", "0"))
        if self.device.type == "cuda":
            if local >= torch.cuda.device_count():
                raise UserError(f"process {local} has no GPU, there are {torch.cuda.device_count()}", "start fewer")
            self.device = torch.device("cuda", local)
            torch.cuda.set_device(self.device)
        distributed.init_process_group("nccl" if self.device.type == "cuda" else "gloo")
        self.rank, self.world = distributed.get_rank(), distributed.get_world_size()
        self.is_main = self.rank == 0

    def prepare(self, objective: nn.Module, all_used: bool) -> nn.Module:
        return DistributedDataParallel(objective, find_unused_parameters=not all_used)

    def accumulating(self, objective: nn.Module) -> AbstractContextManager[Any]:
        assert isinstance(objective, DistributedDataParallel)
        return objective.no_sync()

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.world
        distributed.all_gather_object(values, value)
        return values

    def any(self, flag: bool) -> bool:
        raised = torch.tensor(float(flag), device=self.device)
        distributed.all_reduce(raised)
        return bool(raised.item())

    def barrier(self) -> None:
        distributed.barrier()

    def close(self) -> None:
        distributed.destroy_process_group()


def place(device: str) -> Local | Distributed:
    """The placement that the environment of this process asks for."""
    return Distributed(device) if int(os.environ.get("WORLD_SIZE", "1")) > 1 else Local(device)


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

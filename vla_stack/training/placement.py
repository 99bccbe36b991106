"""Where a run computes: one process on one device, or several that share the work. Both classes offer the same few
operations, and the loop is written against them.
"""

from __future__ import annotations

import ctypes
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any, Literal

import psutil
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from vla_stack.errors import UserError
from vla_stack.policies.reading import find_device
from vla_stack.training.shared_gradients import SharedGradients, shared_gradients

LARGE = 1 << 20  # parameters of a layer that is gathered by itself while it computes; smaller ones are at once
LEFT: list[distributed.ProcessGroup | None] = []  # groups that ended, see ``leave_group``
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt


class Local:
    """One process, one device.

    Attributes:
        rank: Number of this process.
        world: Of how many.
        is_main: Whether it writes and shows.
        shards: Parts of the trained weights, of which this process has one.
    """

    rank, world, is_main, shards = 0, 1, True, 1

    def __init__(self, device: str) -> None:
        self.device = find_device(device)
        if self.device.type == "cuda" and self.device.index is not None:
            torch.cuda.set_device(self.device)  # what is said to be on "cuda" is to be there too

    def prepare(self, objective: nn.Module, all_used: bool) -> nn.Module:
        """The objective as the loop has to call it; what holds its parameters is made after this.

        Args:
            objective: Computes the loss.
            all_used: Whether every parameter has a part in it.
        """
        return objective

    def accumulating(self, objective: nn.Module) -> AbstractContextManager[Any]:
        """Context of a backward pass whose gradients are not yet needed by other processes."""
        return nullcontext()

    def beside(self, objective: nn.Module) -> AbstractContextManager[Any]:
        """Context in which the policy may be called otherwise than through the objective; where weights are shared all
        processes make the same calls.
        """
        return nullcontext()

    def plain(self, objective: nn.Module) -> AbstractContextManager[Any]:
        """Context in which the first process has all weights as they are written; all enter it, nobody computes."""
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

    shards = 1
    _shared: SharedGradients | None = None

    def __init__(self, device: str) -> None:
        if os.environ.get("ACCELERATE_USE_DEEPSPEED"):
            raise UserError("DeepSpeed is not supported", "shard by torch itself: torchrun, and sharded=true")
        self.device, local = find_device(device), int(os.environ.get("LOCAL_RANK", "0"))
        if self.device.type == "cuda":
            if local >= torch.cuda.device_count():
                raise UserError(f"process {local} has no GPU, there are {torch.cuda.device_count()}", "start fewer")
            self.device = torch.device("cuda", local)
            torch.cuda.set_device(self.device)
        # The main process evaluates alone, for as long as that takes; by default the others would be ended meanwhile.
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        distributed.init_process_group(backend, timeout=timedelta(days=7))
        self.rank, self.world = distributed.get_rank(), distributed.get_world_size()
        self.is_main = self.rank == 0

    def prepare(self, objective: nn.Module, all_used: bool) -> nn.Module:
        self._shared = shared_gradients(objective) if all_used else None
        if self._shared is not None:
            return objective
        return DistributedDataParallel(objective, find_unused_parameters=not all_used, gradient_as_bucket_view=True)

    def accumulating(self, objective: nn.Module) -> AbstractContextManager[Any]:
        if self._shared is not None:
            return self._shared.held()
        assert isinstance(objective, DistributedDataParallel)
        return objective.no_sync()

    def beside(self, objective: nn.Module) -> AbstractContextManager[Any]:
        return nullcontext()

    def plain(self, objective: nn.Module) -> AbstractContextManager[Any]:
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        if self._shared is not None:
            self._shared.backward(loss)
        else:
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
        leave_group()


class Sharded(Distributed):
    """Processes that share the trained weights, their gradients, moments and average as well (Zhao et al.,
    arXiv:2304.11277): each has a part of every tensor, and a layer is gathered while it computes. What is not trained
    is whole in every process.
    """

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.shards = self.world

    def prepare(self, objective: nn.Module, all_used: bool) -> nn.Module:
        kinds = {p.dtype for p in objective.parameters() if p.requires_grad}
        if len(kinds) > 1:
            names = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))
            raise UserError(f"sharded=true: trained weights are of several types ({names})", "train them in one type")
        mesh = init_device_mesh(self.device.type, (self.world,))
        frozen = {p for p in objective.parameters() if not p.requires_grad}
        for layer in large_layers(objective):
            fully_shard(layer, mesh=mesh, ignored_params=frozen)
        return fully_shard(objective, mesh=mesh, ignored_params=frozen)

    @contextmanager
    def accumulating(self, objective: nn.Module) -> Iterator[None]:
        assert isinstance(objective, FSDPModule)
        objective.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            objective.set_requires_gradient_sync(True)

    @contextmanager
    def beside(self, objective: nn.Module) -> Iterator[None]:
        assert isinstance(objective, FSDPModule)
        objective.unshard()  # large layers are gathered when they are called
        try:
            yield
        finally:
            objective.reshard()

    @contextmanager
    def plain(self, objective: nn.Module) -> Iterator[None]:
        shared = [
            (module, name, parameter)
            for module in objective.modules()
            for name, parameter in module._parameters.items()
            if isinstance(parameter, DTensor)
        ]
        for module, name, parameter in shared:
            whole = gathered(parameter.detach())
            if self.is_main:
                module._parameters[name] = nn.Parameter(whole.to("cpu", copy=True), parameter.requires_grad)
        try:
            yield
        finally:
            for module, name, parameter in shared:
                module._parameters[name] = parameter


def leave_group() -> None:
    """End the processes' group, but keep the object to the end of the process.

    Whoever frees a group last waits for its threads. ``DistributedDataParallel`` would, holding the interpreter's lock;
    one of these threads may want that lock, to free a tensor that was sent. Python itself waits without the lock.
    """
    LEFT.append(distributed.group.WORLD)
    distributed.destroy_process_group()


def large_layers(objective: nn.Module) -> list[nn.Module]:
    """Linear maps and embeddings that are trained, and shared with no other module, of at least :data:`LARGE` weights.

    Policies call these as modules, which blocks of theirs are not: an expert reads keys of the prefix's layers.
    """
    layers = [m for m in objective.modules() if isinstance(m, nn.Linear | nn.Embedding)]
    owners = Counter(p for m in objective.modules() for p in m.parameters(recurse=False))
    return [
        m
        for m in layers
        if m.weight.requires_grad and m.weight.numel() >= LARGE and all(owners[p] == 1 for p in m.parameters())
    ]


def here(tensor: Tensor) -> Tensor:
    """The part of a tensor that lies in this process: a view of it; all of it where it is not shared."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor  # type: ignore[no-any-return]


def gathered(tensor: Tensor) -> Tensor:
    """All of a tensor, of which every process may have a part; all of them ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor  # type: ignore[no-any-return]


def place(device: str, sharded: bool = False) -> Local | Distributed:
    """The placement that the environment of this process asks for."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Local(device)
    return Sharded(device) if sharded or os.environ.get("ACCELERATE_USE_FSDP") else Distributed(device)


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
    training owns its machine, and keeps its memory.
    """
    keep_memory()
    if threads == 0:
        allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        physical = psutil.cpu_count(logical=False) or allowed
        threads = max(1, min(allowed, physical) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    torch.set_num_threads(threads)
    return threads


def keep_memory() -> None:
    """Let this process keep what its tensors free: glibc gives the large ones back to the kernel, and at the next step
    they come as thousands of page faults again, an eighth of a step in one process. Of other C libraries nothing is
    asked.
    """
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        if not libc.mallopt(M_MMAP_THRESHOLD, 1 << 30):
            libc.mallopt(M_MMAP_THRESHOLD, 1 << 25)  # the most that older ones take
        libc.mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)

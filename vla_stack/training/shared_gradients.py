"""Gradients of processes on one machine, averaged in memory that they share.

``DistributedDataParallel`` sends them through sockets, even to the neighbour, and waits for everybody at each of its
buckets: for the native policy on two cores a fifth of a step. Here each process writes its share of the mean into a
common buffer once its own backward pass is done, and adds up all.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor, distributed, nn

LARGEST = 1 << 24  # parameters; with more of them computing takes so long that sending does not matter


class SharedGradients:
    """The gradients of a model of which every process has a copy.

    A step uses the half of the buffer that the one before did not: whoever is a step ahead has waited for everybody in
    between, and so does not write what another still reads.

    Args:
        parameters: Those that are trained, float32 on a CPU; they get the values that the first process has.
        buffer: float32 [2, processes, numbers], shared by all processes, at least two.
        rank: Of this process.
    """

    def __init__(self, parameters: list[nn.Parameter], buffer: Tensor, rank: int) -> None:
        self._parameters, self._buffer = parameters, buffer
        self._mean, self._ready, self._half, self._held = torch.zeros(buffer.shape[-1]), torch.zeros(1), 0, False
        self._own = [alike(part[rank], parameters) for part in buffer]
        for parameter in parameters:
            distributed.broadcast(parameter.detach(), 0)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Context of a backward pass whose gradients add to those of the next, which others need not have yet."""
        self._held = True
        try:
            yield
        finally:
            self._held = False

    def backward(self, loss: Tensor) -> None:
        """Gradients of the mean over processes of a loss; what has no part in it gets zeros."""
        processes = self._buffer.shape[1]
        (loss / processes).backward()
        if self._held:
            return
        self._half = 1 - self._half
        for own, parameter in zip(self._own[self._half], self._parameters, strict=True):
            own.zero_() if parameter.grad is None else own.copy_(parameter.grad)
        distributed.all_reduce(self._ready)  # nobody passes before all have written
        parts = self._buffer[self._half]
        torch.add(parts[0], parts[1], out=self._mean)  # in the same order everywhere
        for part in parts[2:]:
            self._mean += part
        for parameter, gradient in zip(self._parameters, alike(self._mean, self._parameters), strict=True):
            parameter.grad = gradient


def shared_gradients(model: nn.Module) -> SharedGradients | None:
    """Where all processes are on one Linux machine's CPU and the gradients are few; None elsewhere."""
    trained = [p for p in model.parameters() if p.requires_grad]
    count, world = sum(p.numel() for p in trained), distributed.get_world_size()
    alone = os.environ.get("LOCAL_WORLD_SIZE") == str(world) and hasattr(os, "memfd_create")
    if not alone or count > LARGEST or any(p.dtype != torch.float32 or p.device.type != "cpu" for p in trained):
        return None
    buffer = _common((2, world, count))
    return None if buffer is None else SharedGradients(trained, buffer, distributed.get_rank())


def alike(flat: Tensor, parameters: list[nn.Parameter]) -> list[Tensor]:
    """Views of a flat tensor in the shapes and memory layouts of parameters, one after another."""
    ends = torch.tensor([p.numel() for p in parameters]).cumsum(0).tolist()
    return [
        flat[end - p.numel() : end].as_strided(p.shape, p.stride(), flat.storage_offset() + end - p.numel())
        for p, end in zip(parameters, ends, strict=True)
    ]


def _common(shape: tuple[int, ...]) -> Tensor | None:
    """A tensor that lies in the memory of all processes, None where they cannot see each other's files."""
    size, rank = torch.Size(shape).numel(), distributed.get_rank()
    file = os.memfd_create("gradients") if rank == 0 else -1
    where = [f"/proc/{os.getpid()}/fd/{file}"]
    if rank == 0:
        os.truncate(file, size * 4)
    distributed.broadcast_object_list(where, 0)
    buffer = None
    with suppress(RuntimeError):
        buffer = torch.from_file(where[0], shared=True, size=size, dtype=torch.float32)
    seen = torch.tensor(float(buffer is not None))
    distributed.all_reduce(seen, distributed.ReduceOp.MIN)  # all have it now, or nobody uses it
    if rank == 0:
        os.close(file)
    return buffer.view(shape) if buffer is not None and seen else None

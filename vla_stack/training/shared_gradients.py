"""Gradients of processes on one machine, averaged in memory that they share.

Gloo sends them through sockets, even to the neighbour: for the native policy on two cores a seventh of a step. Here
each process writes its share of the mean into a common buffer and adds up all.
"""

import os  # and no `annotations` from __future__: torch reads those of a hook as they are
from contextlib import suppress

import torch
from torch import Tensor, distributed
from torch.distributed import GradBucket
from torch.nn.parallel import DistributedDataParallel

LARGEST = 1 << 24  # parameters; with more of them computing takes so long that sending does not matter


class SharedGradients:
    """Averages the buckets of ``DistributedDataParallel`` on a CPU (its ``register_comm_hook``).

    A bucket's part of the buffer is written again only after a step with the other half of it: whoever is a step ahead
    has waited for everybody in between, and so does not write what another still reads.

    Args:
        buffer: float32 [2, processes, parameters], shared by all processes, at least two.
        rank: Of this process.
    """

    def __init__(self, buffer: Tensor, rank: int) -> None:
        self._buffer, self._rank = buffer, rank
        self._half = self._at = 0
        self._ready = torch.zeros(1)

    def average(self, own: Tensor, first: bool) -> Tensor:
        """The mean of one flat bucket over all processes, in place.

        Args:
            own: float32 [n], of this process.
            first: Whether it is the first bucket of a step.
        """
        if first:
            self._half, self._at = 1 - self._half, 0
        part = self._buffer[self._half, :, self._at : self._at + len(own)]
        self._at += len(own)
        torch.mul(own, 1.0 / len(part), out=part[self._rank])
        distributed.all_reduce(self._ready)  # nobody passes before all have written
        torch.add(part[0], part[1], out=own)  # in the same order everywhere; `mean` takes twice as long
        for other in part[2:]:
            own += other
        return own


def share_gradients(model: DistributedDataParallel) -> None:
    """Let a model's processes share memory, where all are on one Linux machine's CPU and its gradients are few."""
    trained = [p for p in model.parameters() if p.requires_grad]
    count, world = sum(p.numel() for p in trained), distributed.get_world_size()
    alone = os.environ.get("LOCAL_WORLD_SIZE") == str(world) and hasattr(os, "memfd_create")
    if not alone or count > LARGEST or any(p.dtype != torch.float32 or p.device.type != "cpu" for p in trained):
        return
    buffer = _common((2, world, count))
    if buffer is None:
        return
    shared = SharedGradients(buffer, distributed.get_rank())

    def hook(_: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(shared.average(bucket.buffer(), bucket.index() == 0))
        return done

    model.register_comm_hook(None, hook)


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

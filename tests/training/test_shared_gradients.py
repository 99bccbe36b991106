"""Averages in shared memory are those that gloo sends, over several steps, from the first process's weights on."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from vla_stack.training import shared_gradients as module
from vla_stack.training.placement import leave_group
from vla_stack.training.shared_gradients import shared_gradients


def layers(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    convolution = nn.Conv2d(1, 4, 3).to(memory_format=torch.channels_last)
    return nn.Sequential(nn.Unflatten(1, (1, 4, 4)), convolution, nn.Flatten(), nn.ReLU(), nn.Linear(16, 4))


def rank_main(rank: int, meet: str, local: int, largest: int) -> None:
    """Train a model by each way on batches of this process's own; both stay alike, where gradients can be shared."""
    os.environ["LOCAL_WORLD_SIZE"] = str(local)
    distributed.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=2)
    module.LARGEST = largest
    sent, own = DistributedDataParallel(layers()), layers(seed=rank)
    unused = nn.Parameter(torch.ones(3))
    own.register_parameter("unused", unused)
    shared = shared_gradients(own)
    assert (shared is not None) == (local == 2 and largest > 1000)
    if shared is not None:
        pairs = list(zip(sent.parameters(), (p for p in own.parameters() if p is not unused), strict=True))
        assert all((p == q).all() for p, q in pairs)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (sent, own)]
        for step in range(5):
            generator = torch.Generator().manual_seed(10 * step + rank)
            x, y = torch.randn(2, 8, 16, generator=generator)
            with sent.no_sync(), shared.held():
                sent(y).square().mean().backward()
                shared.backward(own(y).square().mean())
            sent(x).square().mean().backward()
            shared.backward(own(x).square().mean())
            for p, q in pairs:
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-6)
                assert q.grad.stride() == q.stride()
            assert (unused.grad == 0).all()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    leave_group()


@pytest.mark.parametrize(("local", "largest"), [(2, 1 << 24), (1, 1 << 24), (2, 50)])
def test_equals_what_gloo_sends(tmp_path: Path, local: int, largest: int) -> None:
    context = multiprocessing.get_context("forkserver")
    args = (str(tmp_path / "meet"), local, largest)
    processes = [context.Process(target=rank_main, args=(rank, *args)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(100)
    assert [process.exitcode for process in processes] == [0, 0]

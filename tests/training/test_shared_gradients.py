"""Averages in shared memory are those that gloo sends, in several buckets and over several steps."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from vla_stack.training import shared_gradients
from vla_stack.training.shared_gradients import share_gradients


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 4))


def rank_main(rank: int, meet: str, local: int, largest: int) -> None:
    """Train a model by each way on batches of this process's own; both stay alike, and each is shared as expected."""
    os.environ["LOCAL_WORLD_SIZE"] = str(local)
    distributed.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=2)
    shared_gradients.LARGEST = largest
    models = [DistributedDataParallel(layers(), bucket_cap_mb=0.1, gradient_as_bucket_view=view) for view in (0, 1)]
    averaged = []
    taken = shared_gradients.SharedGradients.average

    def average(self, own, first):
        averaged.append(first)
        return taken(self, own, first)

    shared_gradients.SharedGradients.average = average
    share_gradients(models[1])
    for step in range(5):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + rank))
        for model in models:
            model.zero_grad()
            model(x).square().mean().backward()
        for sent, shared in zip(models[0].parameters(), models[1].parameters(), strict=True):
            torch.testing.assert_close(sent.grad, shared.grad, rtol=1e-6, atol=1e-7)
    steps = sum(averaged)
    assert (steps == 5 and len(averaged) > steps) if local == 2 and largest > 100_000 else not averaged
    distributed.destroy_process_group()


@pytest.mark.parametrize(("local", "largest"), [(2, 1 << 24), (1, 1 << 24), (2, 1000)])
def test_equals_what_gloo_sends(tmp_path: Path, local: int, largest: int) -> None:
    context = multiprocessing.get_context("forkserver")
    args = (str(tmp_path / "meet"), local, largest)
    processes = [context.Process(target=rank_main, args=(rank, *args)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(100)
    assert [process.exitcode for process in processes] == [0, 0]

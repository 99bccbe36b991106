"""Several datasets in one stream."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training_fakes import record

from vla_stack.data import ChunkLoader
from vla_stack.training.build import pooled
from vla_stack.training.mixture import Mixture


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    base = tmp_path_factory.mktemp("mixed")
    return [record(base / "a", episodes=2), record(base / "b", episodes=6, seed=1, task="push it")]


def mixture(roots: list[Path]) -> Mixture:
    return Mixture([ChunkLoader(root, horizon=4, batch_size=8, seed=3, progress=False) for root in roots], 8, seed=5)


def equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all(np.array_equal(a[key], b[key]) for key in a) and a.keys() == b.keys()


def test_batches_mix_in_proportion_and_lose_no_row(roots: list[Path]) -> None:
    batches = list(islice(mixture(roots), 60))
    tasks = [task for batch in batches for task in batch["task"]]
    assert all(len(batch["action"]) == len(batch["task"]) == 8 for batch in batches)
    assert 0.2 < tasks.count("pick the red cube") / len(tasks) < 0.3  # 24 of 96 frames
    frames = [i for batch in batches for i, t in zip(batch["index"], batch["task"], strict=True) if t == "push it"]
    assert len(set(frames[:72])) == 72  # one epoch of the second dataset, each frame once


def test_a_restored_mixture_continues_with_the_same_rows(roots: list[Path]) -> None:
    for cut in (1, 2, 7):
        whole = mixture(roots)
        list(islice(whole, cut))
        state = whole.state_dict()
        resumed = mixture(roots)
        resumed.load_state_dict(state)
        assert all(equal(a, b) for a, b in zip(islice(whole, 9), islice(resumed, 9), strict=True))


def test_pooled_moments_are_those_of_the_union() -> None:
    rng = np.random.default_rng(0)
    parts = [rng.normal(m, s, (n, 2)) for m, s, n in ((0, 1, 50), (3, 2, 150))]
    stats = [{"x": {"mean": p.mean(0), "std": p.std(0), "min": p.min(0), "max": p.max(0)}} for p in parts]
    out, union = pooled(stats, [50, 150])["x"], np.concatenate(parts)
    for name in ("mean", "std", "min", "max"):
        assert np.allclose(out[name], getattr(union, name)(0))

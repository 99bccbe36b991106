"""Several datasets in one stream."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training_fakes import SIDE, record

from vla_stack.data.loader import ChunkLoader, reseeded
from vla_stack.errors import UserError
from vla_stack.policies.embodiment import OBS_EMBODIMENT
from vla_stack.training.mixture import SOURCE, SOURCES, Layout, Mixture, Part, common_columns
from vla_stack.training.sources import pooled
from vla_stack.training.text_pairs import PairedLoader


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    base = tmp_path_factory.mktemp("mixed")
    return [record(base / "a", episodes=2), record(base / "b", episodes=6, seed=1, task="push it")]


def mixture(roots: list[Path], weights: tuple[float, ...] = (24, 72), seed: int = 3, **options: Any) -> Mixture:
    loaders = [ChunkLoader(root, horizon=4, batch_size=8, seed=seed, progress=False) for root in roots]
    columns = common_columns([loader.dataset for loader in loaders])
    layout = {"slots": {"front": (SIDE, SIDE)}, "state_dim": 4, "action_dim": 3, "columns": columns} | options
    front = {"front": "observation.images.front"}
    parts = [
        Part(name, loader, weight, cameras, embodiment)
        for name, loader, weight, cameras, embodiment in zip(
            "ab", loaders, weights, (front, {} if options else front), (0, 1) if options else (None, None), strict=True
        )
    ]
    return Mixture(parts, Layout(**layout), 8, seed=5)


def equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all(np.array_equal(a[key], b[key]) for key in a) and a.keys() == b.keys()


def test_batches_mix_by_weight_and_lose_no_row(roots: list[Path]) -> None:
    mixed = mixture(roots)
    batches = list(islice(mixed, 60))
    tasks = [task for batch in batches for task in batch["task"]]
    assert all(len(batch["action"]) == len(batch["task"]) == 8 for batch in batches)
    assert 0.2 < tasks.count("pick the red cube") / len(tasks) < 0.3  # 24 of 96 frames
    frames = [i for batch in batches for i, t in zip(batch["index"], batch["task"], strict=True) if t == "push it"]
    assert len(set(frames[:72])) == 72  # one epoch of the second dataset, each frame once
    assert mixed.samples == {"a": tasks.count("pick the red cube"), "b": tasks.count("push it")}
    turned = [task for batch in islice(mixture(roots, (3, 1)), 60) for task in batch["task"]]
    assert 0.7 < turned.count("pick the red cube") / len(turned) < 0.8


def test_rows_of_other_robots_are_brought_to_one_layout(roots: list[Path]) -> None:
    batch = next(iter(mixture(roots, state_dim=6, action_dim=5)))
    second = batch[SOURCE] == 1
    assert second.any() and not second.all()
    assert batch["observation.state"].shape == (8, 6) and batch["action"].shape == (8, 4, 5)
    assert (batch["observation.state"][:, 4:] == 0).all() and (batch["action"][..., 3:] == 0).all()
    assert (batch[OBS_EMBODIMENT] == second).all()
    pictures = batch["observation.images.front"]
    assert (pictures[second] == 0).all() and (pictures[~second].max((1, 2, 3)) > 0).all()
    assert batch[SOURCES] == ((0, "a"), (1, "b"))


def test_columns_that_a_dataset_lacks_are_left_out(roots: list[Path]) -> None:
    datasets = [ChunkLoader(root, horizon=1, batch_size=1, progress=False).dataset for root in roots]
    datasets[1].columns.pop("next.reward")
    columns = common_columns(datasets)
    assert "next.reward" not in columns and {"index", "episode_index"} <= set(columns)


def test_a_restored_mixture_continues_with_the_same_rows(roots: list[Path]) -> None:
    for cut in (1, 2, 7):
        whole = mixture(roots)
        list(islice(whole, cut))
        state = whole.state_dict()
        resumed = mixture(roots)
        resumed.load_state_dict(state)
        assert all(equal(a, b) for a, b in zip(islice(whole, 9), islice(resumed, 9), strict=True))
        assert resumed.samples == whole.samples and sum(whole.samples.values()) == 8 * (cut + 9)


def test_a_process_that_is_new_goes_on_in_its_own_order(roots: list[Path]) -> None:
    """A run that resumes in more processes than it had: the position is another's, the seeds are not."""
    first, second, there = mixture(roots), mixture(roots, seed=4), mixture(roots, seed=4)
    alone = ChunkLoader(roots[0], horizon=4, batch_size=8, seed=4, progress=False)
    for loader in (first, there):
        list(islice(loader, 3))
    state = json.loads(json.dumps(first.state_dict()))
    with pytest.raises(UserError, match="has seed 3, this loader has 4"):
        second.load_state_dict(state)
    second = mixture(roots, seed=4)
    second.load_state_dict(reseeded(state, second.state_dict()))
    assert equal(next(iter(second)), next(iter(there)))
    alone.load_state_dict(reseeded({"seed": 3, "position": 16, "epoch_size": 24}, alone.state_dict()))
    assert alone.state_dict() | {"data": 0} == {"seed": 4, "position": 16, "epoch_size": 24, "data": 0}
    for other in (state, {"seed": 3, "position": 16, "epoch_size": 23}):  # of other data: refused as ever
        with pytest.raises(UserError):
            alone.load_state_dict(reseeded(other, alone.state_dict()))


def test_a_state_of_other_datasets_is_refused(roots: list[Path]) -> None:
    two = mixture(roots)
    one = ChunkLoader(roots[0], horizon=4, batch_size=8, seed=3, progress=False)
    paired = PairedLoader(two, two, None)
    for loader, state in (
        (one, two.state_dict()),
        (two, one.state_dict()),
        (paired, two.state_dict()),
        (two, paired.state_dict()),
    ):
        with pytest.raises(UserError, match="'data' is of another kind than what the run was started with"):
            loader.load_state_dict(state)
    with pytest.raises(UserError, match="has learnt from another dataset than"):
        one.load_state_dict(one.state_dict() | {"data": 1})  # of equal size, as two roots in another order may be
    state = two.state_dict()
    with pytest.raises(UserError, match="the run was started with 3 datasets, 'data' names 2"):
        two.load_state_dict({**state, "sources": [*state["sources"], state["sources"][0]]})


def test_pooled_moments_are_those_of_the_union() -> None:
    rng = np.random.default_rng(0)
    parts = [rng.normal(m, s, (n, 2)) for m, s, n in ((0, 1, 50), (3, 2, 150))]
    stats = [{"x": {"mean": p.mean(0), "std": p.std(0), "min": p.min(0), "max": p.max(0)}} for p in parts]
    out, union = pooled(stats, [50, 150])["x"], np.concatenate(parts)
    for name in ("mean", "std", "min", "max"):
        assert np.allclose(out[name], getattr(union, name)(0))

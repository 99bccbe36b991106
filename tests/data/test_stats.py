"""Statistics against brute force, and against LeRobot's own."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from lerobot.datasets.compute_stats import aggregate_stats
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from toy_robot import make

from vla_stack.data import blocks
from vla_stack.data.blocks import Rows, exact
from vla_stack.data.dataset import open_dataset, read_episode_rows
from vla_stack.data.integrity import _row_stats
from vla_stack.data.loader import ChunkLoader
from vla_stack.data.stats import _with_room, chunk_rows, load_stats
from vla_stack.errors import UserError


def test_chunk_statistics_by_brute_force(root: Path) -> None:
    mask = np.array([True, False])
    batch = ChunkLoader(root, 4, 15, cameras=[]).gather(np.arange(15))
    valid = ~batch["action_is_pad"]
    absolute = batch["action"][valid]
    relative = (batch["action"] - batch["observation.state"][:, None, :2] * mask)[valid]
    stats = load_stats(root, 4) | load_stats(root, 4, mask)
    for key, values in (
        ("observation.state", batch["observation.state"]),
        ("action", absolute),
        ("action.relative", relative),
    ):
        for name, want in {
            "mean": values.mean(0),
            "std": values.std(0),
            "min": values.min(0),
            "max": values.max(0),
            "q01": np.quantile(values, 0.01, axis=0),
            "q99": np.quantile(values, 0.99, axis=0),
        }.items():
            np.testing.assert_allclose(stats[key][name], want, rtol=1e-5, atol=1e-6)
            assert stats[key][name].dtype == np.float32
    assert "action.relative" not in load_stats(root, 4)


def test_a_mask_that_does_not_fit(root: Path) -> None:
    with pytest.raises(UserError, match=r"mask \[3\] does not fit action\[2\]"):
        load_stats(root, 4, [True, True, False])


def test_stats_json_is_lerobots_aggregate_and_its_moments_are_exact(tmp_path: Path, mode: str) -> None:
    root = make(tmp_path / "d", (6, 4, 5), mode)
    written = LeRobotDataset("local/toy", root=root).meta.stats
    theirs = aggregate_stats([_row_stats(row) for row in read_episode_rows(root, with_stats=True)])
    assert written.keys() == theirs.keys()
    for key, entry in theirs.items():
        for name, value in entry.items():
            np.testing.assert_allclose(written[key][name], value, rtol=1e-6, atol=1e-9, err_msg=f"{key} {name}")
    data = open_dataset(root)
    np.testing.assert_allclose(written["action"]["std"], data.columns["action"].std(0), rtol=1e-5)
    assert json.loads((root / "meta/stats.json").read_text())["action"]["count"] == [15]


def test_image_statistics_are_those_of_the_pixels(tmp_path: Path) -> None:
    root = make(tmp_path / "d", (6, 4), "image")
    pixels = ChunkLoader(root, 1, 10, progress=False).gather(np.arange(10))["observation.images.front"] / 255
    stats = LeRobotDataset("local/toy", root=root).meta.stats["observation.images.front"]
    assert stats["mean"].shape == (3, 1, 1) and stats["count"] == [10]
    for name, want in {
        "mean": pixels.mean((0, 1, 2)),
        "std": pixels.std((0, 1, 2)),
        "max": pixels.max((0, 1, 2)),
    }.items():
        np.testing.assert_allclose(stats[name].ravel(), want, rtol=1e-6, atol=1e-12)


def test_what_hardly_or_never_moves_is_not_divided_by_nothing() -> None:
    """A gripper closed in one frame of two hundred has its extremes as quantiles; a state that never moves has room."""
    moving = np.zeros((400, 2), np.float32)
    moving[:2, 0] = 1.0
    stats = exact(Rows(moving.__getitem__, None, np.ones(400, np.int64), 1, 2), "")
    assert (stats["q01"][0], stats["q99"][0]) == (0.0, 1.0) and (stats["q01"][1], stats["q99"][1]) == (0.0, 0.0)
    roomy = _with_room(stats)
    assert roomy["std"][1] == 1.0 and (roomy["q01"][1], roomy["q99"][1]) == (-1.0, 1.0)
    assert roomy["std"][0] == stats["std"][0] and roomy["max"][0] == 1.0


# In blocks -----------------------------------------------------------------------------------------------------------


def in_memory(values: np.ndarray) -> dict[str, np.ndarray]:
    """What the blocks are to give, of all values [P, D] at once."""
    x = values.astype(np.float64)
    q01, q99 = np.quantile(x, (0.01, 0.99), axis=0)
    same = q01 == q99
    q01, q99 = np.where(same, x.min(0), q01), np.where(same, x.max(0), q99)
    return {"mean": x.mean(0), "std": x.std(0), "min": x.min(0), "max": x.max(0), "q01": q01, "q99": q99}


def chunked_values(rng: np.random.Generator, frames: int, horizon: int) -> tuple[Rows, np.ndarray]:
    """Rows of several kinds, each of which a selection may trip over, and all of them [P, 6]."""
    steps = rng.integers(0, horizon, frames, endpoint=True)
    n = int(steps.sum())
    values = np.empty((n, 6), np.float32)
    values[:, 0] = rng.standard_normal(n)
    values[:, 1] = rng.random(n) < 0.5  # a gripper
    values[:, 2] = rng.random(n) < 0.004  # one that hardly closes
    values[:, 3] = 7.0
    values[:, 4] = np.sort(rng.standard_cauchy(n))  # another distribution in each block
    values[:, 5] = 1e4 + 1e-2 * rng.integers(0, 5, n)  # far from 0, few values, each at an edge of its bracket
    begins = np.cumsum(steps) - steps

    def take(at: np.ndarray) -> np.ndarray:
        return values[np.concatenate([np.arange(begins[i], begins[i] + steps[i]) for i in at] or [np.empty(0, int)])]

    return Rows(take, None, steps, horizon, 6), values


@pytest.mark.parametrize("sample", [1 << 20, 5000, 40])
def test_blocks_give_what_memory_would(monkeypatch: pytest.MonkeyPatch, sample: int) -> None:
    """Whatever the sample says: with 40 of 30 000 rows its brackets miss, and are widened until they do not."""
    rows, values = chunked_values(np.random.default_rng(1), 6000, 10)
    monkeypatch.setattr(blocks, "BLOCK", 600)
    monkeypatch.setattr(blocks, "SAMPLE", sample)
    want, have = in_memory(values), exact(rows, "", progress=False)
    for name in ("min", "max", "q01", "q99"):
        np.testing.assert_array_equal(have[name], want[name].astype(np.float32), err_msg=name)
    for name in ("mean", "std"):
        np.testing.assert_allclose(have[name], want[name], rtol=1e-6, atol=1e-6, err_msg=name)


def test_a_missed_bracket_costs_a_pass_and_not_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, values = chunked_values(np.random.default_rng(2), 2000, 4)
    passes, one_pass = [], blocks._one_pass
    monkeypatch.setattr(blocks, "SAMPLE", 1000)
    monkeypatch.setattr(blocks, "_WIDTH", 1e-3)
    monkeypatch.setattr(blocks, "_one_pass", lambda *a: passes.append(1) or one_pass(*a))
    have = exact(rows, "", progress=False)
    assert len(passes) > 1
    np.testing.assert_array_equal(have["q99"], in_memory(values)["q99"].astype(np.float32))


def test_sampled_rows_are_drawn_evenly() -> None:
    rng = np.random.default_rng(3)
    rows, values = chunked_values(rng, 3000, 8)
    sample = rows.sample(4000)
    assert abs(sample.shape[1] - 4000) < 400
    ranks = np.searchsorted(np.sort(values[:, 0]), sample[0]) / len(values)
    assert np.abs(np.sort(ranks) - np.linspace(0, 1, len(ranks))).max() < 0.04  # Kolmogorov-Smirnov, p < 1e-5
    np.testing.assert_array_equal(sample, rows.sample(4000))


def test_the_rows_of_a_chunk_are_those_that_the_loader_gives(root: Path) -> None:
    trainable = np.arange(15) % 5 != 0
    batch = ChunkLoader(root, 4, 15, cameras=[], trainable=trainable).gather(np.flatnonzero(trainable))
    rows = chunk_rows(open_dataset(root), 4, None, trainable)
    np.testing.assert_array_equal(rows.block(0, len(rows.steps)).T, batch["action"][~batch["action_is_pad"]])


# Kept beside the data -----------------------------------------------------------------------------------------------


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Titles of what was computed, not read."""
    from vla_stack.data import stats as module

    titles: list[str] = []
    monkeypatch.setattr(module, "exact", lambda rows, title, progress: titles.append(title) or exact(rows, title))
    return titles


def same(a: dict, b: dict) -> None:
    assert a.keys() == b.keys()
    for key, of in a.items():
        for name, value in of.items():
            np.testing.assert_array_equal(value, b[key][name])
            assert b[key][name].dtype == np.float32


def kept(root: Path) -> list[Path]:
    return sorted((root / "meta/chunk_stats").glob("*.json"))


def test_statistics_are_computed_once_for_each_question(root: Path, computed: list[str]) -> None:
    first = load_stats(root, 4)
    same(first, load_stats(root, 4))
    assert len(computed) == 2 and len(kept(root)) == 1  # states and chunks
    for question in ({"horizon": 3}, {"relative": [True, False]}, {"trainable": np.arange(15) > 3}):
        load_stats(root, **{"horizon": 4, **question})
    assert len(kept(root)) == 4 and len(computed) == 8


def test_what_is_kept_is_not_trusted(root: Path, computed: list[str]) -> None:
    first = load_stats(root, 4)
    (file,) = kept(root)
    good = file.read_text()
    other = json.loads(good)
    other["stats"]["action"]["mean"] = [0.0]
    for bad in ("", "{", good[:-40], good.replace('"mean"', '"man"'), json.dumps(other), good.replace(" 0.", " 9.", 1)):
        assert bad != good
        file.write_text(bad)
        same(first, load_stats(root, 4))
        assert json.loads(file.read_text()) == json.loads(good)
    assert len(computed) == 2 * 7


def test_a_dataset_that_has_changed_asks_anew(tmp_path: Path, computed: list[str]) -> None:
    root = make(tmp_path / "d", (6, 4))
    first = load_stats(root, 4)
    make(root, (5,), first=2)
    assert (load_stats(root, 4)["action"]["max"] != first["action"]["max"]).any() and len(computed) == 4
    data = open_dataset(root)
    data.columns["action"] = data.columns["action"] + 1
    np.testing.assert_allclose(
        load_stats(data, 4)["action"]["min"], load_stats(root, 4)["action"]["min"] + 1, rtol=1e-6
    )


def test_a_folder_that_cannot_be_written_only_costs_time(root: Path, computed: list[str]) -> None:
    (root / "meta/chunk_stats").write_text("no folder")
    same(load_stats(root, 4), load_stats(root, 4))
    assert len(computed) == 4


def test_old_files_go(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vla_stack.data import stored_stats

    monkeypatch.setattr(stored_stats, "KEPT", 3)
    for horizon in range(1, 6):
        load_stats(root, horizon)
    assert len(kept(root)) == 3


def test_nobody_trains_on_nothing(root: Path) -> None:
    with pytest.raises(UserError, match="no frame is left to train on"):
        load_stats(root, 4, trainable=np.zeros(15, bool))

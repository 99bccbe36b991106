"""Statistics against brute force, and against LeRobot's own."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from lerobot.datasets.compute_stats import aggregate_stats
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from toy_robot import make

from vla_stack.data.dataset import open_dataset, read_episode_rows
from vla_stack.data.integrity import _row_stats
from vla_stack.data.loader import ChunkLoader
from vla_stack.data.stats import _exact, _with_room, load_stats
from vla_stack.errors import UserError


def test_chunk_statistics_by_brute_force(root: Path) -> None:
    mask = np.array([True, False])
    batch = ChunkLoader(root, 4, 15, cameras=[]).gather(np.arange(15))
    valid = ~batch["action_is_pad"]
    absolute = batch["action"][valid]
    relative = (batch["action"] - batch["observation.state"][:, None, :2] * mask)[valid]
    stats = load_stats(root, 4, mask)
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
    stats = _exact(moving)
    assert (stats["q01"][0], stats["q99"][0]) == (0.0, 1.0) and (stats["q01"][1], stats["q99"][1]) == (0.0, 0.0)
    roomy = _with_room(stats)
    assert roomy["std"][1] == 1.0 and (roomy["q01"][1], roomy["q99"][1]) == (-1.0, 1.0)
    assert roomy["std"][0] == stats["std"][0] and roomy["max"][0] == 1.0

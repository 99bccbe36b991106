"""Damage is named, and repair goes back to the last good episode without touching good ones."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from toy_robot import make

from vla_stack.data.dataset import open_dataset, read_episode_rows
from vla_stack.data.digests import DIGESTS
from vla_stack.data.integrity import check, repair
from vla_stack.data.loader import ChunkLoader
from vla_stack.errors import UserError


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def data(root: Path, episode: int) -> Path:
    return root / f"data/chunk-000/file-{episode:03d}.parquet"


def video(root: Path, episode: int) -> Path:
    return root / f"videos/observation.images.front/chunk-000/file-{episode:03d}.mp4"


@pytest.mark.parametrize("damage", [lambda r: truncate(data(r, 2)), lambda r: data(r, 2).unlink()])
def test_a_damaged_last_episode_is_dropped(root: Path, damage) -> None:
    damage(root)
    with pytest.raises(UserError, match=r"file-002.parquet .*is .*vla data repair"):
        open_dataset(root)
    assert any("file-002.parquet" in p for p in check(root))
    report = repair(root)
    assert (report.episodes_before, report.episodes, report.frames) == (3, 2, 10)
    assert check(root) == []
    assert len(LeRobotDataset("local/toy", root=root)) == 10
    stats = json.loads((root / "meta/stats.json").read_text())
    assert stats["action"]["count"] == [10]
    make(root, (2,), first=2)
    assert check(root) == []


def test_a_short_video_is_found_before_training(root: Path) -> None:
    video(root, 2).write_bytes(video(root, 1).read_bytes())  # 4 frames for 5 rows
    with pytest.raises(UserError, match=r"file-002.mp4 lacks 1 of its 5 frames, the first one in episode 2"):
        ChunkLoader(root, 2, 2, progress=False)
    assert any("holds 4 frames, 5 are needed" in p for p in check(root))
    assert repair(root).episodes == 2
    ChunkLoader(root, 2, 2, progress=False)


def test_intact_episodes_after_a_damaged_one_are_never_dropped(root: Path) -> None:
    truncate(video(root, 1))
    before = {p: p.read_bytes() for p in root.rglob("*") if p.is_file()}
    with pytest.raises(UserError, match="episode 1 is damaged .* 1 episodes after it are intact"):
        repair(root)
    assert {p: p.read_bytes() for p in root.rglob("*") if p.is_file() if p.name != "lock"} == before


def test_lerobots_own_crash_is_repaired(tmp_path: Path) -> None:
    """Its writer, killed before finalize(): info.json counts episodes that footerless parquet files have lost."""
    root = make(tmp_path / "d", (3, 2), "image")
    file = root / "meta/info.json"
    info = json.loads(file.read_text())
    file.write_text(json.dumps(info | {"total_episodes": 4, "total_frames": 12, "splits": {"train": "0:4"}}))
    data(root, 2).write_bytes(b"PAR1 and then the process died")
    (root / "meta/episodes/chunk-000/file-001.parquet").write_bytes(b"PAR1")
    report = repair(root)
    assert (report.episodes_before, report.episodes, report.frames) == (4, 2, 5)
    assert (root / ".damaged/data/chunk-000/file-002.parquet").exists()
    assert len(LeRobotDataset("local/toy", root=root)) == 5
    assert check(root) == []


def test_lost_tasks_are_rebuilt_from_the_episodes(root: Path) -> None:
    tasks = open_dataset(root).tasks
    (root / "meta/tasks.parquet").unlink()
    with pytest.raises(UserError, match="tasks.parquet is missing"):
        open_dataset(root)
    repair(root)
    assert open_dataset(root).tasks == tasks


def unchanged(root: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in root.rglob("*") if p.is_file() if p.name != "lock"}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda r: video(r, 0).parents[1].rename(r.parent / "away"), "front holds no video, and all 3 .* put it back"),
        (lambda r: (r / "data").rename(r.parent / "away"), "none of its 3 episodes can be read .* put back"),
    ],
)
def test_what_was_moved_away_can_be_put_back(root: Path, damage, message: str) -> None:
    whole = unchanged(root)
    damage(root)
    (root / ".recording").mkdir()
    (root / ".recording/left.mp4").write_bytes(b"by a recorder that died")
    before = unchanged(root)
    for repairing in (lambda: repair(root), lambda: make(root, (2,))):
        with pytest.raises(UserError, match=message):
            repairing()
        assert unchanged(root) == before
    gone = next(path for path in whole if not path.exists())
    while not gone.parent.exists():
        gone = gone.parent
    (root.parent / "away").rename(gone)
    assert repair(root).episodes == 3
    assert unchanged(root) == whole


def test_a_recorder_drops_no_episode_that_was_saved(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = video(root, 2).read_bytes()
    video(root, 2).unlink()
    (root / ".recording").mkdir()
    (root / ".recording/left.mp4").write_bytes(b"by a recorder that died")
    with pytest.raises(UserError, match=r"of 3 episodes 1 cannot be read \(.*file-002.mp4 .*vla data repair"):
        make(root, (2,), first=3)
    assert open_dataset(root).num_episodes == 3
    video(root, 2).write_bytes(good)
    make(root, (2,), first=3)
    assert "deleted the unfinished episode's left.mp4" in capsys.readouterr().out
    assert open_dataset(root).num_episodes == 4 and check(root) == []


def test_what_one_repair_has_set_aside_the_next_one_keeps(root: Path) -> None:
    lost = [data(root, 2).read_bytes()]
    video(root, 2).unlink()
    repair(root)
    make(root, (7,), first=2)
    lost.append(data(root, 2).read_bytes())
    video(root, 2).unlink()
    repair(root)
    kept = [root / folder / "data/chunk-000/file-002.parquet" for folder in (".damaged", ".damaged.2")]
    assert [path.read_bytes() for path in kept] == lost and lost[0] != lost[1]


@pytest.mark.parametrize("rows_per_file", [1, 2, 200])
def test_lost_rows_of_meta_episodes_are_made_anew(
    tmp_path: Path, mode: str, rows_per_file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vla_stack.data.store.ROWS_PER_FILE", rows_per_file)
    root = make(tmp_path / "d", (3, 2, 4), mode)
    before = open_dataset(root)
    rows = read_episode_rows(root, with_stats=True)
    max((root / "meta/episodes").glob("*/*.parquet")).unlink()
    report = repair(root)
    assert (report.episodes_before, report.episodes, report.frames) == (3, 3, 9)
    assert "described" in report.actions[0] and check(root) == []
    after = open_dataset(root)
    for name, column in before.columns.items():
        np.testing.assert_array_equal(column, after.columns[name])
    for row, anew in zip(rows, read_episode_rows(root, with_stats=True), strict=True):
        assert row.keys() == anew.keys()
        for name, value in row.items():
            tolerance = 0.05 if "images" in name else 1e-9  # what video encoding changes
            if name.startswith("stats/"):
                np.testing.assert_allclose(anew[name], value, atol=tolerance, err_msg=name)
            elif name != "meta/episodes/file_index":
                assert anew[name] == value, name
    assert len(LeRobotDataset("local/toy", root=root, video_backend="pyav")) == 9
    make(root, (2,), mode, first=1)
    assert check(root) == [] and open_dataset(root).num_episodes == 4


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda r: truncate(video(r, 1)), "file-001.mp4 is not a readable video"),
        (lambda r: video(r, 1).write_bytes(video(r, 0).read_bytes()), "holds 6 frames, episode 1 has 4"),
        (lambda r: data(r, 1).unlink(), "the frames of episode 1 are missing"),
        (lambda r: (r / "meta/tasks.parquet").unlink(), "tasks.parquet is missing"),
    ],
)
def test_frames_are_never_cut_for_want_of_a_row(root: Path, damage, why: str) -> None:
    max((root / "meta/episodes").glob("*/*.parquet")).unlink()
    damage(root)
    before = {p: p.read_bytes() for p in root.rglob("*") if p.is_file()}
    with pytest.raises(UserError, match=f"has lost the episodes from 0 on.*{why}.*nothing was changed"):
        repair(root)
    assert {p: p.read_bytes() for p in root.rglob("*") if p.is_file() if p.name != "lock"} == before


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda r: (r / "meta/info.json").unlink(), "info.json is missing"),
        (lambda r: (r / "meta/info.json").write_text("{"), "info.json is not valid JSON"),
        (lambda r: edit(r, codebase_version="v2.1"), "dataset version 'v2.1'"),
        (lambda r: edit(r, total_frames=99), "frame ranges do not join up"),
        (lambda r: edit(r, total_episodes=9), "describes 3 of the 9 episodes"),
        (lambda r: data(r, 0).write_bytes(data(r, 1).read_bytes()), "data holds 13 rows, meta/info.json counts 15"),
    ],
)
def test_contradictions_name_the_file(root: Path, break_it, message: str) -> None:
    (root / DIGESTS).unlink()  # as in datasets of others
    break_it(root)
    with pytest.raises(UserError, match=message):
        open_dataset(root)


def edit(root: Path, **changes) -> None:
    file = root / "meta/info.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_nan_names_its_episode(root: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(data(root, 1))
    values = np.stack(table["action"].to_numpy())
    values[2, 0] = np.nan
    column = pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), 2)
    pq.write_table(table.set_column(table.column_names.index("action"), "action", column), data(root, 1))
    with pytest.raises(UserError, match=r"file-001.parquet \(episode 1\) is not what was recorded"):
        open_dataset(root)
    (root / DIGESTS).unlink()
    with pytest.raises(UserError, match="'action' is not finite in episode 1, frame 2"):
        open_dataset(root)

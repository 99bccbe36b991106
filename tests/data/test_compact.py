"""A packed dataset has the rows, pictures and times of the recorded one; whoever kills the packing loses nothing."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import av
import numpy as np
import pyarrow.compute as pc
import pytest
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from toy_robot import make

from vla_stack.data import compact as module
from vla_stack.data.compact import compact
from vla_stack.data.dataset import open_dataset, read_episode_rows, read_parquet
from vla_stack.data.integrity import check
from vla_stack.data.layout import INFO, read_json, write_json
from vla_stack.data.loader import ChunkLoader
from vla_stack.errors import UserError

LENGTHS = (6, 1, 5, 9, 3)


def files(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def packets(path: Path) -> list[tuple[int, bytes]]:
    with av.open(str(path)) as container:
        return [(p.pts, bytes(p)) for p in container.demux(video=0) if p.pts is not None]


def same_dataset(new: Path, old: Path) -> None:
    a, b = open_dataset(new), open_dataset(old)
    assert (a.info, a.tasks, a.columns.keys()) == (b.info, b.tasks, b.columns.keys())
    for name, column in b.columns.items():
        assert column.tobytes() == a.columns[name].tobytes(), name
    rows = np.arange(b.num_frames)
    want, have = (ChunkLoader(d, 4, 4, progress=False).gather(rows) for d in (b, a))
    for name in want:
        np.testing.assert_array_equal(have[name], want[name])
    for mine, theirs in zip(*(read_episode_rows(root, with_stats=True) for root in (new, old)), strict=True):
        moved = {k for k in theirs if k.endswith(("chunk_index", "file_index", "_timestamp"))}
        assert mine.keys() == theirs.keys() and all(mine[k] == theirs[k] for k in theirs.keys() - moved)


def limited(root: Path, **sizes: float) -> Path:
    """The dataset with other target sizes."""
    write_json(root / INFO, read_json(root / INFO) | sizes)
    from vla_stack.data import digests

    digests.seal(root)
    return root


def test_nothing_is_lost(tmp_path: Path, mode: str) -> None:
    old, new = make(tmp_path / "old", LENGTHS, mode), tmp_path / "new"
    before = files(old)
    done = compact(old, new)
    assert files(old) == before and check(new, deep=True) == []
    same_dataset(new, old)
    cameras = 2 if mode == "video" else 0
    assert (done.episodes, done.before - done.after) == (5, 4 + 4 * cameras)
    assert len(list((new / "data").rglob("*.parquet"))) == 1
    theirs = [LeRobotDataset("local/x", root=root, video_backend="pyav", return_uint8=True) for root in (old, new)]
    for i in range(len(theirs[0])):
        one, other = (dataset[i] for dataset in theirs)
        assert one.keys() == other.keys()
        for name in one:
            assert one[name] == other[name] if name == "task" else bool((one[name] == other[name]).all()), name


def test_videos_are_the_same_packets_at_exact_times(tmp_path: Path) -> None:
    old, new = make(tmp_path / "old", LENGTHS), tmp_path / "new"
    compact(old, new)
    folder = "videos/observation.images.front/chunk-000"
    whole = packets(new / folder / "file-000.mp4")
    parts = [packets(old / folder / f"file-{i:03d}.mp4") for i in range(5)]
    assert [data for _, data in whole] == [data for part in parts for _, data in part]
    ticks = parts[0][1][0] - parts[0][0][0]
    assert [time for time, _ in whole] == [i * ticks for i in range(sum(LENGTHS))]
    starts = [row["videos/observation.images.front/from_timestamp"] for row in read_episode_rows(new)]
    assert starts == [float(n) / 10 for n in np.cumsum((0, *LENGTHS[:-1]))]


def test_files_keep_to_their_sizes(tmp_path: Path) -> None:
    old = limited(make(tmp_path / "old", LENGTHS), video_files_size_in_mb=0.004, data_files_size_in_mb=0.015)
    compact(old, tmp_path / "new")
    same_dataset(tmp_path / "new", old)
    for pattern in ("data/*/*.parquet", "videos/*front/*/*.mp4"):
        sizes = [[p.stat().st_size for p in sorted(root.glob(pattern))] for root in (old, tmp_path / "new")]
        assert 1 < len(sizes[1]) < len(sizes[0])
    assert max(p.stat().st_size for p in (tmp_path / "new/data").rglob("*.parquet")) <= 0.015 * 2**20


def test_in_place_and_again(tmp_path: Path) -> None:
    root, copy = make(tmp_path / "d", LENGTHS), make(tmp_path / "copy", LENGTHS)
    (root / "notes.txt").write_text("mine")
    done = compact(root)
    assert (root / "notes.txt").read_text() == "mine" and check(root, deep=True) == []
    again = compact(root)
    assert again.before == again.after == done.after
    assert {p.name for p in tmp_path.iterdir()} == {"d", "copy"}
    open_dataset(root)
    assert (open_dataset(root).columns["action"] == open_dataset(copy).columns["action"]).all()


def test_a_linked_dataset_is_packed_where_it_lies(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    root, link = make(tmp_path / "disk/real", LENGTHS), tmp_path / "link"
    link.symlink_to(root)
    done = compact(link)
    assert done.after < done.before and link.is_symlink() and not root.is_symlink()
    assert {p.name for p in tmp_path.iterdir()} == {"disk", "link"}
    assert [p.name for p in root.parent.iterdir()] == ["real"] and check(link, deep=True) == []


def test_a_recording_goes_on_in_a_packed_dataset(tmp_path: Path) -> None:
    root = make(tmp_path / "d", (6, 4))
    compact(root)
    make(root, (5,), first=2)
    assert check(root, deep=True) == []
    compact(root)
    assert check(root, deep=True) == [] and len(list((root / "videos").rglob("*.mp4"))) == 2
    same_dataset(root, make(tmp_path / "other", (6, 4, 5)))


@pytest.mark.parametrize("into", ["in place", "into"])
def test_killed_in_the_middle(tmp_path: Path, into: str) -> None:
    """The process dies after a step, as by kill -9; the old dataset is whole, and another try succeeds."""
    root = make(tmp_path / "d", (4, 3))
    before, target = files(root), None if into == "in place" else tmp_path / "new"
    packing = [(module._Packing, name) for name in ("_pack_data", "_pack_videos", "_write_rows")]
    for owner, step in (*packing, (module.digests, "seal")):
        if (child := os.fork()) == 0:
            call = getattr(owner, step)
            setattr(owner, step, lambda *a, call=call: (call(*a), os.kill(os.getpid(), signal.SIGKILL)))
            with contextlib.suppress(BaseException):
                compact(root, target, progress=False)
            os._exit(1)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL, step
        assert {n: b for n, b in files(root).items() if not n.startswith(".recording")} == before
        assert target is None or not target.exists()
    done = compact(root, target)
    assert done.episodes == 2 and check(target or root, deep=True) == []
    assert sum(p.is_dir() for p in tmp_path.iterdir()) == (1 if target is None else 2)


def test_a_video_of_another_encoder_gets_a_file_of_its_own(tmp_path: Path) -> None:
    from vla_stack.data import video

    root = make(tmp_path / "d", (4, 3))
    quality, video.QUALITY, video.PRESET = (video.QUALITY, video.PRESET), 30, "medium"
    try:
        make(root, (5, 2), first=2)
    finally:
        video.QUALITY, video.PRESET = quality
    compact(root, tmp_path / "new")
    same_dataset(tmp_path / "new", root)
    assert len(list((tmp_path / "new/videos/observation.images.front").rglob("*.mp4"))) == 2


def test_what_is_damaged_is_not_packed(tmp_path: Path) -> None:
    root = make(tmp_path / "d", (4, 3, 2))
    target = tmp_path / "new"
    data = root / "data/chunk-000/file-001.parquet"
    good = data.read_bytes()
    data.write_bytes(good[:-9] + b"x" + good[-8:])
    with pytest.raises(UserError, match=r"file-001.parquet .*its SHA-256 differs"):
        compact(root, target)
    (root / "meta/digests.jsonl").unlink()
    table = read_parquet(root / "data/chunk-000/file-000.parquet")
    rows = table.set_column(
        table.column_names.index("index"),
        "index",
        pc.add(table["index"], 1),  # rows of another episode
    )
    module.digests.write_pages(rows, data)
    with pytest.raises(UserError, match="their rows are not those that meta/episodes describes"):
        compact(root, target)
    data.unlink()
    with pytest.raises(UserError, match=r"file-001.parquet is missing"):
        compact(root, target)
    target.mkdir()
    with pytest.raises(UserError, match="exists -- compact into a new folder"):
        compact(root, target)

"""Batches are what LeRobot would return for the same frames, in an order that a seed fixes and a state continues."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from toy_robot import HEIGHT, WIDTH, make

from vla_stack import cli
from vla_stack.data.compact import compact
from vla_stack.data.dataset import open_dataset
from vla_stack.data.frame_cache import cache_folder, open_frames
from vla_stack.data.loader import ChunkLoader
from vla_stack.data.on_demand import in_passing
from vla_stack.data.stats import load_stats
from vla_stack.errors import UserError
from vla_stack.images import fit_image

H = 4


def loader(root: Path, batch_size: int = 4, **kwargs) -> ChunkLoader:
    return ChunkLoader(root, H, batch_size, progress=False, **kwargs)


def lerobot_written(root: Path, videos: bool) -> Path:
    """A dataset by LeRobot's own writer: several episodes to a file, other column names, a string column."""
    features = {
        "observation.image": {
            "dtype": "video" if videos else "image",
            "shape": (32, 40, 3),
            "names": ["height", "width", "channels"],
        },
        "observation.state": {"dtype": "float32", "shape": (3,), "names": None},
        "action": {"dtype": "float32", "shape": (2,), "names": None},
        "next.reward": {"dtype": "float32", "shape": (1,), "names": None},
        "mask": {"dtype": "float32", "shape": (2, 3), "names": None},
    }
    dataset = LeRobotDataset.create("local/theirs", 10, features, root=root, use_videos=videos)
    rng = np.random.default_rng(0)
    for episode, length in enumerate((6, 4, 5)):
        for k in range(length):
            image = np.full((32, 40, 3), (40 * episode, 30 * k, 90), np.uint8)
            dataset.add_frame(
                {
                    "observation.image": image,
                    "observation.state": rng.normal(size=3).astype(np.float32),
                    "action": rng.normal(size=2).astype(np.float32),
                    "next.reward": np.array([k], np.float32),
                    "mask": rng.normal(size=(2, 3)).astype(np.float32),
                    "task": "do it",
                }
            )
        dataset.save_episode(parallel_encoding=False)
    dataset.finalize()
    return root


def same_as_lerobot(root: Path) -> None:
    chunk = {"action": [i / 10 for i in range(H)]}
    theirs = LeRobotDataset("local/x", root=root, delta_timestamps=chunk, video_backend="pyav", return_uint8=True)
    ours = loader(root)
    batch = ours.gather(np.arange(len(theirs)))
    assert batch["action_is_pad"].dtype == bool and batch["action"].dtype == np.float32
    for i in range(len(theirs)):
        item = theirs[i]
        assert batch["task"][i] == item.pop("task")
        for name, value in item.items():
            value = value.numpy()
            if name.startswith("observation.image"):
                value = value if value.dtype == np.uint8 else (value * 255).round().astype(np.uint8)
                value = value.transpose(1, 2, 0)
                assert batch[name].dtype == np.uint8
            # LeRobot hands float64 columns out as float32
            np.testing.assert_array_equal(np.asarray(batch[name][i], value.dtype), value, err_msg=name)


def test_ours_reads_as_lerobot_does(tmp_path: Path, mode: str) -> None:
    same_as_lerobot(make(tmp_path / "d", (6, 4, 5), mode))


@pytest.mark.slow
@pytest.mark.parametrize("videos", [True, False])
def test_theirs_reads_as_lerobot_does(tmp_path: Path, videos: bool) -> None:
    same_as_lerobot(lerobot_written(tmp_path / "d", videos))


def test_contract(root: Path) -> None:
    batch = next(loader(root))
    assert batch["observation.images.front"].shape == batch["observation.images.wrist"].shape == (4, HEIGHT, WIDTH, 3)
    assert batch["observation.state"].shape == (4, 3) and batch["action"].shape == (4, H, 2)
    assert batch["action_is_pad"].shape == (4, H) and len(batch["task"]) == 4
    assert "observation.images.wrist" not in next(loader(root, cameras=["front"]))


def test_chunks_end_with_their_episode(root: Path) -> None:
    data = open_dataset(root)
    batch = loader(root).gather(np.arange(15))
    for i, (chunk, pad) in enumerate(zip(batch["action"], batch["action_is_pad"], strict=True)):
        left = min(H, data.frame_end[i] - i)
        assert pad.tolist() == [j >= left for j in range(H)]
        np.testing.assert_array_equal(chunk[:left], data.columns["action"][i : i + left])
        assert (chunk[left:] == data.columns["action"][data.frame_end[i] - 1]).all()


def test_an_epoch_holds_every_frame_once(root: Path) -> None:
    stream = loader(root, cameras=[])
    seen = np.concatenate([next(stream)["index"] for _ in range(15)])  # four epochs of 15 frames in batches of 4
    for epoch in seen.reshape(4, 15):
        assert sorted(epoch) == list(range(15))
    assert len({tuple(epoch) for epoch in seen.reshape(4, 15)}) == 4


def test_only_the_chosen_episodes(root: Path) -> None:
    stream = loader(root, cameras=[], episodes=[0, 2])
    assert {int(i) for _ in range(6) for i in next(stream)["episode_index"]} == {0, 2}
    assert len(stream) == 3  # 11 frames


def test_order_is_the_seeds(root: Path) -> None:
    a, b, c = (loader(root, cameras=[], seed=s) for s in (3, 3, 4))
    orders = [[next(x)["index"].tolist() for _ in range(6)] for x in (a, b, c)]
    assert orders[0] == orders[1] != orders[2]


def test_pictures_of_another_size_are_cached_beside_the_recorded_ones(root: Path) -> None:
    rows = np.arange(15)
    recorded = loader(root).gather(rows)
    scaled = loader(root, image_sizes={"front": (8, 8)}).gather(rows)
    front, wrist = "observation.images.front", "observation.images.wrist"
    assert scaled[front].shape == (15, 8, 8, 3)
    assert (scaled[front][0] == fit_image(recorded[front][0], 8, 8)).all()
    assert (scaled[front][:, [0, -1]] == 0).all() and (scaled[front][:, 2:6].max((1, 2, 3)) > 0).all()  # 24x16 in 8x8
    np.testing.assert_array_equal(scaled[wrist], recorded[wrist])
    np.testing.assert_array_equal(loader(root).gather(rows)[front], recorded[front])
    names = {p.name for p in cache_folder(root).glob("*.u8")}
    assert names == {"front.u8", "wrist.u8", "front.8x8.u8"}


def test_exact_resume(root: Path) -> None:
    whole = loader(root, seed=1)
    for _ in range(5):  # into the second epoch
        next(whole)
    resumed = loader(root, seed=1)
    resumed.load_state_dict(whole.state_dict())
    for _ in range(5):
        a, b = next(whole), next(resumed)
        assert a.keys() == b.keys()
        for name in a:
            np.testing.assert_array_equal(a[name], b[name])
    with pytest.raises(UserError, match="seed 1, this loader has 2"):
        loader(root, seed=2).load_state_dict(whole.state_dict())
    with pytest.raises(UserError, match="epoch_size 15, this loader has 4"):
        loader(root, seed=1, episodes=[1]).load_state_dict(whole.state_dict())


def test_weights_are_met_as_nearly_as_counts_can(root: Path) -> None:
    weights = np.zeros(15)
    weights[[0, 5, 9]] = 1.0, 2.0, 3.5
    weights[14] = 0.5
    stream = loader(root, batch_size=4, cameras=[], weights=weights)
    for _ in range(10):
        drawn = np.bincount(next(stream)["index"], minlength=15)  # one epoch: as many draws as frames with weight
        assert (np.abs(drawn - 4 * weights / weights.sum()) < 1).all()
    many = np.bincount(np.concatenate([next(stream)["index"] for _ in range(300)]), minlength=15) / 1200
    np.testing.assert_allclose(many, weights / weights.sum(), atol=0.03)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"cameras": ["top"]}, "no camera 'top' -- it has front, wrist"),
        ({"episodes": [3]}, "no episode 3"),
        ({"episodes": []}, "no frame is left"),
        ({"weights": np.ones(3)}, "one a frame"),
        ({"weights": -np.ones(15)}, "non-negative"),
        ({"batch_size": 0}, "at least 1"),
    ],
)
def test_arguments_that_do_not_fit(root: Path, kwargs: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        loader(root, **kwargs)


# The cache ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that have been decoded."""
    import vla_stack.data.frame_cache as module

    names: list[str] = []
    for name in ("decode", "_encoded_images"):
        call = getattr(module, name)

        def counted(*args, call=call):
            names.append(next(a for a in args if Path(a).suffix).name)
            return call(*args)

        monkeypatch.setattr(module, name, counted)
    return names


def test_cache_is_built_once_and_grows_with_the_dataset(tmp_path: Path, mode: str, decoded: list[str]) -> None:
    root = make(tmp_path / "d", (3, 2), mode)
    old = loader(root, cameras=["front"])
    assert len(decoded) == 2
    loader(root, cameras=["front"])
    assert len(decoded) == 2
    make(root, (4,), mode, first=2)
    before = old.gather(np.arange(5))["observation.images.front"]
    batch = loader(root, cameras=["front"]).gather(np.arange(9))["observation.images.front"]
    assert [Path(n).stem for n in decoded] == ["file-000", "file-001", "file-002"]
    np.testing.assert_array_equal(batch[:5], before)
    np.testing.assert_array_equal(old.gather(np.arange(5))["observation.images.front"], before)
    same_as_lerobot(root)


def test_a_changed_source_makes_the_cache_stale(tmp_path: Path, decoded: list[str]) -> None:
    root = make(tmp_path / "d", (4, 4))
    old = loader(root, cameras=["front"])
    before = old.gather(np.arange(8))["observation.images.front"]
    file = root / "videos/observation.images.front/chunk-000/file-000.mp4"
    file.write_bytes((file.parent / "file-001.mp4").read_bytes())
    batch = loader(root, cameras=["front"]).gather(np.arange(8))["observation.images.front"]
    assert len(decoded) == 4
    np.testing.assert_array_equal(batch[:4], batch[4:])
    np.testing.assert_array_equal(old.gather(np.arange(8))["observation.images.front"], before)  # its map lives on


def test_a_build_that_died_is_finished(tmp_path: Path) -> None:
    root = make(tmp_path / "d", (4, 3))
    want = loader(root).gather(np.arange(7))
    folder = cache_folder(root)
    (folder / "front.json").unlink()
    (folder / "wrist.u8").write_bytes((folder / "wrist.u8").read_bytes()[:100])
    (folder / ".front.u8.tmp").write_bytes(b"half")
    got = loader(root).gather(np.arange(7))
    for key in ("observation.images.front", "observation.images.wrist"):
        np.testing.assert_array_equal(got[key], want[key])


def test_cache_elsewhere(root: Path, tmp_path: Path) -> None:
    loader(root, cache_dir=tmp_path / "fast disk")
    assert (tmp_path / "fast disk/front.u8").stat().st_size == 15 * HEIGHT * WIDTH * 3
    assert not cache_folder(root).exists()


def test_cache_of_a_dataset_that_is_named_by_dots(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beside = cache_folder(root)
    for name, folder in ((".", root), ("..", root / "meta"), ("../toy", root)):
        monkeypatch.chdir(folder)
        assert cache_folder(Path(name)).resolve() == beside
    monkeypatch.chdir(root)
    loader(Path())
    assert cli.main(["data", "info", "."]) == 0
    assert {path.name for path in root.parent.iterdir()} == {"toy", "toy.frames"}


def test_cache_of_a_link_lies_beside_the_link(root: Path, tmp_path: Path) -> None:
    (tmp_path / "links").mkdir()
    (link := tmp_path / "links/link").symlink_to(root)
    assert cache_folder(link) == tmp_path / "links/toy.frames"


def test_cache_of_a_dataset_beside_which_nothing_can_be_written(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = loader(root).gather(np.arange(15))["observation.images.front"]
    shutil.rmtree(beside := cache_folder(root))
    access, locked = os.access, {tmp_path}
    monkeypatch.setattr(os, "access", lambda path, mode: path not in locked and access(path, mode))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    np.testing.assert_array_equal(loader(root).gather(np.arange(15))["observation.images.front"], want)
    folder = cache_folder(root)
    assert folder.is_relative_to(tmp_path / "home/vla_stack") and (folder / "front.u8").exists()
    assert not beside.exists()
    other = make(tmp_path / "other/toy")
    locked.add(other.parent)
    assert cache_folder(other) not in (folder, cache_folder(root))  # of the same name
    beside.mkdir()
    assert cache_folder(root) == beside  # somebody made it for us
    locked.add(beside)
    assert cache_folder(root) == folder
    shutil.rmtree(tmp_path / "home")
    (tmp_path / "home").write_text("no folder")
    with pytest.raises(UserError, match="cannot be created .* set XDG_CACHE_HOME to a folder"):
        loader(root)


# On demand ----------------------------------------------------------------------------------------------------------


def test_what_is_decoded_on_demand_is_what_the_cache_holds(tmp_path: Path) -> None:
    root, rows = make(tmp_path / "d", (9, 1, 14)), np.array([23, 0, 0, 8, 9, 10, 22, 17, 1, 18, 23, 3])
    for sizes in ({}, {"front": (8, 8)}):
        lazy = loader(root, cache_gb=0.0, image_sizes=sizes, history=(0, 2)).gather(rows)
        assert sizes or not cache_folder(root).exists()
        kept = loader(root, image_sizes=sizes, history=(0, 2)).gather(rows)
        for key in ("observation.images.front", "observation.images.wrist"):
            np.testing.assert_array_equal(lazy[key], kept[key])


@pytest.mark.parametrize("kwargs", [{}, {"weights": np.arange(15.0)}, {"episodes": [0, 2], "history": (0, 1, 3)}])
def test_batches_on_demand_are_those_of_the_cache(root: Path, kwargs: dict) -> None:
    """The order too, through the end of an epoch, and where a run is resumed or goes back."""
    kept, lazy = loader(root, seed=2, **kwargs), loader(root, seed=2, cache_gb=0.0, **kwargs)
    start = lazy.state_dict()
    for again in (False, True):
        if again:
            kept, lazy = loader(root, seed=2, **kwargs), lazy
            lazy.load_state_dict(start)
        for _ in range(6):
            a, b = next(kept), next(lazy)
            assert a.keys() == b.keys()
            for name in a:
                np.testing.assert_array_equal(a[name], b[name])


def test_theirs_several_episodes_to_a_file_on_demand(tmp_path: Path) -> None:
    root = lerobot_written(tmp_path / "d", videos=True)
    lazy, rows = loader(root, cache_gb=0.0), np.random.default_rng(0).permutation(15)
    np.testing.assert_array_equal(
        lazy.gather(rows)["observation.image"], loader(root).gather(rows)["observation.image"]
    )


def test_what_cannot_be_sought_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures of parquet files, and videos whose key frames are far apart; and all that fits the budget."""
    from vla_stack.data import video

    images = make(tmp_path / "images", (4,), "image")
    loader(images, cache_gb=0.0)
    small = make(tmp_path / "small", (4,))
    loader(small, cache_gb=4 * HEIGHT * WIDTH * 3 * 2 / 1e9)
    monkeypatch.setattr(video, "KEYFRAME_INTERVAL", 250)
    sparse = make(tmp_path / "sparse", (40,))
    loader(sparse, cache_gb=0.0)
    assert all(cache_folder(root).exists() for root in (images, small, sparse))


@pytest.mark.parametrize("kind", ["video", "image", "sparse", "packed", "packed images", "theirs", "their images"])
def test_what_is_looked_at_once_is_what_the_cache_holds(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written for it, wherever an episode lies in its file and however few key frames that has."""
    from vla_stack.data import video

    monkeypatch.setattr(video, "KEYFRAME_INTERVAL", 250 if kind == "sparse" else 2)
    if kind.startswith("their"):
        root = lerobot_written(tmp_path / "d", videos=kind == "theirs")
    else:
        root = make(tmp_path / "d", (5, 70, 33), "image" if "image" in kind else "video")
    if kind.startswith("packed"):
        compact(root)
    dataset = open_dataset(root)
    spans = list(enumerate(zip(dataset.episode_from.tolist(), dataset.episode_to.tolist(), strict=True)))
    got = {
        (camera, every, episode): list(in_passing(dataset, camera, episode, range(first, end, every)))
        for camera in dataset.cameras
        for every in (1, 7)
        for episode, (first, end) in reversed(spans)
    }
    assert not cache_folder(root).exists()
    for camera, kept in open_frames(dataset, list(dataset.cameras), progress=False).items():
        for every in (1, 7):
            for episode, (first, end) in spans:
                np.testing.assert_array_equal(got[camera, every, episode], kept[first:end:every])


def test_a_damaged_video_is_named_when_it_is_sampled(tmp_path: Path) -> None:
    root = make(tmp_path / "d", (6, 6))
    lazy = loader(root, cache_gb=0.0, cameras=["front"])
    file = root / "videos/observation.images.front/chunk-000/file-001.mp4"
    file.write_bytes(file.read_bytes()[:300])
    lazy.gather(np.arange(6))
    with pytest.raises(UserError, match=r"file-001.mp4 is not a readable video"):
        lazy.gather(np.arange(12))
    file.write_bytes((root / "videos/observation.images.wrist/chunk-000/file-000.mp4").read_bytes())
    short = make(tmp_path / "short", (4,))
    (file.parent / "file-001.mp4").write_bytes((short / file.relative_to(root).with_name("file-000.mp4")).read_bytes())
    with pytest.raises(UserError, match=r"file-001.mp4 lacks the frame at"):
        loader(root, cache_gb=0.0, cameras=["front"]).gather(np.arange(6, 12))


# Columns that do not fit ---------------------------------------------------------------------------------------------


def test_mapped_columns_are_the_same_and_leave_no_file(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vla_stack.data import columns, dataset

    kept, folder = open_dataset(root), sorted(root.parent.iterdir())
    monkeypatch.setattr(columns, "MAPPED", 0)
    monkeypatch.setattr(dataset, "BLOCK", 4)
    mapped = open_dataset(root)
    assert len(mapped.columns._maps) == len(mapped.columns) and sorted(root.parent.iterdir()) == folder
    mapped.columns.release()
    for name, column in kept.columns.items():
        assert column.dtype == mapped.columns[name].dtype
        np.testing.assert_array_equal(mapped.columns[name], column)
    for a, b in zip(load_stats(kept, 4).values(), load_stats(mapped, 4).values(), strict=True):
        assert all((a[name] == b[name]).all() for name in a)
    file = root / "data/chunk-000/file-001.parquet"
    (root / "meta/digests.jsonl").unlink()
    file.write_bytes((file.parent / "file-002.parquet").read_bytes())
    with pytest.raises(UserError, match="holds 16 rows, meta/info.json counts 15|out of order from frame 6"):
        open_dataset(root)

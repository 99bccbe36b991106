"""What the recorder writes is what was given, LeRobot opens it, and what does not fit is refused."""

from __future__ import annotations

import os
import resource
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from toy_robot import EXTRA, JOINTS, SPEC, frames, make, picture, record

from vla_stack.data import dataset
from vla_stack.data.dataset import open_dataset
from vla_stack.data.features import Column, read_robot_spec
from vla_stack.data.recorder import EpisodeRecorder
from vla_stack.errors import UserError
from vla_stack.schema import SchemaError


def opened(root: Path, **kwargs) -> LeRobotDataset:
    return LeRobotDataset("local/toy", root=root, video_backend="pyav", **kwargs)


def add(recorder: EpisodeRecorder, **changes) -> None:
    obs, action, joints = next(frames(0, 1))
    values = {"obs": obs, "action": action, "joint_command": joints, "intervention": False, "force": np.zeros(3, "f4")}
    recorder.add_frame(**(values | changes))


def test_lerobot_reads_back_every_frame(tmp_path: Path, mode: str) -> None:
    lengths = (6, 4, 5)
    dataset = opened(make(tmp_path / "d", lengths, mode))
    assert (len(dataset), dataset.num_episodes) == (15, 3)
    row = 0
    for episode, length in enumerate(lengths):
        for k, (obs, action, joints) in enumerate(frames(episode, length)):
            item = dataset[row]
            assert item["task"] == obs.task
            np.testing.assert_array_equal(item["observation.state"], obs.state)
            np.testing.assert_array_equal(item["action"], action)
            np.testing.assert_array_equal(item["command.joints"], joints)
            np.testing.assert_array_equal(item["force"], np.full(3, k))
            assert item["intervention"] == (episode == 1)
            assert item["capture_time"] == pytest.approx(k * 0.1003)
            assert item["timestamp"] == pytest.approx(k / 10)
            last = k == length - 1
            assert (item["next.done"], item["next.success"]) == (last, last and episode != 2)
            for i, camera in enumerate(("front", "wrist")):
                image = (item[f"observation.images.{camera}"].numpy() * 255).round().transpose(1, 2, 0)
                assert np.abs(image - picture(episode, k, i)).max() <= (0 if mode == "image" else 12)
            row += 1


def test_append_continues_the_dataset(tmp_path: Path, mode: str) -> None:
    root = make(tmp_path / "d", (3,), mode)
    make(root, (4, 2), mode, first=1)
    dataset = open_dataset(root)
    assert dataset.episode_to.tolist() == [3, 7, 9]
    assert len(opened(root)) == 9
    with_all_at_once = open_dataset(make(tmp_path / "e", (3, 4, 2), mode))
    for name, column in dataset.columns.items():
        np.testing.assert_array_equal(column, with_all_at_once.columns[name])


def test_who_follows_a_recording_reads_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, read = make(tmp_path / "d", (3, 2)), []
    whole = dataset.read_parquet
    known = open_dataset(root)
    make(root, (4,), first=2)
    expected = open_dataset(root)
    monkeypatch.setattr(dataset, "read_parquet", lambda path, *a: read.append(path) or whole(path, *a))
    found = open_dataset(root, known)
    assert [path for path in read if "data" in path.relative_to(root).parts] == [found.data_file(2)]
    assert found.episodes == expected.episodes and found.columns.keys() == expected.columns.keys()
    for name, column in expected.columns.items():
        np.testing.assert_array_equal(found.columns[name], column)
    other = make(tmp_path / "e", (3, 2, 4), first=5)
    np.testing.assert_array_equal(open_dataset(other, known).columns["action"], open_dataset(other).columns["action"])


def test_many_episodes_roll_over_to_new_metadata_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vla_stack.data.store.ROWS_PER_FILE", 2)
    root = make(tmp_path / "d", (1, 2, 3, 1, 2), "image")
    assert len(list((root / "meta/episodes").glob("*/*.parquet"))) == 3
    assert open_dataset(root).episode_to.tolist() == [1, 3, 6, 7, 9]
    assert opened(root).num_episodes == 5


def test_lerobot_can_append_and_so_can_we_after_it(tmp_path: Path) -> None:
    root = make(tmp_path / "d", (3, 2), "image")
    theirs = LeRobotDataset.resume("local/toy", root=root)
    for obs, action, joints in frames(7, 4):
        theirs.add_frame(
            {
                **{f"observation.images.{c}": image for c, image in obs.images.items()},
                "observation.state": obs.state,
                "action": action,
                "command.joints": joints,
                "capture_time": np.array([0.0]),
                "next.reward": np.array([0.0], np.float32),
                "next.done": np.array([False]),
                "next.success": np.array([False]),
                "intervention": np.array([False]),
                "force": np.zeros(3, np.float32),
                "task": "a new one",
            }
        )
    theirs.save_episode()
    theirs.finalize()
    make(root, (2,), "image", first=1)
    dataset = open_dataset(root)
    assert dataset.episode_to.tolist() == [3, 5, 9, 11]
    assert dataset.tasks == ("task 0", "task 1", "a new one")
    assert len(opened(root)) == 11


def test_robot_spec_round_trip(root: Path) -> None:
    assert read_robot_spec(root) == SPEC


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"action": np.zeros(3, np.float32)}, r"action is float32\[3\], expected float32\[2\]"),
        ({"action": np.zeros(2)}, r"action is float64\[2\]"),
        ({"action": np.array([0, np.nan], np.float32)}, "action is not finite at index 1"),
        ({"joint_command": None}, "joint_command is missing"),
        ({"force": np.zeros(2, np.float32)}, r"force is float32\[2\], expected float32\[3\]"),
        ({"force": np.array([0, np.inf, 0], np.float32)}, "force is not finite"),
        ({"intervention": 0.5}, "intervention is float64"),
        ({"mood": 1.0}, "column 'mood' is not declared"),
    ],
)
def test_a_frame_that_does_not_fit_is_refused_and_not_recorded(tmp_path: Path, change: dict, message: str) -> None:
    if "intervention" in change:
        change = {"intervention": np.array([0.5])}
    with EpisodeRecorder(tmp_path / "d", SPEC, "video", JOINTS, EXTRA) as recorder:
        add(recorder)
        with pytest.raises(SchemaError, match=message):
            add(recorder, **change)
        recorder.save_episode(success=True)
        assert recorder.num_frames == 1


def test_observations_are_checked(tmp_path: Path) -> None:
    obs, *_ = next(frames(0, 1))
    with EpisodeRecorder(tmp_path / "d", SPEC, "video", JOINTS, EXTRA) as recorder:
        for bad, message in (
            (replace(obs, images={"front": obs.images["front"]}), "camera 'wrist' is missing"),
            (replace(obs, images=obs.images | {"front": obs.images["front"][:8]}), "camera 'front' is uint8"),
            (replace(obs, state=np.array([0, np.nan, 0], np.float32)), "state is not finite in gripper.pos"),
        ):
            with pytest.raises(SchemaError, match=message):
                add(recorder, obs=bad)
        add(recorder)
        with pytest.raises(SchemaError, match="captured before"):
            add(recorder, obs=replace(obs, t_capture_ns=5))


def test_another_robot_or_other_columns_are_refused(root: Path) -> None:
    before = (root / "meta/info.json").read_bytes()
    for spec, mode, joints, extra, message in (
        (replace(SPEC, rate_hz=20.0), "video", JOINTS, EXTRA, "rate_hz differ"),
        (SPEC, "image", JOINTS, EXTRA, "'observation.images.front' is video"),
        (SPEC, "video", (), EXTRA, "'command.joints' is only in the dataset"),
        (SPEC, "video", JOINTS, EXTRA | {"more": Column("int64")}, "'more' is only in this recording"),
    ):
        with pytest.raises(UserError, match=message):
            EpisodeRecorder(root, spec, mode, joints, extra)
    assert (root / "meta/info.json").read_bytes() == before
    make(root, (2,))  # and the right ones still are not


@pytest.mark.parametrize("name", ["action.sent", "observation.depth", "task", "index", "a/b"])
def test_names_that_lerobot_would_mistake_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=name):
        EpisodeRecorder(tmp_path / "d", SPEC, extra={name: Column("float32")})


def test_two_recorders_on_one_folder_are_refused(root: Path) -> None:
    with (
        EpisodeRecorder(root, SPEC, "video", JOINTS, EXTRA) as recorder,
        pytest.raises(UserError, match=r"is being written by process \d+ on "),
    ):
        record(recorder, 3, 2)
        EpisodeRecorder(root, SPEC, "video", JOINTS, EXTRA)


def test_a_folder_with_something_else_is_refused_untouched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match="thesis.tex"):
        EpisodeRecorder(tmp_path, SPEC)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_discarded_and_unsaved_episodes_leave_nothing(tmp_path: Path, mode: str) -> None:
    root = make(tmp_path / "d", (2,), mode)
    before = {p: p.read_bytes() for p in root.rglob("*") if p.is_file()}
    with EpisodeRecorder(root, SPEC, mode, JOINTS, EXTRA) as recorder:
        add(recorder)
        recorder.discard_episode()
        with pytest.raises(UserError, match="no frame"):
            recorder.save_episode(success=True)
        add(recorder)
    assert {p: p.read_bytes() for p in root.rglob("*") if p.is_file()} == before


@contextmanager
def full_disk(limit: int):
    """Files larger than ``limit`` bytes cannot be written, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("limit", [100, 1500, 4000, 9000])
def test_a_full_disk_costs_the_running_episode_alone(tmp_path: Path, mode: str, limit: int) -> None:
    root = make(tmp_path / "d", (3, 2), mode)
    with EpisodeRecorder(root, SPEC, mode, JOINTS, EXTRA) as recorder:
        with full_disk(limit), pytest.raises(UserError, match="2 episodes are safe"):
            record(recorder, 5, 20)
        assert open_dataset(root).num_episodes == 2
        recorder.discard_episode()
        record(recorder, 2, 4)  # the disk has space again
    assert open_dataset(root).episode_to.tolist() == [3, 5, 9]
    assert len(opened(root)) == 9


@pytest.mark.parametrize("end", ["save", "discard"])
def test_what_comes_after_an_encoding_error_is_no_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """The tail of a demonstration, saved as a whole one, would teach that a task begins in its middle."""
    root = make(tmp_path / "d", (3,))
    with EpisodeRecorder(root, SPEC, "video", JOINTS, EXTRA) as recorder:
        for k in range(5):
            if k == 3:
                with monkeypatch.context() as m:
                    m.setattr(EpisodeRecorder, "_add_images", lambda self, obs: os.stat("/no disk"))
                    with pytest.raises(UserError, match="the running episode is lost, 1 episodes are safe"):
                        add(recorder)
            elif k == 4:
                with pytest.raises(UserError, match="the running episode is lost"):
                    add(recorder)  # the disk has space again
            else:
                add(recorder)
        if end == "save":
            with pytest.raises(UserError, match="the running episode is lost"):
                recorder.save_episode(success=True)
        else:
            recorder.discard_episode()
        record(recorder, 2, 4)
    assert open_dataset(root).episode_to.tolist() == [3, 7]

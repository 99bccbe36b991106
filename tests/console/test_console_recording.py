"""What becomes of episodes that are kept, thrown away, and taken back."""

import hashlib
import threading
from pathlib import Path

import numpy as np
import pytest
from toy_console import ROBOT

from vla_stack.console import recording as module
from vla_stack.console.heat import heat
from vla_stack.console.recording import Recording
from vla_stack.console.robot import familiar_states
from vla_stack.data.dataset import open_dataset
from vla_stack.data.sidecar import EpisodeFacts, read_facts
from vla_stack.intervention import Intervention
from vla_stack.schema import Observation

WAIT_S = 60.0  # upper bound of waits; nothing depends on how long they take
FACTS = EpisodeFacts(outcome="end_demo", mode="teleop", seed=3)


class Watched:
    """A recording whose status can be waited for."""

    def __init__(self, root: Path, undo_s: float = 1000.0, iteration: int = 0) -> None:
        self.news = threading.Condition()
        self.status: dict = {}
        self.recording = Recording(root, ROBOT, (), self.take, undo_s, iteration)

    def take(self, status: dict) -> None:
        with self.news:
            self.status = status
            self.news.notify_all()

    def until(self, condition) -> None:
        with self.news:
            assert self.news.wait_for(lambda: condition(self.status), WAIT_S)

    def episode(self, length: int = 5, kept: bool = True, success: bool = True) -> None:
        machine = Intervention("teleop")
        machine.apply("start", 0)
        machine.apply("engage", 0)
        for k in range(length):
            state = np.array([0.3 + 0.01 * k, 0.1, 1.0], np.float32)
            image = np.full((16, 24, 3), 10 * k % 256, np.uint8)
            obs = Observation(state, {"front": image}, "reach", k, 1_000_000_000 + 100_000_000 * k)
            labels = {**machine.labels(k), "cam_age_ms": [1.0], "cmd_age_ms": 2.0, "gap": 0}
            self.recording.frame(obs, state, None, labels)
        self.recording.end(success, kept, FACTS)


def tree_hash(root: Path) -> str:
    """Of names and contents of everything that a loader reads."""
    files = sorted(p for p in root.rglob("*") if p.is_file() and not p.relative_to(root).as_posix().startswith("."))
    assert files
    return hashlib.sha256(b"".join(p.name.encode() + p.read_bytes() for p in files)).hexdigest()


@pytest.fixture
def same_uids(monkeypatch):
    monkeypatch.setattr(module.secrets, "randbits", lambda _: 7)


def test_discard_then_undo_is_keep(tmp_path, same_uids):
    hashes = []
    for name, decisions in (("keep", ["keep"]), ("undo", ["discard", "undo", "keep"])):
        watched = Watched(tmp_path / name)
        watched.episode()
        for decision in decisions:
            assert watched.recording.decide(decision) is None
        watched.until(lambda s: s["pending"] is None)
        watched.recording.close()
        hashes.append(tree_hash(tmp_path / name))
    assert hashes[0] == hashes[1]


def test_what_is_thrown_away_is_not_in_the_dataset(tmp_path):
    watched = Watched(tmp_path / "d")
    watched.episode()
    watched.recording.decide("keep")
    watched.until(lambda s: s["pending"] is None)
    watched.episode(length=7)
    assert watched.recording.decide("discard") is None
    assert watched.status["episodes"] == 1 and watched.status["human_frames"] == 5
    assert watched.recording.decide("undo") is None
    assert watched.status["episodes"] == 2 and watched.status["human_frames"] == 12
    watched.recording.decide("discard")
    watched.recording.close()
    assert open_dataset(tmp_path / "d").num_frames == 5
    rows = read_facts(tmp_path / "d").values()
    assert sorted(r["outcome"] for r in rows) == ["discarded", "end_demo"]


def test_a_further_session_of_an_iteration_counts_on(tmp_path):
    for before in (0, 5):
        watched = Watched(tmp_path / "d")
        assert watched.status["human_frames"] == before
        watched.episode()
        watched.episode(length=3)
        watched.recording.decide("discard")
        watched.recording.close()
    assert watched.status["human_frames"] == 10 and watched.status["episodes"] == watched.status["successes"] == 2
    other = Watched(tmp_path / "d", iteration=1)
    assert other.status["human_frames"] == 0 and other.status["episodes"] == 2
    other.recording.close()


def test_the_window_closes_by_itself(tmp_path):
    watched = Watched(tmp_path / "d", undo_s=0.0)
    watched.episode()
    watched.episode(kept=False, success=False)
    watched.until(lambda s: s["pending"] is None and s["episodes"] == 1)
    assert "undo window is over" in watched.recording.decide("undo")
    watched.recording.close()
    assert open_dataset(tmp_path / "d").num_episodes == 1


def test_undo_without_a_discard_is_refused_and_changes_nothing(tmp_path):
    watched = Watched(tmp_path / "d")
    assert "no episode" in watched.recording.decide("keep")
    watched.episode()
    assert "nothing to undo" in watched.recording.decide("undo")
    watched.recording.close()
    assert open_dataset(tmp_path / "d").num_episodes == 1


def test_an_episode_without_frames_is_none(tmp_path):
    watched = Watched(tmp_path / "d")
    watched.recording.end(True, True, FACTS)
    assert watched.status["pending"] is None
    watched.recording.close()


def test_what_was_pending_when_a_console_died_is_kept(tmp_path):
    from vla_stack.data.labels import frame_labels, label_columns
    from vla_stack.data.recorder import EpisodeRecorder

    with EpisodeRecorder(tmp_path / "d", ROBOT, extra=label_columns(ROBOT)) as recorder:
        machine = Intervention("teleop")
        machine.apply("start", 0)
        machine.apply("engage", 0)
        state = np.array([0.3, 0.1, 1.0], np.float32)
        obs = Observation(state, {"front": np.zeros((16, 24, 3), np.uint8)}, "reach", 0, 1)
        recorder.add_frame(obs, state, **frame_labels(ROBOT, machine.labels(0), 1))
        recorder.save_episode(True, pending=True, facts=FACTS)
    watched = Watched(tmp_path / "d")
    assert watched.status["episodes"] == watched.status["successes"] == 1
    watched.recording.close()


def test_a_session_in_which_nothing_was_kept_goes_on(tmp_path):
    for _ in range(2):
        assert familiar_states(tmp_path / "d") is None
        Watched(tmp_path / "d").recording.close()
        assert heat(tmp_path / "d", ROBOT)["frames"] == 0


def test_the_heat_map_counts_where_the_tool_was(tmp_path):
    assert heat(tmp_path / "none", ROBOT)["frames"] == 0
    watched = Watched(tmp_path / "d")
    watched.episode()
    watched.recording.close()
    found = heat(tmp_path / "d", ROBOT)
    counts = np.array(found["counts"])
    assert found["frames"] == counts.sum() == 5 and found["x"] == [0.2, 0.6] and found["y"] == [-0.3, 0.3]
    assert (counts[:, 24] == counts.sum(1)).all()  # y = 0.1 of -0.3 … 0.3 in 36 cells
    assert np.flatnonzero(counts.any(1)).tolist() == [6, 7, 8]  # x = 0.30 … 0.34 of 0.2 … 0.6 in 24 cells


def no_space(*args, **kwargs):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("act", ["discard", "undo"])
def test_a_full_disk_is_said_and_the_decision_is_carried_out_once_there_is_space(tmp_path, monkeypatch, act):
    watched = Watched(tmp_path / "d")
    watched.episode()
    watched.until(lambda s: s["pending"] is not None)
    recorder = watched.recording._recorder
    if act == "undo":
        discarded = threading.Event()
        discard = recorder.discard
        monkeypatch.setattr(recorder, "discard", lambda *args: (discard(*args), discarded.set()))
        watched.recording.decide("discard")
        assert discarded.wait(WAIT_S)
    with monkeypatch.context() as m:
        m.setattr(recorder, act, no_space)
        assert watched.recording.decide(act) is None
        watched.until(lambda s: "No space left on device" in s["error"])
        if act == "discard":
            watched.recording.decide("discard")  # its window is over now
    assert watched.recording._thread.is_alive()
    if act == "undo":
        watched.recording.decide("keep")
    watched.until(lambda s: s["pending"] is None)
    watched.episode(length=7)
    watched.recording.close()
    assert open_dataset(tmp_path / "d").num_frames == (7 if act == "discard" else 12)


def test_frames_that_wait_for_the_disk_are_limited_by_their_bytes_and_lost_ones_are_said(tmp_path, monkeypatch):
    monkeypatch.setattr("vla_stack.runtime.frames.MAX_BYTES", 100 * 16 * 24 * 3)  # of a hundred pictures
    watched, go = Watched(tmp_path / "d"), threading.Event()
    watched.recording._orders.put((go.wait, WAIT_S))  # a disk that stands still
    watched.episode(length=110)
    lost = watched.status["lost_frames"]
    assert lost in (10, 11) and watched.status["pending"]["frames"] == 110 - lost
    go.set()
    watched.recording.close()
    assert open_dataset(tmp_path / "d").num_frames == 110 - lost


def test_an_episode_whose_writing_failed_is_not_kept(tmp_path, monkeypatch):
    watched = Watched(tmp_path / "d")
    add, frames = watched.recording._recorder._add_images, []

    def images(obs):
        frames.append(obs)
        return no_space() if len(frames) == 4 else add(obs)

    monkeypatch.setattr(watched.recording._recorder, "_add_images", images)
    watched.episode(length=9)
    watched.until(lambda s: s["error"] and s["pending"] is None)
    assert "the running episode is lost" in watched.status["error"] and watched.status["episodes"] == 0
    watched.episode(length=5)
    watched.recording.close()
    assert open_dataset(tmp_path / "d").episode_to.tolist() == [5]


def test_an_error_that_nobody_thought_of_is_shown_too(tmp_path, monkeypatch):
    watched = Watched(tmp_path / "d")
    monkeypatch.setattr(watched.recording._recorder, "save_episode", lambda *args, **kwargs: 1 / 0)
    watched.episode()
    watched.until(lambda s: s["error"] == "ZeroDivisionError: division by zero" and s["pending"] is None)
    monkeypatch.undo()
    watched.episode()
    watched.recording.decide("keep")
    watched.until(lambda s: s["episodes"] == 1 and s["pending"] is None)
    assert watched.status["error"] == ""  # an episode was saved since
    watched.recording.close()
    assert open_dataset(tmp_path / "d").num_episodes == 1

"""What ``vla run --record`` keeps, and that it holds up nobody."""

import dataclasses

import numpy as np
import pytest
from runtime_fakes import robot_spec

from vla_stack.console.run_recording import RunRecording
from vla_stack.data.dataset import open_dataset
from vla_stack.data.sidecar import read_facts
from vla_stack.errors import UserError
from vla_stack.intervention import Control, Segment
from vla_stack.runtime.frames import Frame
from vla_stack.schema import Camera, Observation

SPEC = robot_spec(cameras=(Camera("front", 16, 16),))  # 10 Hz
SECONDS = 0.3  # three frames


def frame(k: int, **labels) -> Frame:
    image = np.full((16, 16, 3), k, np.uint8)
    obs = Observation(np.full(2, k, np.float32), {"front": image}, "task", k, 10**8 * k)
    return Frame(obs, np.full(2, k, np.float32), None, {"gap": 0, "subtask_index": 0, **labels}, k / 10)


def recorded(root) -> list[list[int]]:
    """Steps of each episode."""
    data = open_dataset(root)
    spans = zip(data.episode_from, data.episode_to, strict=True)
    return [[round(float(x)) for x in data.columns["action"][a:b, 0]] for a, b in spans]


def drive(recording, steps, events=()):
    recording.begin(7)
    for k in range(steps):
        for at, act in events:
            if at == k:
                act()
        recording.frame(frame(k, policy_version=5))


def test_every_episode_is_kept_with_the_columns_of_interventions(tmp_path):
    with RunRecording(tmp_path, SPEC, ()) as recording:
        for success in (True, False):
            drive(recording, 4)
            assert recording.end(success) == 1
    data = open_dataset(tmp_path)
    assert recorded(tmp_path) == [[0, 1, 2, 3]] * 2
    assert data.columns["next.success"].tolist() == [False, False, False, True] + [False] * 4
    assert set(data.columns["segment_type"]) == {Segment.AUTONOMOUS}
    assert set(data.columns["control_source"]) == {Control.POLICY} and not data.columns["intervention"].any()
    assert set(data.columns["policy_version"]) == {5}
    facts = [f["outcome"] for f in read_facts(tmp_path).values()]
    assert sorted(facts) == ["end_auto_fail", "end_auto_success"]


@pytest.mark.parametrize(
    ("keeping", "at", "kept"),
    [
        ("sentry", (5,), [[3, 4, 5, 6, 7, 8]]),  # two before, as the frame of the event is the third that fits
        ("sentry", (5, 7), [[3, 4, 5, 6, 7, 8, 9, 10]]),  # an event within a clip makes it longer
        ("sentry", (5, 12), [[3, 4, 5, 6, 7, 8], [10, 11, 12, 13, 14, 15]]),
        ("sentry", (), []),
        ("highlight", (5,), []),  # no event is kept
    ],
)
def test_what_happens_keeps_the_seconds_around_it(tmp_path, keeping, at, kept):
    with RunRecording(tmp_path, SPEC, (), keeping, SECONDS) as recording:
        drive(recording, 20, [(k, lambda k=k: recording.event(f"stop {k}")) for k in at])
        assert recording.end(True) == 0  # all clips ended before
        assert recording.counts["episodes"] == len(kept)
    assert (recorded(tmp_path) if kept else []) == kept
    if kept:
        assert not open_dataset(tmp_path).columns["next.success"].any()
        assert [f["outcome"] for f in read_facts(tmp_path).values()] == [f"stop {k}" for k in (at[0], at[-1])][
            : len(kept)
        ]


def test_a_key_keeps_and_a_clip_at_the_end_has_the_episodes_outcome(tmp_path):
    with RunRecording(tmp_path, SPEC, (), "highlight", SECONDS) as recording:
        drive(recording, 10, [(9, recording.keep)])
        assert recording.end(True) == 1
        drive(recording, 2)
        recording.keep()  # after the last frame: the robot had stopped
        assert recording.end(False) == 1
        drive(recording, 9)
        assert recording.end(True) == 0  # and nothing is left over of it
    assert recorded(tmp_path) == [[7, 8, 9], [0, 1]]
    assert np.flatnonzero(open_dataset(tmp_path).columns["next.success"]).tolist() == [2]


def test_limits_and_takeovers_are_events_and_speed_is_none(tmp_path):
    with RunRecording(tmp_path, SPEC, (), "sentry", SECONDS) as recording:
        for k, labels in enumerate(({"limits": ["velocity"]}, {"limits": ["position"]}, {"intervention": True})):
            recording.begin(k)
            recording.frame(frame(0, **labels))
            recording.end(False)
    assert [f["outcome"] for f in read_facts(tmp_path).values()] == ["limit of position", "takeover"]


def test_a_clip_that_an_interrupt_cuts_is_saved_and_an_episode_is_not(tmp_path):
    for keeping, episodes in (("sentry", 1), ("episodic", 0)):
        root = tmp_path / keeping
        with RunRecording(root, SPEC, (), keeping, SECONDS) as recording:
            drive(recording, 3, [(2, lambda: recording.event("stop"))])
        assert recording.counts["episodes"] == episodes


def test_pictures_that_do_not_fit_into_memory_are_refused_before_anything_moves(tmp_path):
    large = dataclasses.replace(SPEC, cameras=(Camera("front", 1080, 1920),), rate_hz=60.0)
    with pytest.raises(UserError, match=r"give --last 2"):
        RunRecording(tmp_path, large, (), "sentry", 10.0)

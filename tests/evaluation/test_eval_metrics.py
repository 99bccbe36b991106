"""Figures with intervals against closed forms and brute force."""

from dataclasses import replace

import numpy as np
import pytest

from vla_stack.errors import UserError
from vla_stack.evaluation.evaluate import _cut, _units
from vla_stack.evaluation.metrics import boundary_discontinuity, paired_results
from vla_stack.rollout.records import EpisodeRecord, EvalResult, load_records, save_records
from vla_stack.schema import Camera, Dim, RobotSpec
from vla_stack.statistics import paired_interval

ROBOT = RobotSpec(
    name="test/two",
    state=(Dim("x.pos", "m"), Dim("gripper.pos", "ratio", 0, 1, kind="gripper")),
    action=(Dim("x.pos", "m", max_rate=1.0), Dim("gripper.pos", "ratio", 0, 1, kind="gripper")),
    cameras=(Camera("front", 8, 8),),
    rate_hz=10.0,
)


def record(seed=0, success=True, steps=10, x=None, chunks=None, **extra):
    actions = np.zeros((0, 2), np.float32)
    if x is not None:
        actions = np.stack([np.asarray(x, np.float32), np.arange(len(x)) % 2], axis=1).astype(np.float32)
    chunks = np.asarray([] if chunks is None else chunks, np.int32)
    return EpisodeRecord(seed, "pick", "pick", success, steps, actions=actions, chunks=chunks, **extra)


def result(*episodes):
    return EvalResult("test/Env-v0", "naive", 10.0, tuple(episodes), ("reached", "done"), {"seed": 0})


def test_pairing_beats_independent_intervals_on_correlated_outcomes():
    hard = np.random.default_rng(0).random(200) < 0.5
    easy_fix = hard.copy()
    easy_fix[np.flatnonzero(~hard)[:10]] = True
    d = paired_interval(hard, easy_fix)
    assert d.is_clear and d.high - d.low < 0.08


def test_results_are_paired_by_seed_not_by_position():
    left = result(record(1, True), record(2, False), record(3, True))
    right = result(record(3, False), record(2, True), record(9, True))
    a, b = paired_results(left, right)
    assert a.tolist() == [False, True] and b.tolist() == [True, False]


def test_a_straight_line_has_no_seam_and_an_offset_has_one():
    ramp = np.arange(12) ** 2 * 0.01
    chunks = [1] * 6 + [2] * 6
    assert boundary_discontinuity(result(record(x=ramp, chunks=chunks)), ROBOT) == pytest.approx(1.0, rel=1e-3)
    jump = ramp + np.where(np.arange(12) >= 6, 0.5, 0.0)
    assert boundary_discontinuity(result(record(x=jump, chunks=chunks)), ROBOT) > 10


def test_held_ticks_and_grippers_are_not_seams():
    chunks = [1, 1, 1, -1, -1, -1, 2, 2, 2]
    assert np.isnan(boundary_discontinuity(result(record(x=[0, 1, 4, 9, 9, 9, 20, 30, 41], chunks=chunks)), ROBOT))


def test_summary_of_a_result():
    r = result(record(0, True, 10), record(1, True, 30), record(2, False, 60, idle_ticks=25))
    assert r.successes == 2 and r.success_rate == pytest.approx(2 / 3)
    assert r.seconds_to_success == pytest.approx(2.0)
    assert r.idle_fraction == pytest.approx(0.25)
    low, high = r.interval
    assert low < 2 / 3 < high


def test_records_survive_the_disk(tmp_path):
    r = result(record(5, True, 12, stage=1, video="a.mp4"), record(6, False, 60, instructed_success=True))
    save_records([r], tmp_path / "eval.json", command="vla eval")
    (read,) = load_records(tmp_path / "eval.json")
    assert read.episodes[0].video == str(tmp_path / "a.mp4")
    assert read.episodes[1] == r.episodes[1]
    assert (read.name, read.label, read.rate_hz, read.stages) == (r.name, r.label, r.rate_hz, r.stages)


@pytest.mark.parametrize("text", ["{", "{}", '{"results": [{"name": "x", "rate_hz": 10, "episodes": [{}]}]}'])
def test_malformed_records_are_named(tmp_path, text):
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(UserError, match="run.json: not a record of episodes"):
        load_records(path)
    with pytest.raises(UserError, match="cannot be read"):
        load_records(tmp_path / "absent.json")


def test_episodes_that_a_guard_ended_are_told_apart_from_failures():
    believed = [EpisodeRecord(i, "go", "go", i < 2, 5, attached={"guards": ()}) for i in range(3)]
    cut = [EpisodeRecord(9, "go", "go", False, 5, attached={"guards": ("latent",)})]
    assert _cut(believed) == ()
    (note,) = _cut([*believed, *cut])
    assert note.startswith("Guards (latent) ended 1 of 4 imagined episodes") and note.endswith(
        "of the other 3, 2 succeeded."
    )


def test_a_policy_without_units_is_said_to_have_been_taken_at_its_word():
    assert _units(ROBOT, ROBOT) == ()
    (note,) = _units(replace(ROBOT, name="lerobot/so101"), ROBOT)
    assert "says nothing of its units" in note and "environment's: m, ratio" in note

"""Errors in recorded states: exact where the policy is off by a known amount, and on the dataset that it fits alone."""

import json
import xml.etree.ElementTree as ET
from dataclasses import replace

import eval_fakes
import numpy as np
import pytest

from vla_stack.cli import main
from vla_stack.data.chunks import chunk_columns
from vla_stack.data.dataset import CHUNK, CHUNK_GIVEN, CHUNK_STEPS, open_dataset
from vla_stack.data.recorder import EpisodeRecorder
from vla_stack.errors import UserError
from vla_stack.evaluation.open_loop import LABELS, RECORDED, noise_seed, open_loop, spread
from vla_stack.schema import Camera, Observation
from vla_stack.statistics import mean_interval
from vla_stack.verbs import eval as verb

HORIZON = 8
LENGTHS = (10, 6, 20)


def recorded(root, robot=eval_fakes.ROBOT, lengths=LENGTHS, labels=False, given=0, apart=1):
    """Episodes whose x goes up by 1 a step from 100 times the episode's number; the command is the next state.

    With labels, so many of their first actions are given. A frame is captured so many control steps after another.
    """
    extra = chunk_columns(HORIZON, 2, late=given > 0) if labels else {}
    with EpisodeRecorder(root, robot, image_mode="image", extra=extra) as recorder:
        for e, length in enumerate(lengths):
            for k in range(length):
                state = np.array([100 * e + k, 0.5], np.float32)
                images = {c.name: np.zeros((c.height, c.width, 3), np.uint8) for c in robot.cameras}
                chunk = np.stack([state + [2 * (i + 1), 0] for i in range(HORIZON)]).astype(np.float32)
                more = {CHUNK: chunk.ravel(), CHUNK_STEPS: 3 if k else 0} if labels else {}
                more |= {CHUNK_GIVEN: given if k else 0} if given else {}
                task = ("go left", "go right")[e % 2]
                recorder.add_frame(
                    Observation(state, images, task, k, k * apart * 10**8), (state + [1, 0]).astype(np.float32), **more
                )
            recorder.save_episode(success=True)
    return open_dataset(root)


class Off(eval_fakes.Policy):
    """Goes on as was recorded, off by a number that grows with the step; noise from its seed on the gripper."""

    def __init__(self, off=0.0, noise=0.0):
        super().__init__()
        self.off, self.noise = off, noise

    def chunk(self, observation, seed):
        steps = np.arange(1, HORIZON + 1)
        x = observation.state[0] + steps + self.off * steps
        return np.stack([x, 0.5 + self.noise * np.random.default_rng(seed).normal(size=HORIZON)], 1)


def test_who_does_as_was_recorded_has_no_error_and_who_stands_still_has_error_one(tmp_path):
    dataset = recorded(tmp_path / "data")
    exact = open_loop(Off(), dataset, every=1)[RECORDED]
    assert not np.nan_to_num(exact.error).any() and len(exact.episode) == sum(LENGTHS)
    still = open_loop(Off(-1.0), dataset, every=1)[RECORDED]
    assert still.mean(still.relative).value == pytest.approx(1.0, abs=0.25)  # of episodes, not of chunks
    assert np.nanmean(still.relative) == pytest.approx(1.0, abs=1e-6)


def test_errors_are_told_apart_by_step_dimension_task_and_part(tmp_path):
    dataset = recorded(tmp_path / "data")
    found = open_loop(Off(0.25), dataset, every=1)[RECORDED]
    figures = found.to_json()
    x, gripper = figures["dimensions"]
    assert (x["name"], x["unit"], gripper["unit"]) == ("x.pos", "m", "ratio")
    assert [row["mean"] for row in x["by_step"]] == [0.25 * step for step in range(1, HORIZON + 1)]
    assert [row["episodes"] for row in x["by_step"]] == [3] * 6 + [2] * 2  # one episode has six frames
    assert gripper["all"]["mean"] == 0 and gripper["standing_still"] == 0
    means = []
    for length in LENGTHS:  # a frame's chunk is as long as its episode goes on
        steps = np.concatenate([np.arange(1, min(HORIZON, length - k) + 1) for k in range(length)])
        means.append(0.25 * steps.mean())
    whole = mean_interval(means, "episodes")
    assert x["all"] == pytest.approx({"mean": whole.value, "low": whole.low, "high": whole.high, "episodes": 3})
    assert [e["dimensions"][0] for e in figures["episodes"]] == pytest.approx(means)
    right = figures["by"]["task"]["go right"]
    assert right["dimensions"][0]["mean"] == pytest.approx(means[1]) and right["relative"]["low"] is None
    parts = {name: part["dimensions"][0]["mean"] for name, part in figures["by"]["part"].items()}
    assert list(parts) == [f"quarter {i}" for i in (1, 2, 3, 4)] and parts["quarter 1"] > parts["quarter 4"]
    json.loads(json.dumps(figures, allow_nan=False))


def test_chunk_labels_are_a_target_of_their_own(tmp_path):
    """Labels of three steps, where there are any, go twice as fast as what was recorded."""
    dataset = recorded(tmp_path / "data", labels=True)
    found = open_loop(Off(1.0), dataset, every=1)
    assert list(found) == [RECORDED, LABELS]
    labelled = dataset.columns[CHUNK_STEPS] > 0
    error = found[LABELS].error[..., 0]
    assert not error[labelled, :3].any() and np.isnan(error[labelled, 3:]).all()
    assert np.array_equal(error[~labelled], found[RECORDED].error[~labelled, :, 0], equal_nan=True)


def test_what_was_executed_meanwhile_is_no_label(tmp_path):
    dataset = recorded(tmp_path / "data", labels=True, given=1)
    error = open_loop(Off(1.0), dataset, every=1)[LABELS].error[dataset.columns[CHUNK_STEPS] > 0, :, 0]
    assert np.isnan(error[:, 0]).all() and not error[:, 1:3].any() and np.isnan(error[:, 3:]).all()


def test_frames_that_are_no_control_step_apart_are_no_series(tmp_path):
    """As those of random moments, and those in which a policy asked: only their labels say what comes next."""
    dataset = recorded(tmp_path / "labelled", labels=True, apart=4)
    assert list(open_loop(Off(), dataset, every=1)) == [LABELS]
    error = open_loop(Off(), recorded(tmp_path / "bare", apart=4), every=1)[RECORDED].error
    assert not error[:, 0].any() and np.isnan(error[:, 1:]).all()


def test_noise_is_of_the_place_and_not_of_the_batch(tmp_path, monkeypatch):
    dataset = recorded(tmp_path / "data")
    whole = open_loop(Off(noise=1.0), dataset, every=2, seed=3)[RECORDED].error
    monkeypatch.setattr("vla_stack.evaluation.open_loop.BATCH", 5)
    policy = Off(noise=1.0)
    assert np.array_equal(whole, open_loop(policy, dataset, every=2, seed=3)[RECORDED].error, equal_nan=True)
    assert policy.batches == [5, 5, 5, 3]
    assert not np.array_equal(whole, open_loop(Off(noise=1.0), dataset, every=2, seed=4)[RECORDED].error)
    last = open_loop(Off(noise=1.0), dataset, 1, every=2, seed=3)[RECORDED]
    assert set(last.episode) == {0} and np.array_equal(last.error, whole[:5], equal_nan=True)
    some = open_loop(Off(noise=1.0), dataset, every=2, seed=3, among=[0, 2])[RECORDED]
    assert set(some.episode) == {0, 2} and np.array_equal(some.error[:5], whole[:5], equal_nan=True)
    assert len({noise_seed(dataset, row, 0) for row in range(36)}) == 36


def test_episodes_lie_evenly():
    assert spread(10, 3) == [0, 4, 9] and spread(3, 10) == [0, 1, 2] and spread(5, 1) == [0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cameras": ()}, "the policy needs camera 'front'"),
        ({"cameras": (Camera("front", 8, 8),)}, "camera 'front' of .* is 8x8, the policy was trained at 16x16"),
        ({"rate_hz": 5.0}, "runs at 5 Hz, the policy was trained at 10 Hz"),
        ({"action": eval_fakes.ROBOT.action[::-1]}, r"has action \[gripper.pos x.pos\]"),
    ],
)
def test_a_dataset_of_another_robot_is_refused(tmp_path, change, message):
    dataset = recorded(tmp_path / "data", replace(eval_fakes.ROBOT, **change), (3,))
    with pytest.raises(UserError, match=message):
        open_loop(Off(), dataset)


def test_the_verb_leaves_a_table_figures_and_a_picture(tmp_path, capsys, monkeypatch):
    recorded(tmp_path / "data")
    monkeypatch.setattr(verb, "_load", lambda name, *_: (tmp_path / name, Off(0.25)))
    out = tmp_path / "out"
    assert main(["eval", "--open-loop", "--data", str(tmp_path / "data"), "--execute", "2", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert (
        "x.pos, m" in shown and "go right" in shown and "quarter 4" in shown and "largest, relative: episode" in shown
    )
    written = json.loads((out / "open_loop.json").read_text())
    found = open_loop(Off(0.25), open_dataset(tmp_path / "data"), every=2)[RECORDED].to_json()
    assert written["targets"] == {RECORDED: found} and written["settings"]["execute"] == 2
    assert ET.fromstring((out / "open_loop.svg").read_text()).tag.endswith("svg")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--open-loop"], "--open-loop and --data need each other"),
        (["--data", "x"], "--open-loop and --data need each other"),
        (["--open-loop", "--data", "x", "--env", "sim/pick-v0"], "--open-loop rolls nothing out, --env is of rollouts"),
        (["--open-loop", "--data", "x", "--monitor", "m.json"], "--open-loop rolls nothing out, --monitor is of"),
        (["--open-loop", "--data", "x", "--max-steps", "9"], "--open-loop rolls nothing out, --max-steps is of"),
        (["--open-loop", "--data", "x", "--execute", "1", "2"], "decides at one frequency"),
    ],
)
def test_what_does_not_go_together_is_said(capsys, arguments, message):
    assert main(["eval", *arguments]) == 1
    assert message in capsys.readouterr().err

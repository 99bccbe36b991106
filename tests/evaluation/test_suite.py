"""A suite: one change a split, in pairs with the same starts, and nothing run twice."""

import json
from contextlib import contextmanager

import eval_fakes
import numpy as np
import pytest

from sim.arm import ARM7
from vla_stack.cli import main
from vla_stack.errors import UserError
from vla_stack.evaluation.pictures import CHANGES, PATCH, SHIFT, Changed
from vla_stack.evaluation.suite import SEEN, SPLITS, WORLD, Row, Terms, run_suite, splits_of, table
from vla_stack.rollout.latency import Latency
from vla_stack.schema import Chunks, Observation, PolicySpec
from vla_stack.statistics import paired_interval
from vla_stack.verbs import eval as verb

LINE = "eval_fakes:Line-v0"


class Seeing(eval_fakes.Obedient):
    """Goes where it is told while the picture's brightest pixel is as in training, else nowhere."""

    def infer(self, observations, seeds, continuations=()):
        return super().infer(observations, seeds)

    def chunk(self, observation, seed):
        chunk = super().chunk(observation, seed)
        if observation.images["front"].max() < 255:
            chunk[:, 0] = observation.state[0]
        return chunk


def titles():
    """Titles of the splits that are run, and what makes progress of them."""
    seen = []

    @contextmanager
    def progress(title):
        seen.append(title)
        yield lambda record: None

    return seen, progress


def run(folder, names, terms=Terms(6, 0), policy=None):
    seen, progress = titles()
    rows = run_suite(policy or Seeing(), {LINE: splits_of(LINE, names, own=True)}, terms, folder, progress)
    return rows, seen


def test_a_split_is_compared_with_the_same_starts_without_its_change(tmp_path):
    rows, seen = run(tmp_path, ["darker", "warmer"])
    assert seen == [f"{LINE} {name}" for name in (SEEN, "darker", "warmer")]  # the matched arm once
    dark, warm = rows
    assert dark.matched == warm.matched == (True,) * 6
    assert (dark.success, warm.success) == ((False,) * 6, (True,) * 6)
    assert dark.difference == paired_interval([1] * 6, [0] * 6) and dark.difference.value == -1
    shown = table(rows).splitlines()
    assert "-100 (-100 to " in shown[2] and shown[2].endswith("points *") and shown[3].endswith(" points")


def test_what_is_done_is_not_run_again_unless_something_differs(tmp_path):
    before, _ = run(tmp_path, ["darker"])
    assert run(tmp_path, ["darker"]) == (before, [])
    (tmp_path / f"{LINE.replace(':', '_')}_darker.json").unlink()  # a command that was stopped before
    assert run(tmp_path, ["darker"]) == (before, [f"{LINE} darker"])
    for terms in (Terms(6, 1), Terms(5, 0), Terms(6, 0, latency=Latency(0.1)), Terms(6, 0, continued="exp 5.0")):
        _, seen = run(tmp_path, ["darker"], terms)
        assert len(seen) == 2
    other = Seeing()
    other.spec = PolicySpec(other.spec.robot, other.spec.horizon, model_version="another")
    assert len(run(tmp_path, ["darker"], Terms(6, 0), other)[1]) == 2


class Noting:
    """Holds the arm, and notes how each episode began."""

    def __init__(self):
        self.spec = PolicySpec(ARM7.spec("ee_abs", (), 32, 10.0), 8)
        self.first = []

    def infer(self, observations, seeds, continuations=()):
        self.first += [(o.task, *o.state.tolist()) for o in observations if o.step == 0]
        return Chunks(np.stack([o.state[:5] for o in observations])[:, None].repeat(8, axis=1))


def test_every_change_of_the_world_has_the_same_starts(tmp_path):
    begun = {}
    for name in (SEEN, *WORLD):
        policy, (_, progress) = Noting(), titles()
        terms = Terms(4, 7, options={"max_episode_steps": 1})
        splits = {"sim/pick-v0": {name: SPLITS[name]}}
        run_suite(policy, splits, terms, tmp_path / name, progress, num_envs=1)
        begun[name] = policy.first[-4:]
    moved = begun.pop("start-pose")
    assert all(first == begun[SEEN] for first in begun.values())
    assert [m[0] for m in moved] == [s[0] for s in begun[SEEN]] and all(
        m[1:] != s[1:] for m, s in zip(moved, begun[SEEN], strict=True)
    )


def test_changes_of_pictures_follow_from_the_seed_and_leave_the_rest():
    policy = Noting()
    shown = []
    policy.infer = lambda observations, seeds, continuations: shown.append(observations)
    picture = np.random.default_rng(0).integers(0, 256, (32, 32, 3)).astype(np.uint8)
    observation = Observation(np.ones(5, np.float32), {"front": picture}, "pick", 3, 9)
    for name, change in CHANGES.items():
        shown.clear()
        for seeds in ([5], [5], [6]):
            Changed(policy, change).infer([observation], seeds)
        a, b, c = (seen[0].images["front"] for seen in shown)
        assert a.shape == picture.shape and a.dtype == np.uint8 and (a != picture).any()
        assert (a == b).all() and ((a != c).any() == (name in ("patch", "sensor-noise")))
        assert (shown[0][0].task, shown[0][0].step, shown[0][0].t_capture_ns) == ("pick", 3, 9)
        assert (shown[0][0].state == 1).all()
    patched = CHANGES["patch"](picture, np.random.default_rng(1))
    assert (patched != picture).any(-1).sum() <= PATCH**2
    assert (CHANGES["shifted"](picture, np.random.default_rng(0))[SHIFT:, SHIFT:] == picture[:-SHIFT, :-SHIFT]).all()


def test_an_environment_has_the_splits_that_it_can_have():
    assert set(splits_of(LINE, [SEEN], own=True)) == {SEEN}
    assert set(splits_of("sim/pick_any-v0", [SEEN], own=True)) > {SEEN, "unseen-names", "unseen-objects"}
    assert splits_of("sim/pick_any-v0", ["unseen-names"], own=False)["unseen-names"].options == {
        "split": "unseen-names"
    }
    with pytest.raises(UserError, match="Line-v0 has no split 'camera' -- it has seen, darker"):
        splits_of(LINE, ["camera"], own=True)
    with pytest.raises(UserError, match="sim/pick-v0 has no split 'fog' -- it has seen, camera"):
        splits_of("sim/pick-v0", ["fog"], own=False)


def test_from_the_command_line_to_one_table_and_its_figures(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(verb, "_load", lambda name, *_: (tmp_path / name, Seeing()))
    arguments = ["eval", "--suite", "pictures", "--env", LINE, "--episodes", "6", "--workers", "0"]
    arguments += ["--splits", "seen", "darker", "warmer", "--latency", "100ms", "--jitter", "gamma", "--execute", "2"]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.count(LINE) == 3 and out.count("points *") == 1
    found = json.loads((tmp_path / "suite.json").read_text())
    rows = {row["split"]: row for row in found["rows"]}
    assert set(rows) == {SEEN, "darker", "warmer"} and found["settings"]["mode"] == "naive"
    settings = found["settings"]
    assert settings["latency"] == {"mean_s": 0.1, "jitter": "gamma"} and settings["executor"]["execute"] == 2
    assert (settings["episodes"], settings["seed"], settings["options"]) == (6, 1000, {})
    assert rows["darker"]["difference"]["value"] == -1 and rows["darker"]["outcomes"]["matched"] == [True] * 6
    assert (rows["darker"]["success"]["value"], rows["darker"]["success"]["high"]) == (
        0,
        pytest.approx(0.4593, abs=1e-4),
    )


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--mode", "all"], "--suite runs one setting, --mode names several"),
        (["--latency", "0,100ms"], "--suite runs one setting, --latency names several"),
        (["--randomisation", "1"], "--suite and --randomisation do not go together"),
        (["--swap-instruction"], "--suite and --swap-instruction do not go together"),
        (["--monitor", "x.json"], "--suite and --monitor do not go together"),
        (["--videos", "9"], "--suite and --videos do not go together"),
    ],
)
def test_a_suite_is_run_in_one_setting(more, says, tmp_path, capsys):
    assert main(["eval", "--suite", "shifts", *more, "--out", str(tmp_path)]) == 1
    assert says in capsys.readouterr().err


def test_splits_want_a_suite(capsys):
    assert main(["eval", "--splits", "camera"]) == 1
    assert "--splits are of a suite -- give --suite shifts" in capsys.readouterr().err


def test_a_row_of_equal_arms_has_no_difference():
    row = Row("e", "s", (True, False), (True, False))
    assert (row.difference.value, row.difference.is_clear) == (0.0, False)

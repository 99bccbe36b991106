"""Learning beside a robot: what was recorded becomes decisions, whoever acted, and a run that died goes on."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_flow_loop import TOY
from test_reinflow_loop import make_start

from vla_stack import cli
from vla_stack.data.dataset import open_dataset
from vla_stack.data.labels import demo_labels, frame_labels, label_columns
from vla_stack.data.recorder import EpisodeRecorder
from vla_stack.errors import UserError
from vla_stack.evaluation import recorded
from vla_stack.intervention import Control, Segment
from vla_stack.methods.on_flow import live
from vla_stack.methods.on_flow.live import LiveLoop
from vla_stack.policies.chunk_policy import load_policy
from vla_stack.rollout.collect import CollectConfig, collect
from vla_stack.schema import Observation
from vla_stack.training.recipe import load

CONFIG = Path(live.__file__).parents[2] / "configs" / "rl_robot.yaml"
STEPS = 3  # actions of a chunk that are executed, of the policy of `make_start`


@pytest.fixture(scope="module")
def given(tmp_path_factory) -> tuple[str, ...]:
    root = tmp_path_factory.mktemp("given")
    collect(CollectConfig(task="place", privileged=True, noise=0.3), root / "data", 2, workers=1)
    keys = [key for key in TOY if not key.startswith(("task=", "eval.", "method.num_envs"))]
    return (*keys, "method.warmup=1", f"policy={make_start(root / 'start')}", f"data.root={root / 'data'}")


@pytest.fixture(autouse=True)
def _as_nice_as_before(monkeypatch):
    monkeypatch.setattr(live.os, "nice", lambda _: 0)


class Robot:
    """Records episodes as a robot's node does."""

    def __init__(self, given: tuple[str, ...], root: Path) -> None:
        policy = next(key.removeprefix("policy=") for key in given if key.startswith("policy="))
        self.spec, self.root = load_policy(Path(policy)).spec.robot, root
        self._recorder = EpisodeRecorder(root, self.spec, extra=label_columns(self.spec))
        self._rng = np.random.default_rng(0)

    def live(self, success: bool, by_hand: range = range(0), n: int = 8, late: int = -1, missing: int = 0) -> None:
        """An episode; frames ``by_hand`` are a person's, and before frame ``late`` so many are ``missing``."""
        period = round(1e9 / self.spec.rate_hz)
        for i in range(n):
            t_ns = (i + missing * (late >= 0 and i >= late)) * period
            state = self._rng.normal(size=len(self.spec.state)).astype(np.float32)
            action = self._rng.uniform(-0.2, 0.2, len(self.spec.action)).astype(np.float32)
            labels = demo_labels(self.spec, t_ns, scripted=False)
            if i not in by_hand:
                acts = {"intervention": False, "segment_type": int(Segment.AUTONOMOUS), "segment_index": 0}
                labels = frame_labels(self.spec, {**acts, "control_source": int(Control.POLICY)}, t_ns)
            self._recorder.add_frame(Observation(state, {}, "place it", i, t_ns), action, **labels)
        self._recorder.save_episode(success)

    def close(self) -> None:
        self._recorder.close()


@pytest.fixture
def robot(given, tmp_path):
    robot = Robot(given, tmp_path / "live")
    yield robot
    robot.close()


def records(run: Path) -> list[dict]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.endswith("_s")} for row in rows]


def test_a_run_that_died_goes_on_with_the_episode_after_its_last_one(given, robot, tmp_path):
    for success, by_hand in ((True, range(0)), (False, range(2, 7)), (True, range(0)), (False, range(0))):
        robot.live(success, by_hand)
    keys = (*given, f"method.live={robot.root}")
    runs = tmp_path / "whole", tmp_path / "stopped"
    for run in runs:
        assert cli.main(["train", str(CONFIG), *keys, f"output_dir={run}"]) == 0
    shutil.rmtree(runs[1] / "checkpoints" / "000002")  # as if it had died before that was written
    assert cli.main(["train", "--resume", str(runs[1])]) == 0
    rows = records(runs[0])
    assert rows == records(runs[1]) and [row["env_steps"] for row in rows] == [0, 16, 32]
    assert [row.get("rollout") for row in rows] == [None, 0.5, 0.5] and "td" in rows[1] and "eval" not in rows[2]
    a, b = (load_file(run / "checkpoints/last/pretrained_model/model.safetensors") for run in runs)
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_a_run_does_not_go_on_with_what_another_robot_did(given, robot, tmp_path, capsys):
    other = Robot(given, tmp_path / "other")
    for _ in range(4):
        robot.live(True)
        other.live(True, n=9)
    other.close()
    keys = (*given, f"method.live={robot.root}", "method.iterations=1")
    assert cli.main(["train", str(CONFIG), *keys, f"output_dir={tmp_path / 'run'}"]) == 0
    changed = (f"method.live={other.root}", "method.iterations=2")
    assert cli.main(["train", "--resume", str(tmp_path / "run"), *changed]) == 1
    assert f"{other.root} is not what the run has learnt from" in capsys.readouterr().err


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1)])
def test_a_run_that_goes_on_with_other_iterations_skips_and_repeats_no_episode(
    given, robot, tmp_path, monkeypatch, before, after
):
    for i in range(2 * max(before, after)):
        robot.live(True, by_hand=range(1, 7) if i == 1 else range(0))
    read, whole = [], LiveLoop._read
    monkeypatch.setattr(LiveLoop, "_read", lambda loop, data, i: read.append(i) or whole(loop, data, i))
    keys = (*given, f"method.live={robot.root}", "method.iterations=1", f"method.episodes={before}")
    assert cli.main(["train", str(CONFIG), *keys, f"output_dir={tmp_path / 'run'}"]) == 0
    changed = (f"method.episodes={after}", "method.iterations=2")
    assert cli.main(["train", "--resume", str(tmp_path / "run"), *changed]) == 0
    # Each once; when it goes on also those that a person's demonstrations are of.
    assert read == [*range(before), 1, *range(before, before + after)]


def test_what_a_person_did_is_kept_with_the_demonstrations_and_gaps_are_not_bridged(given, robot, tmp_path):
    robot.live(True, by_hand=range(2, 7))
    robot.live(False, late=4, missing=20)
    robot.live(False, late=4, missing=2)  # it held for two periods
    loop = LiveLoop(load(CONFIG, [*given, f"method.live={robot.root}"]), tmp_path / "run")
    demonstrations, live_data = len(loop.learner.offline), open_dataset(robot.root)
    data = loop.practise([0, 0, 0])
    # Of 8 frames, all decisions of the success; of failures those that neither reach the end nor cross what is missing.
    assert data.decisions.at.tolist() == [*range(8), 8 + 0, 8 + 4, 16 + 0, 16 + 1, 16 + 4]
    assert data.decisions.discount[:8].tolist() == pytest.approx([0.0] * 2 + [0.98**STEPS] * 3 + [0.0] * 3)
    # To be taken over is to fail for good, after the commands that were the policy's own.
    assert data.decisions.reward[:2].tolist() == pytest.approx([-1 / (1 - 0.98)] * 2)
    first = data.decisions.actions[:2].unflatten(1, (STEPS, -1))
    assert (
        torch.equal(first[0, 1], first[0, 2])
        and torch.equal(first[1, 0], first[1, 1])
        and (first[0, 0] != first[0, 1]).any()
    )
    assert data.success.tolist() == [True, False, False] and data.steps == 24
    kept = loop.learner.offline
    assert len(kept) == demonstrations + 3  # those that begin at frames 2, 3 and 4 are a person's to their last step
    taken = torch.stack([data.decisions.actions[i] for i in (2, 3, 4)])
    assert torch.equal(kept.actions[-3:], taken)
    seen = loop.learner.offline.seen[kept.at[-3:]]
    assert torch.equal(seen, data.decisions.seen[data.decisions.at[2:5]]) and live_data.num_episodes == 3


def test_pictures_that_are_looked_at_once_are_not_kept(given, robot, tmp_path, monkeypatch):
    monkeypatch.setattr(recorded, "open_frames", lambda *a: pytest.fail("two cameras would fill a disk within a day"))
    robot.live(True)
    loop = LiveLoop(load(CONFIG, [*given, f"method.live={robot.root}"]), tmp_path / "run")
    assert loop.practise([0]).decisions.at.tolist() == [*range(8)]


def test_an_update_is_for_a_chunk_and_not_for_each_of_its_frames(given, robot, tmp_path, monkeypatch):
    robot.live(True)
    robot.live(True)
    keys = (*given, f"method.live={robot.root}", "method.iterations=1", "method.episodes=2")
    loop = LiveLoop(load(CONFIG, keys), tmp_path / "run")
    updates, update = [], loop.learner.update
    monkeypatch.setattr(loop.learner, "update", lambda: updates.append(len(loop.learner.store)) or update())
    loop.run()
    assert updates == [16] * (16 // STEPS)  # 8 frames an episode, and each of them is kept


def test_episodes_that_teach_nothing_are_told_and_the_policy_acts_as_it_is(given, robot, tmp_path, capsys):
    robot.live(False, n=STEPS)  # cut off before its first chunk is over
    robot.live(True)
    keys = (*given, f"method.live={robot.root}", "method.iterations=2", "method.episodes=1", "method.save_every=1")
    loop = LiveLoop(load(CONFIG, keys), tmp_path / "run")
    update = loop.update

    def updated(data, generator):
        assert (loop.deployed().policy.config.samples == 1) == (not loop.learnt)
        return update(data, generator)

    loop.update = updated
    loop.run()
    said = capsys.readouterr().out
    assert f"nothing can be learnt from episodes 0 to 0: each is shorter than {STEPS} actions" in said
    assert ["td" in row for row in records(tmp_path / "run")] == [False, False, True]


def test_without_demonstrations_only_what_a_person_did_is_kept_apart(given, robot, tmp_path):
    robot.live(False)
    robot.live(True, by_hand=range(2, 7))
    loop = LiveLoop(load(CONFIG, [*given, f"method.live={robot.root}", "data.root=[]"]), tmp_path / "run")
    loop.practise([0])
    assert loop.learner.offline is None  # and batches are of what was lived alone
    loop.practise([0, 0])
    assert len(loop.learner.offline) == 3


def test_it_waits_for_what_is_not_recorded_yet(given, robot, tmp_path, monkeypatch, capsys):
    asleep, recorded = threading.Event(), threading.Event()
    recording = threading.Thread(target=lambda: (asleep.wait(), robot.live(False), recorded.set()))

    def sleep(_: float) -> None:
        asleep.set()
        if threading.current_thread() is not recording:  # which may sleep as well
            recorded.wait()

    monkeypatch.setattr(live.time, "sleep", sleep)
    robot.live(True)
    loop = LiveLoop(load(CONFIG, [*given, f"method.live={robot.root}"]), tmp_path / "run")
    recording.start()
    assert loop.practise([0, 0]).success.tolist() == [True, False]
    recording.join()
    assert f"waiting for episode 2 of {robot.root}, it holds 1" in capsys.readouterr().out


def test_who_asks_it_to_stop_gets_what_was_learnt_and_can_have_it_go_on(given, robot, tmp_path, monkeypatch, capsys):
    """An actor of RLPD explores by its own noise, which is nothing to be left with."""
    keys = [key for key in given if not key.startswith(("method.samples", "method.edits"))]
    keys += ["method.name=rlpd_vla", f"method.live={robot.root}"]
    for _ in range(2):
        robot.live(True)
    loop = LiveLoop(load(CONFIG, keys), tmp_path / "run")
    kept = []

    def asked(_: float) -> None:
        kept.append(load_policy(tmp_path / "run").policy.config)
        loop._stop.asked = True

    monkeypatch.setattr(live.time, "sleep", asked)
    assert loop.run().name == "000001"
    left = load_policy(tmp_path / "run").policy.config
    assert [c.noise_scale for c in (*kept, left)] == [1.0, 0.0] and not left.alone
    assert f"vla train --resume {tmp_path / 'run'}" in capsys.readouterr().out


def test_noise_is_learnt_from_recordings_that_tell_of_none(given, robot, tmp_path):
    keys = [key for key in given if not key.startswith(("method.samples", "method.edits"))]
    for success in (True, False, True, False):
        robot.live(success)
    run = tmp_path / "run"
    assert (
        cli.main(["train", str(CONFIG), *keys, "method.name=dsrl_na", f"method.live={robot.root}", f"output_dir={run}"])
        == 0
    )
    left = load_policy(run).policy.config
    assert left.gives == "noise" and not left.alone and left.noise_scale == 0.0
    assert records(run)[2]["distilled"] > 0


@pytest.mark.parametrize(
    ("key", "message"),
    [("method=dsrl", "does not tell 'dsrl'"), ("method.reward=task", "records success alone")],
)
def test_what_a_recording_does_not_tell_is_refused(given, key, message, tmp_path):
    with pytest.raises(UserError, match=message):
        load(CONFIG, [key, *given[-2:], f"method.live={tmp_path}"])

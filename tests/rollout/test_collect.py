"""A collection is a function of task, seed and count, whoever did the work and however often it was stopped."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

import sim
from vla_stack import envs
from vla_stack.cli import main
from vla_stack.data.dataset import CHUNK, CHUNK_GIVEN, open_dataset
from vla_stack.data.loader import ChunkLoader
from vla_stack.errors import UserError
from vla_stack.policies.chunk_policy import load_policy
from vla_stack.policies.directory import resolve_policy, write_manifest
from vla_stack.policies.reading import read_config, read_policy, read_processors
from vla_stack.rollout.collect import COMMAND_SENT, RECORD, SEED, CollectConfig, collect
from vla_stack.runtime.executor import default_execute
from vla_stack.schema import ACTION

CONFIG = CollectConfig("pick", seed=3, noise=0.3, image_size=16)


@pytest.mark.slow
def test_same_episodes_whatever_the_workers_and_the_stops(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    collect(CONFIG, tmp_path / "one", 4, workers=1, image_mode="image")
    collect(CONFIG, tmp_path / "two", 2, workers=2, image_mode="image")  # stopped half-way
    tried, succeeded = collect(CONFIG, tmp_path / "two", 4, workers=2, image_mode="image")
    assert succeeded == 2 <= tried
    one, two = (open_dataset(tmp_path / name) for name in ("one", "two"))
    assert one.tasks == two.tasks and one.columns.keys() == two.columns.keys()
    for name in one.columns:
        np.testing.assert_array_equal(one.columns[name], two.columns[name], err_msg=name)
    frames = np.arange(one.num_frames)
    a, b = (ChunkLoader(d, 1, 1, progress=False).gather(frames) for d in (one, two))
    np.testing.assert_array_equal(a["observation.images.wrist"], b["observation.images.wrist"])

    assert one.columns["next.success"][one.episode_to - 1].all()
    assert (one.columns["command.sent"] != one.columns["action"]).any()  # the label stays clean
    assert collect(CONFIG, tmp_path / "one", 4) == (0, 0)
    with pytest.raises(UserError, match="of another seed"):
        collect(CollectConfig("pick", seed=4, image_size=16), tmp_path / "one", 5)

    assert main(["data", "info", str(tmp_path / "one")]) == 0
    assert "success   4/4" in capsys.readouterr().out
    assert main(["data", "check", str(tmp_path / "one")]) == 0
    min((tmp_path / "one/data").glob("*/*.parquet")).unlink()
    assert main(["data", "check", str(tmp_path / "one")]) == 1
    assert "holds 0 of its" in capsys.readouterr().out
    assert main(["data", "repair", str(tmp_path / "one")]) == 1
    assert "episodes after it are intact" in capsys.readouterr().err


def test_tasks_with_the_same_instructions_share_a_dataset(tmp_path: Path) -> None:
    pick, obstacle = (CollectConfig(task, privileged=True) for task in ("pick", "obstacle"))
    for config, episodes in ((pick, 2), (obstacle, 1), (pick, 3), (obstacle, 2)):  # begun, and gone on with
        collect(config, tmp_path / "both", episodes, workers=0)
    dataset = open_dataset(tmp_path / "both")
    seeds = dataset.columns[SEED][dataset.episode_from].tolist()
    ours = [[s for s in seeds if s in {c.env_seed(i) for i in range(50)}] for c in (pick, obstacle)]
    assert [len(s) for s in ours] == [3, 2] and len(set(seeds)) == 5
    assert ours[0] == _seeds_alone(pick, tmp_path / "pick", 3)
    assert collect(pick, tmp_path / "both", 3) == collect(obstacle, tmp_path / "both", 2) == (0, 0)


def _seeds_alone(config: CollectConfig, root: Path, episodes: int) -> list[int]:
    collect(config, root, episodes, workers=0)
    dataset = open_dataset(root)
    return dataset.columns[SEED][dataset.episode_from].tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "are of another seed"),
        ({"noise": 0.5}, "collected with noise 0.3, not 0.5"),
        ({"randomisation": 2}, "collected with randomisation 0, not 2"),
        ({"options": {"control_hz": 10.0}}, "collected with options"),
    ],
)
def test_a_collection_is_continued_as_it_was_begun(tmp_path: Path, change: dict, message: str) -> None:
    config = CollectConfig("pick", noise=0.3, privileged=True, options={"render_size": (32, 32), "control_hz": 10.0})
    collect(config, tmp_path / "d", 1, workers=0)
    with pytest.raises(UserError, match=message):
        collect(replace(config, **change), tmp_path / "d", 2, workers=0)
    (tmp_path / "d" / RECORD).write_text('{"pick": {"mood": 1}}')
    with pytest.raises(UserError, match="collect.json does not say"):
        collect(config, tmp_path / "d", 2, workers=0)
    (tmp_path / "d" / RECORD).unlink()  # as datasets had it before
    collect(config, tmp_path / "d", 2, workers=0)
    assert open_dataset(tmp_path / "d").num_episodes == 2


def test_a_dataset_without_a_record_is_not_continued_with_another_seed(tmp_path: Path) -> None:
    config = CollectConfig("pick", privileged=True)
    collect(config, tmp_path / "d", 1, workers=0)
    (tmp_path / "d" / RECORD).unlink()
    with pytest.raises(UserError, match="instructions of 'pick' are of another seed or task"):
        collect(replace(config, seed=1), tmp_path / "d", 2, workers=0)


@pytest.mark.slow
def test_a_killed_collection_leaves_no_process_behind(tmp_path: Path) -> None:
    command = ["collect", "--task", "pick", "--privileged", "--episodes", "1000000", "--root", str(tmp_path / "d")]
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys; from vla_stack.cli import main; main(sys.argv[1:])", *command],
        stderr=subprocess.PIPE, text=True, env=os.environ | {"TQDM_MININTERVAL": "0"},
    )  # fmt: skip
    assert process.stderr is not None
    while "success 1/1" not in process.stderr.readline():  # the progress bar: workers are at work
        assert process.poll() is None
    workers = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    assert workers and not psutil.wait_procs(workers, timeout=60)[1]


def test_an_unknown_task_is_named_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no task 'juggle' -- the tasks are pick"):
        collect(CollectConfig("juggle"), tmp_path / "d", 1)


def test_options_of_benchmarks_are_refused_for_our_tasks(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["collect", "--task", "pick", "--control-mode", "ee_delta", "--root", str(tmp_path / "d")]) == 1
    assert "--control-mode and --visuals are for benchmarks" in capsys.readouterr().err


@pytest.mark.parametrize(
    "what", [("--env", "metaworld/push-v3", "--errors", "0.5"), ("--task", "pick", "--errors", "2")]
)
def test_errors_are_a_share_and_of_our_tasks(what: tuple, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["collect", *what, "--root", str(tmp_path / "d")]) == 1
    assert "give --task and at most 1" in capsys.readouterr().err


ALOHA = "aloha/transfer_cube"


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (CollectConfig("pick", branch=-1), "--branch -1 is negative"),
        (CollectConfig(ALOHA, errors=0.2), "--errors 0.2 is no share, or not of our tasks"),
        (CollectConfig("pick", errors=2.0), "--errors 2 is no share"),
        (CollectConfig(ALOHA, mixed=True), "--mixed is for our tasks"),
        (CollectConfig("pick", noise=0.3, mixed=True), "brings its own noise"),
        (CollectConfig("pick", moments=3), "--moments needs the chunk labels of our tasks"),
        (CollectConfig(ALOHA, policy="shipped"), "--policy acts by itself, in our tasks"),
        (CollectConfig("pick", policy="shipped", branch=0), "the expert's chunks are its labels"),
        (CollectConfig("pick", delay=1), "--delay 1 is of a policy's chunks"),
        (CollectConfig("pick", privileged=True, options={"cameras": ("top",)}), "--privileged records no cameras"),
    ],
)
def test_a_program_is_refused_what_the_command_is(config: CollectConfig, why: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=why):
        collect(config, tmp_path / "d", 1, workers=0)
    assert not (tmp_path / "d").exists()


def test_all_tasks_of_a_command_are_checked_before_the_first_is_collected(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(["collect", "--task", "pick", ALOHA, "--errors", "0.5", "--root", str(tmp_path / "d")]) == 1
    assert "not of our tasks" in capsys.readouterr().err and not (tmp_path / "d").exists()


def test_attempt_seeds_differ_between_tasks_seeds_and_attempts() -> None:
    seeds = [CollectConfig(t, s).env_seed(i) for t in ("pick", "place") for s in (0, 1) for i in range(500)]
    assert len(set(seeds)) == len(seeds)


def test_moments_are_a_few_random_frames_of_an_episode_in_their_order(tmp_path):
    config = CollectConfig("pick", noise=0.3, image_size=16, moments=3, options={"cameras": ("front",)})
    tried, _ = collect(config, tmp_path / "moments", 8, workers=0)
    data = open_dataset(tmp_path / "moments")
    assert tried == data.num_episodes == 8
    lengths = data.episode_to - data.episode_from
    assert lengths.max() == 3 and lengths.sum() == data.num_frames
    whole = CollectConfig("pick", noise=0.3, image_size=16, options={"cameras": ("front",)})
    collect(whole, tmp_path / "whole", 8, workers=0)
    every = open_dataset(tmp_path / "whole")
    state = data.columns["observation.state"]
    inside = np.concatenate([state[e : e + 3] for e in data.episode_from[lengths == 3]]).reshape(-1, 3, state.shape[-1])
    jumps = np.abs(np.diff(inside, axis=1)).max(-1)
    steps = np.abs(np.diff(every.columns["observation.state"], axis=0)).max(-1)
    assert np.median(jumps) > 2 * np.median(steps)  # no neighbours
    home = every.columns["observation.state"][every.episode_from]
    late = np.abs(inside[:, 2] - home.mean(0)).max(-1) > np.abs(inside[:, 0] - home.mean(0)).max(-1)
    assert late.mean() > 0.7  # the arm has come further from where it began
    # The label of a frame is what the clean expert does from there: its first action is the frame's own.
    chunks = data.columns[CHUNK].reshape(data.num_frames, -1, 5)
    np.testing.assert_allclose(chunks[:, 0], data.columns[ACTION], atol=1e-6)


def test_moments_before_the_end_are_no_failures_of_the_expert(tmp_path, monkeypatch):
    monkeypatch.setattr("vla_stack.rollout.collect.HOPELESS", 1)
    config = CollectConfig("pick", noise=0.3, image_size=16, moments=1, options={"cameras": ("front",)})
    assert collect(config, tmp_path / "moments", 6, workers=0) == (6, 6)
    assert not open_dataset(tmp_path / "moments").columns["next.success"][0]  # the first one had not arrived


def test_moments_are_continued_where_they_were_stopped(tmp_path):
    config = CollectConfig("pick", noise=0.3, image_size=16, moments=2, options={"cameras": ("front",)})
    collect(config, tmp_path / "once", 5, workers=0)
    collect(config, tmp_path / "twice", 2, workers=0)
    collect(config, tmp_path / "twice", 5, workers=0)
    once, twice = open_dataset(tmp_path / "once"), open_dataset(tmp_path / "twice")
    for key in ("observation.state", ACTION, CHUNK):
        np.testing.assert_array_equal(once.columns[key], twice.columns[key])


def test_an_expert_labels_the_states_in_which_a_policy_asks_for_chunks(tmp_path):
    """Wherever the policy went, failures included, the label is what the expert does from there."""
    config = CollectConfig("stack", policy="shipped", seed=3)  # it was never taught to
    collect(config, tmp_path / "data", 2, workers=0)
    data = open_dataset(tmp_path / "data")
    execute = default_execute(load_policy("shipped").spec)
    chunks = 1 + (sim.TASKS["stack"].limit(10) - 1) // execute
    assert (data.episode_to - data.episode_from).tolist() == [chunks] * 2
    labels = data.columns[CHUNK].reshape(data.num_frames, -1, 5)
    np.testing.assert_allclose(labels[:, 0], data.columns[ACTION], atol=1e-6)
    assert np.abs(data.columns[COMMAND_SENT] - data.columns[ACTION])[:, :3].max() > 0.02  # m: the expert did not act
    env = envs.make("sim/stack-v0", options={"cameras": ()}).row(0)
    expert = sim.make_expert(env)
    for first in data.episode_from:
        env.reset(seed=int(data.columns[SEED][first]))
        np.testing.assert_allclose(expert.act(), data.columns[ACTION][first], atol=1e-6)


def test_a_late_label_begins_with_what_the_policy_does_meanwhile(tmp_path):
    late = tmp_path / "late"  # the shipped one, as if it had been trained to continue what is executed
    policy = read_policy(resolve_policy("shipped"), read_config(resolve_policy("shipped"), "cpu"))
    policy.config.max_delay = 3
    for part in (policy, *read_processors(resolve_policy("shipped"), policy.config, "cpu")):
        part.save_pretrained(late)
    write_manifest(late)
    config = CollectConfig("stack", policy=str(late), delay=3, seed=3)
    collect(config, tmp_path / "data", 4, workers=0)
    data = open_dataset(tmp_path / "data")
    given, first = data.columns[CHUNK_GIVEN], data.episode_from
    assert set(given) <= {0, 1, 2, 3} and given.max() > 1 and not given[first].any()
    delays = [set(given[a + 1 : b]) for a, b in zip(first, data.episode_to, strict=True)]
    assert all(len(d) == 1 for d in delays) and len(set.union(*delays)) > 1  # a number of its own each
    labels = data.columns[CHUNK].reshape(data.num_frames, -1, 5)
    assert (np.abs(labels[:, 0] - data.columns[ACTION]).max(1) > 0)[given > 0].mean() > 0.9  # the expert's is another
    batch = ChunkLoader(tmp_path / "data", 8, 4).gather(np.arange(data.num_frames))
    leading = batch["action_is_pad"].cumprod(1).sum(1)
    np.testing.assert_array_equal(leading[leading < 8], given[leading < 8])
    with pytest.raises(UserError, match="--delay 4.* can continue 3"):
        collect(replace(config, delay=4), tmp_path / "more", 1, workers=0)


def test_a_collection_of_a_policy_is_continued_and_is_not_that_of_another(tmp_path):
    config = CollectConfig("pick", policy="shipped")
    assert collect(config, tmp_path / "once", 3, workers=0) == (3, 3)
    collect(config, tmp_path / "twice", 1, workers=0)
    with pytest.raises(UserError, match="collected with policy shipped, not generalist"):
        collect(replace(config, policy="generalist"), tmp_path / "twice", 3, workers=0)
    collect(config, tmp_path / "twice", 3, workers=0)
    once, twice = open_dataset(tmp_path / "once"), open_dataset(tmp_path / "twice")
    for key in ("observation.state", ACTION, CHUNK):
        np.testing.assert_array_equal(once.columns[key], twice.columns[key])


def test_who_acts_by_itself_is_not_perturbed(tmp_path, capsys):
    command = ["collect", "--task", "pick", "--policy", "shipped", "--root", str(tmp_path / "data")]
    assert main([*command, "--noise", "0.3"]) == 1
    assert "leave out --noise" in capsys.readouterr().err

"""Stored episodes of a recorded dataset are what the environment gave while they were recorded."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import sim
from vla_stack.data import digests
from vla_stack.data.dataset import open_dataset
from vla_stack.data.features import read_robot_spec
from vla_stack.data.recorder import EpisodeRecorder
from vla_stack.envs.making import observe
from vla_stack.errors import UserError
from vla_stack.methods.off_policy import stored as stored_episodes
from vla_stack.methods.off_policy.collecting import rows_of
from vla_stack.methods.off_policy.deployed import in_range, measured, normalised
from vla_stack.methods.off_policy.stored import stored, success_rate
from vla_stack.methods.practice import paid
from vla_stack.methods.replay_buffer import ReplayBuffer, Source, Transition
from vla_stack.rollout.collect import COMMAND_SENT, SEED, CollectConfig, collect
from vla_stack.schema import ACTION, CAPTURE_TIME, OBS_STATE, SUCCESS, Observation
from vla_stack.training.recipe import Recipe, make

GAMMA = 0.97
DELTA = {"control_mode": "ee_delta"}


def recipe(root, episodes=3, failures=True, task="sim/pick-v0", options=None, **method) -> Recipe:
    learner = {"name": "wsrl", "arm": "sac", "gamma": GAMMA, "offline": {"episodes": episodes, "failures": failures}}
    where = {"task": {"id": task, "options": options or {}}, "data": {"root": str(root)}, "eval": {"every": 1}}
    return make({**where, "method": learner | method}, "test")


def rows_for(made, frozen=None):
    return rows_of(made.task, made.method, frozen)


def read(root, *args, frozen=None, **changes):
    """Episodes of a dataset, for a recipe with some changes."""
    made = recipe(root, *args, **changes)
    return stored_episodes.read(made.method, made.task, Path(root), rows_for(made, frozen), frozen)


def gather(root, noise, episodes=3, seed=5, image_mode="video", **config):
    collect(CollectConfig("pick", seed, noise, keep_failures=True, **config), root, episodes, 1, image_mode)
    return root


@pytest.fixture(scope="module")
def moves(tmp_path_factory):
    """Noisy episodes in moves of the target, one of them a failure at least."""
    return gather(tmp_path_factory.mktemp("moves") / "d", 0.8, privileged=True, options=DELTA)


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    """Episodes as `vla collect --privileged` records them: absolute targets."""
    return gather(tmp_path_factory.mktemp("targets") / "d", 0.0, 2, privileged=True)


@pytest.fixture
def copy(moves, tmp_path):
    return shutil.copytree(moves, tmp_path / "copy")


def replayed(dataset, frozen=None, reward="step", **changes):
    """What the environment gives for the recorded seeds and the commands that were sent; also a success of each."""
    rows, stores, outcomes = rows_for(recipe("", reward=reward, **changes), frozen), [], []
    robot = rows.robot

    def seen(step, task):
        return measured([observe(step.observation, robot, task, 0)], frozen)

    for first, end in zip(dataset.episode_from, dataset.episode_to, strict=True):
        begun = rows.reset([0], [int(dataset.columns[SEED][first])])[0]
        task = begun.info["task"]
        obs = seen(begun, task)
        if not stores:
            stores.append(ReplayBuffer(1000, obs.shape[1], 5, 1, GAMMA, -(reward == "step") / (1 - GAMMA)))
        for row in range(first, end):
            sent = dataset.columns[COMMAND_SENT][row][None]
            step = rows.step([0], sent)[0]
            after, (pay, terminated, truncated) = seen(step, task), paid(reward, step)
            ends, zero = np.array([[terminated], [truncated]]), np.zeros(1, np.int64)
            stores[0].add(Transition(obs, in_range(robot, sent), np.full(1, pay), *ends, after, zero, zero, zero))
            obs = after
        outcomes.append(terminated)
    return stores[0], outcomes


def without_lasts(store, outcomes):
    """Rows of all steps but the last of each failure."""
    over = np.flatnonzero((store.columns["terminated"] | store.columns["truncated"])[store.rows()])
    assert len(over) == len(outcomes)
    return np.setdiff1d(store.rows(), over[~np.array(outcomes)])


def check_same(store, wanted, rows, outcomes, atol=0.0):
    """All that a dataset tells is equal; the target's lead, which it does not, is so to the precision of a reset."""
    columns, other = store.columns, {name: column[rows] for name, column in wanted.columns.items()}
    assert len(store) == len(rows)
    np.testing.assert_allclose(columns["obs"][:, :-5], other["obs"][:, :-5], atol=atol, rtol=0)
    np.testing.assert_allclose(columns["obs"][:, -5:], other["obs"][:, -5:], atol=1e-4, rtol=0)
    np.testing.assert_array_equal(columns["reward"], other["reward"])
    np.testing.assert_array_equal(columns["terminated"], other["terminated"])
    over = np.flatnonzero(columns["terminated"] | columns["truncated"])
    assert columns["terminated"][over].tolist() == outcomes and not (columns["truncated"] & columns["terminated"]).any()
    follows = ~columns["terminated"]
    np.testing.assert_allclose(columns["next_obs"][follows, :-5], other["next_obs"][follows, :-5], atol=atol, rtol=0)
    np.testing.assert_allclose(columns["next_obs"][follows], other["next_obs"][follows], atol=1e-4, rtol=0)
    np.testing.assert_allclose(columns["returns"], other["returns"], rtol=1e-6)
    assert (columns["source"] == Source.OFFLINE).all()


@pytest.mark.parametrize("reward", ["step", "success"])
def test_episodes_are_what_the_environment_gave(moves, reward):
    dataset = open_dataset(moves)
    wanted, outcomes = replayed(dataset, reward=reward)
    assert True in outcomes and False in outcomes  # both kinds are looked at
    store, rows = read(moves, reward=reward), without_lasts(wanted, outcomes)
    check_same(store, wanted, rows, outcomes)
    np.testing.assert_array_equal(store.columns["action"], wanted.columns["action"][rows])
    assert not np.array_equal(store.columns["action"], dataset.columns[ACTION][: len(store)])  # those are labels
    won = read(moves, failures=False, reward=reward)
    assert won.columns["terminated"].sum() == sum(outcomes) and not won.columns["truncated"].any()


def test_absolute_targets_are_taken_as_they_are_where_the_environment_takes_them(targets):
    options = {"control_mode": "ee_abs"}
    wanted, outcomes = replayed(open_dataset(targets), options=options)
    store, rows = read(targets, 2, options=options), without_lasts(wanted, outcomes)
    check_same(store, wanted, rows, outcomes, atol=1e-6)  # a target is rounded on its way to [-1, 1] and back
    np.testing.assert_allclose(store.columns["action"], wanted.columns["action"][rows], atol=1e-6)


def test_absolute_targets_become_moves_that_follow_them(targets):
    rows, dataset, store = rows_for(recipe(targets)), open_dataset(targets), read(targets, 2)
    first, end = int(dataset.episode_from[0]), int(dataset.episode_to[0])
    rows.reset([0], [int(dataset.columns[SEED][first])])
    task = rows.row(0).unwrapped
    for row in range(first, end - 1):
        after = rows.step([0], store.columns["action"][row][None])[0]
        np.testing.assert_allclose(task.tool_command[:4], dataset.columns[ACTION][row][:4], atol=1e-4)
        if row < end - 2:  # what is shown of the gripper while it is switched is one step ahead of the replay
            np.testing.assert_allclose(after.observation["agent_pos"][:4], store.columns["obs"][row + 1][:4], atol=5e-3)
        assert not (after.terminated or after.truncated)
    grips = store.columns["action"][first:end, 4]
    assert grips.min() == -1 and (grips == -1).sum() >= 2  # half of the way a step, until it is closed
    last = rows.step([0], store.columns["action"][end - 1][None])[0]
    assert last.info["is_success"]  # and it succeeds in the environment as well


def test_a_run_reads_them_once_and_takes_as_many_as_it_asks_for(moves, tmp_path, capsys):
    all_of, path = recipe(moves, 99), tmp_path / "offline.safetensors"
    store, (mean, std) = stored(path, all_of.method, all_of.task, moves, rows_for(all_of), None)
    assert "3 of 3 episodes" in capsys.readouterr().out
    raw = read(moves, 99)
    np.testing.assert_array_equal(store.columns["obs"], normalised(raw.columns["obs"], mean, std))
    np.testing.assert_array_equal(store.columns["returns"], raw.columns["returns"])
    assert 0.0 < success_rate(store) < 1.0
    again, _ = stored(path, all_of.method, all_of.task, Path("gone"), rows_for(all_of), None)
    np.testing.assert_array_equal(again.columns["obs"], store.columns["obs"])
    ends = open_dataset(moves).episode_to
    assert len(read(moves, 2)) in (ends[1], ends[1] - 1, ends[1] - 2)


def test_a_pause_ends_an_episode_as_a_time_limit_does(copy):
    before = read(copy)
    times = open_dataset(copy).columns[CAPTURE_TIME].copy()
    times[4 : open_dataset(copy).episode_to[0]] += 3.0  # seconds of a hold between the frames 3 and 4
    rewrite(copy, CAPTURE_TIME, times)
    store = read(copy)
    assert len(store) == len(before) - 1 and store.columns["truncated"][2] and not before.columns["truncated"][2]
    np.testing.assert_allclose(store.columns["returns"][2], -1 + GAMMA * -1 / (1 - GAMMA), rtol=1e-6)
    np.testing.assert_array_equal(store.columns["action"][3:], before.columns["action"][4:])
    np.testing.assert_array_equal(store.columns["obs"][3, -5:], np.zeros(5))  # the target is taken to be at the tool


class Looking:
    """A frozen policy whose features are how bright each colour is."""

    def __init__(self):
        self.spec = SimpleNamespace(robot=sim.TASKS["pick"].arm.spec("ee_abs", ("wrist",), 32, 10.0))
        self.policy = self

    def preprocess(self, observations):
        return observations

    def encode(self, observations):
        return observations

    def features(self, observations):
        colours = [np.asarray(o.images["wrist"], np.float32).mean((0, 1)) for o in observations]
        return torch.tensor(np.array([[*c, len(o.task)] for c, o in zip(colours, observations, strict=True)]))


def test_pictures_and_instruction_go_through_the_same_features(tmp_path):
    options = DELTA | {"cameras": ("wrist",)}
    root = gather(tmp_path / "seen", 0.0, 1, image_mode="image", image_size=32, options=options)
    looking = Looking()
    wanted, outcomes = replayed(open_dataset(root), looking)
    store = read(root, 1, features="a policy", frozen=looking)
    check_same(store, wanted, without_lasts(wanted, outcomes), outcomes)


# Refusals -------------------------------------------------------------------------------------------------------------


def rewrite(root, name, values):
    """Give a column other values; ``None`` takes it away."""
    dataset = open_dataset(root)
    for episode in range(dataset.num_episodes):
        path = dataset.data_file(episode)
        table = pq.read_table(path)
        at = table.column_names.index(name)
        if values is None:
            table = table.remove_column(at)
        else:
            part = values[dataset.episode_from[episode] : dataset.episode_to[episode]]
            kind = table.schema.field(at).type
            table = table.set_column(at, table.schema.field(at), pa.array(part.tolist(), kind))
        pq.write_table(table, path)
    if values is None:
        info = json.loads((root / "meta/info.json").read_text())
        del info["features"][name]
        (root / "meta/info.json").write_text(json.dumps(info))
    digests.seal(root)


def refused(root, match, **changes):
    with pytest.raises(UserError, match=match):
        read(root, **changes)


def test_a_folder_without_a_dataset_is_refused(tmp_path):
    refused(tmp_path / "none", r"none/meta/info.json is missing -- check the folder's name")


def test_another_robot_is_refused(moves, tmp_path):
    path = shutil.copytree(moves, tmp_path / "named") / "meta/robot.json"
    robot = json.loads(path.read_text())
    robot["state"][2]["name"] = "height"
    path.write_text(json.dumps(robot))
    digests.seal(path.parents[1])
    refused(path.parents[1], r"named/meta/robot.json: entry 2 of observation.state is height in m, of 23; in sim/pick")
    robot["state"][2]["name"] = "tcp_z.pos"
    path.write_text(json.dumps(robot | {"state": robot["state"][:-1]}))
    digests.seal(path.parents[1])
    refused(path.parents[1], r"entry 22 of observation.state is missing, of 22; in sim/pick-v0 it is goal_joint in m")


def test_states_without_poses_and_moves_for_targets_are_refused(moves, tmp_path):
    env = gather(tmp_path / "plain", 0.0, 1, options={"cameras": ()})
    refused(
        env, r"entry 12 of observation.state is missing, of 12; in sim/pick-v0 it is object_dx in m, of 23 -- record"
    )
    moved = r"entry 0 of action is tcp_x.pos in 1, of 5; in sim/pick-v0 it is tcp_x.pos in m, of 5"
    refused(moves, moved, options={"control_mode": "ee_abs"})
    refused(moves, r"joint_abs does not go with", options={"control_mode": "joint_abs"})


def test_another_rate_is_refused(moves):
    refused(
        moves,
        r"at 10 Hz, sim/pick-v0 is controlled at 20 Hz -- set task.options.control_hz=10",
        options={"control_hz": 20},
    )


def test_another_task_is_refused(moves):
    refused(moves, r"was recorded with 'pick up .*', sim/push-v0 asks for", task="sim/push-v0")


def test_environments_that_see_what_no_dataset_holds_are_refused(moves):
    refused(moves, r"Pendulum-v1 is observed by what no dataset holds", task="Pendulum-v1")


def test_no_success_is_refused(copy):
    rewrite(copy, SUCCESS, np.zeros(open_dataset(copy).num_frames, bool))
    refused(copy, r"none of the 3 episodes that are taken was a success")
    refused(copy, r"none of the 0 episodes", episodes=0)
    rewrite(copy, SUCCESS, None)
    refused(copy, r"has no column 'next.success'")


def test_numbers_that_are_not_finite_are_refused(moves, tmp_path):
    for name, match in (
        (OBS_STATE, r"'observation.state' is not finite in episode 1"),
        (COMMAND_SENT, r"episode 1 holds"),
    ):
        root = shutil.copytree(moves, tmp_path / name)
        values = open_dataset(root).columns[name].copy()
        values[open_dataset(root).episode_from[1] + 2, 0] = np.nan
        rewrite(root, name, values)
        refused(root, match)


def test_what_a_person_did_in_place_of_a_label_is_the_action(moves, tmp_path):
    """Teleoperation and interventions record one command, the one that was sent."""
    dataset, root = open_dataset(moves), tmp_path / "person"
    columns = dataset.columns
    with EpisodeRecorder(root, read_robot_spec(moves), "image") as recorder:
        for first, end in zip(dataset.episode_from, dataset.episode_to, strict=True):
            for i, row in enumerate(range(first, end)):
                told = dataset.tasks[columns["task_index"][row]]
                obs = Observation(columns[OBS_STATE][row], {}, told, i, round(i * 1e8))
                recorder.add_frame(obs, columns[COMMAND_SENT][row])
            recorder.save_episode(bool(columns[SUCCESS][end - 1]))
    a, b = read(root), read(moves)
    for name in a.columns:
        np.testing.assert_array_equal(a.columns[name], b.columns[name])

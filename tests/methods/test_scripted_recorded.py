"""Stored episodes of a recorded dataset are what the environment gave while they were recorded."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vla_stack.data import digests
from vla_stack.data.dataset import open_dataset
from vla_stack.data.features import read_robot_spec
from vla_stack.data.recorder import EpisodeRecorder
from vla_stack.errors import UserError
from vla_stack.methods.off_policy import frozen_features
from vla_stack.methods.off_policy.recorded import read
from vla_stack.methods.off_policy.scripted import OfflineRecipe, stored, success_rate
from vla_stack.methods.off_policy.state_env import EnvRecipe, StateEnv, normalised
from vla_stack.methods.replay_buffer import ReplayBuffer, Source, Transition
from vla_stack.rollout.collect import COMMAND_SENT, SEED, CollectConfig, collect
from vla_stack.schema import ACTION, CAPTURE_TIME, OBS_STATE, SUCCESS, Observation

GAMMA = 0.97
RECIPE = EnvRecipe("sim/pick-v0")
DELTA = {"control_mode": "ee_delta"}


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


def replayed(env, dataset):
    """What the environment gives for the recorded seeds and the commands that were sent; also a success of each."""
    space = env.env.action_space
    middle, half = (space.high + space.low) / 2, (space.high - space.low) / 2
    store = ReplayBuffer(1000, env.obs_dim, env.action_dim, 1, GAMMA, env.recipe.tail / (1 - GAMMA))
    outcomes = []
    for first, end in zip(dataset.episode_from, dataset.episode_to, strict=True):
        obs = env.reset(int(dataset.columns[SEED][first]))
        for row in range(first, end):
            action = ((dataset.columns[COMMAND_SENT][row] - middle) / half).astype(np.float32)
            after, reward, terminated, truncated = env.step(action)
            ends = np.array([[terminated], [truncated]])
            zero = np.zeros(1, np.int64)
            store.add(Transition(obs[None], action[None], np.full(1, reward), *ends, after[None], zero, zero, zero))
            obs = after
        outcomes.append(env.success)
    return store, outcomes


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
    env, dataset = StateEnv(replace(RECIPE, reward=reward)), open_dataset(moves)
    wanted, outcomes = replayed(env, dataset)
    assert True in outcomes and False in outcomes  # both kinds are looked at
    store, rows = read(env, moves, 3, True, GAMMA), without_lasts(wanted, outcomes)
    check_same(store, wanted, rows, outcomes)
    np.testing.assert_array_equal(store.columns["action"], wanted.columns["action"][rows])
    assert not np.array_equal(store.columns["action"], dataset.columns[ACTION][: len(store)])  # those are labels
    won = read(env, moves, 3, False, GAMMA)
    assert won.columns["terminated"].sum() == sum(outcomes) and not won.columns["truncated"].any()


def test_absolute_targets_are_taken_as_they_are_where_the_environment_takes_them(targets):
    env, dataset = StateEnv(replace(RECIPE, options={"control_mode": "ee_abs"})), open_dataset(targets)
    wanted, outcomes = replayed(env, dataset)
    store, rows = read(env, targets, 2, True, GAMMA), without_lasts(wanted, outcomes)
    check_same(store, wanted, rows, outcomes, atol=1e-6)  # a target is rounded on its way to [-1, 1] and back
    np.testing.assert_allclose(store.columns["action"], wanted.columns["action"][rows], atol=1e-6)


def test_absolute_targets_become_moves_that_follow_them(targets):
    env, dataset = StateEnv(RECIPE), open_dataset(targets)
    store = read(env, targets, 2, True, GAMMA)
    first, end = int(dataset.episode_from[0]), int(dataset.episode_to[0])
    env.reset(int(dataset.columns[SEED][first]))
    task = env.env.unwrapped
    for row in range(first, end - 1):
        after, _, terminated, truncated = env.step(store.columns["action"][row])
        np.testing.assert_allclose(task.tool_command[:4], dataset.columns[ACTION][row][:4], atol=1e-4)
        if row < end - 2:  # what is shown of the gripper while it is switched is one step ahead of the replay
            np.testing.assert_allclose(after[:4], store.columns["obs"][row + 1][:4], atol=5e-3)
        assert not (terminated or truncated)
    grips = store.columns["action"][first:end, 4]
    assert grips.min() == -1 and (grips == -1).sum() >= 2  # half of the way a step, until it is closed
    assert env.step(store.columns["action"][end - 1])[2]  # and it succeeds in the environment as well


def test_a_run_reads_them_once_and_takes_as_many_as_it_asks_for(moves, tmp_path, capsys):
    env, path = StateEnv(RECIPE), tmp_path / "offline.safetensors"
    store, (mean, std) = stored(path, env, OfflineRecipe(root=str(moves)), GAMMA)
    assert "3 of 3 episodes" in capsys.readouterr().out
    raw = read(env, moves, 99, True, GAMMA)
    np.testing.assert_array_equal(store.columns["obs"], normalised(raw.columns["obs"], mean, std))
    np.testing.assert_array_equal(store.columns["returns"], raw.columns["returns"])
    assert 0.0 < success_rate(store) < 1.0
    again, _ = stored(path, env, OfflineRecipe(root="gone"), GAMMA)
    np.testing.assert_array_equal(again.columns["obs"], store.columns["obs"])
    ends = open_dataset(moves).episode_to
    assert len(read(env, moves, 2, True, GAMMA)) in (ends[1], ends[1] - 1, ends[1] - 2)


def test_a_pause_ends_an_episode_as_a_time_limit_does(copy):
    before = read(StateEnv(RECIPE), copy, 3, True, GAMMA)
    times = open_dataset(copy).columns[CAPTURE_TIME].copy()
    times[4 : open_dataset(copy).episode_to[0]] += 3.0  # seconds of a hold between the frames 3 and 4
    rewrite(copy, CAPTURE_TIME, times)
    store = read(StateEnv(RECIPE), copy, 3, True, GAMMA)
    assert len(store) == len(before) - 1 and store.columns["truncated"][2] and not before.columns["truncated"][2]
    np.testing.assert_allclose(store.columns["returns"][2], -1 + GAMMA * -1 / (1 - GAMMA), rtol=1e-6)
    np.testing.assert_array_equal(store.columns["action"][3:], before.columns["action"][4:])
    np.testing.assert_array_equal(store.columns["obs"][3, -5:], np.zeros(5))  # the target is taken to be at the tool


class Looking:
    """Features: how bright each colour is."""

    options = {"cameras": ("wrist",), "image_size": 32}

    def __call__(self, raw, instruction):
        colours = np.asarray(raw["pixels"]["wrist"], np.float32).mean((0, 1))
        return np.concatenate([colours, [len(instruction)], raw["agent_pos"]]).astype(np.float32)


def test_pictures_and_instruction_go_through_the_same_features(tmp_path, monkeypatch):
    options = DELTA | {"cameras": ("wrist",)}
    root = gather(tmp_path / "seen", 0.0, 1, image_mode="image", image_size=32, options=options)
    monkeypatch.setattr(frozen_features, "frozen_features", lambda path: Looking())
    env = StateEnv(replace(RECIPE, features="a policy"))
    wanted, outcomes = replayed(env, open_dataset(root))
    check_same(read(env, root, 1, True, GAMMA), wanted, without_lasts(wanted, outcomes), outcomes)


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


def refused(root, match, recipe=RECIPE, episodes=3):
    with pytest.raises(UserError, match=match):
        read(StateEnv(recipe), root, episodes, True, GAMMA)


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
    absolute = replace(RECIPE, options={"control_mode": "ee_abs"})
    refused(moves, r"entry 0 of action is tcp_x.pos in 1, of 5; in sim/pick-v0 it is tcp_x.pos in m, of 5", absolute)
    refused(moves, r"joint_abs does not go with", replace(RECIPE, options={"control_mode": "joint_abs"}))


def test_another_rate_is_refused(moves):
    refused(
        moves,
        r"at 10 Hz, sim/pick-v0 is controlled at 20 Hz -- set task.options.control_hz=10",
        replace(RECIPE, control_hz=20),
    )


def test_another_task_is_refused(moves):
    refused(moves, r"was recorded with 'pick up .*', sim/push-v0 asks for", replace(RECIPE, id="sim/push-v0"))


def test_rewards_of_its_own_are_refused(moves):
    refused(moves, r"method.reward=own, and .* tells success alone", replace(RECIPE, reward="own"))


def test_environments_that_see_what_no_dataset_holds_are_refused(moves):
    refused(moves, r"Pendulum-v1 is observed by what no dataset holds", EnvRecipe("Pendulum-v1"))


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
    a, b = read(StateEnv(RECIPE), root, 3, True, GAMMA), read(StateEnv(RECIPE), moves, 3, True, GAMMA)
    for name in a.columns:
        np.testing.assert_array_equal(a.columns[name], b.columns[name])

"""Chunk labels: what a clean expert would do from each state, without a trace in the episode, and as they are read."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from lerobot.utils.feature_utils import dataset_to_policy_features

import sim
from sim import external, objects
from vla_stack.cli import main
from vla_stack.data.branching import Branches
from vla_stack.data.dataset import CHUNK, CHUNK_STEPS, open_dataset
from vla_stack.data.edit import merge
from vla_stack.data.loader import ChunkLoader
from vla_stack.data.stats import load_stats
from vla_stack.errors import UserError
from vla_stack.rollout.collect import CollectConfig, collect
from vla_stack.training.recipe import DataRecipe
from vla_stack.training.sources import open_sources

H = 6
SIM = ("pick", "stack", "drawer", "so101_pick")
METAWORLD = {"cameras": (), "control_hz": 20, "control_mode": "ee_abs"}
CONFIG = CollectConfig("pick", noise=0.5, branch=H, privileged=True)


def make(task: str) -> tuple[gym.Env, Any]:
    """An environment without cameras, and what makes its expert."""
    if external.is_external(task):
        return external.make(task, **METAWORLD), external.make_expert
    return gym.make(sim.TASKS[task].id, cameras=(), randomisation=1), sim.make_expert


@pytest.mark.parametrize("task", [*SIM, "metaworld/push-v3", "metaworld/drawer-open-v3"])
def test_a_branch_is_what_the_expert_would_do_and_leaves_no_trace(task: str) -> None:
    (env, make_expert), (alone, _), (twin, _), (fresh, _) = (make(task) for _ in range(4))
    branches = Branches(twin, make_expert, H)
    env.reset(seed=5)
    alone.reset(seed=5)
    branches.begin(5)
    expert, other = (make_expert(e, noise=0.5, seed=5) for e in (env, alone))
    for k in range(14):
        chunk, steps = branches.chunk(env)
        action = expert.act()
        assert 1 <= steps <= H and chunk.dtype == np.float32 and (chunk[0] == action).all()
        if k % 4 == 3:  # the same as of a branch that begins here, though this one may be prolonged
            again = Branches(fresh, make_expert, H)
            again.begin(5)
            np.testing.assert_array_equal(again.chunk(env)[0], chunk)
        one, two = env.step(expert.perturb(action)), alone.step(other.perturb(other.act()))
        np.testing.assert_array_equal(one[0]["agent_pos"], two[0]["agent_pos"])
        assert (env.unwrapped.get_state() == alone.unwrapped.get_state()).all() and one[1:4] == two[1:4]
        if one[2]:
            break


def test_a_branch_goes_on_from_what_somebody_else_does_first() -> None:
    (env, make_expert), (other, _), (twin, _) = (make("pick") for _ in range(3))
    branches = Branches(twin, make_expert, H)
    for e in (env, other):
        e.reset(seed=5)
    branches.begin(5)
    expert = make_expert(other)
    for _ in range(3):
        alone, _ = branches.chunk(env)
        given = [expert.act() + np.float32([0.03, -0.02, 0.0, 0.0, -0.5])] * 2
        chunk, steps = branches.chunk(env, given)
        again, _ = branches.chunk(env)  # nothing of it is kept
        np.testing.assert_array_equal(alone, again)
        assert steps == H
        np.testing.assert_array_equal(chunk[:2], given)
        state = other.unwrapped.get_state()
        for k, action in enumerate(chunk[:5]):
            if k >= 2:
                np.testing.assert_array_equal(action, expert.act())
            other.step(action)
        other.unwrapped.set_state(state)
        for e in (env, other):
            e.step(alone[0])


@pytest.mark.parametrize("lost_at", [0, 1, 4, 9])
def test_states_count_until_the_expert_can_do_nothing_any_more(lost_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vla_stack.data.branching.LONGEST", 60)
    (env, make_expert), (twin, _) = (make("pick") for _ in range(2))
    branches = Branches(twin, make_expert, H)
    env.reset(seed=5)
    branches.begin(5)
    expert, states, task = make_expert(env), [], env.unwrapped
    for k in range(9):
        if k == lost_at:
            objects.lay(task, task.target, np.array([1.5, 0.0]), 0.02)  # metres: out of reach
        states.append(task.get_state())
        env.step(expert.act())
    assert branches.mended(states) == lost_at
    assert branches.mended([]) == 0
    branches.begin(5)
    chunk, _ = branches.chunk(env)  # nothing of it is kept
    np.testing.assert_array_equal(chunk[0], expert.act())


@pytest.mark.parametrize("mode", ["ee_abs", "ee_delta"])
def test_without_noise_the_series_is_the_chunk_and_then_it_holds(mode: str) -> None:
    env, twin = (gym.make(sim.TASKS["pick"].id, cameras=(), control_mode=mode) for _ in range(2))
    make_expert = sim.make_expert
    branches = Branches(twin, make_expert, H)
    env.reset(seed=2)
    branches.begin(2)
    expert, chunks, actions = make_expert(env), [], []
    for _ in itertools.count():
        chunks.append(branches.chunk(env))
        actions.append(expert.act())
        if env.step(actions[-1])[2]:
            break
    for k, (chunk, steps) in enumerate(chunks):
        acted = min(H, len(actions) - k)  # a branch ends with success, as the episode does
        assert steps == (H if mode == "ee_abs" else acted)  # a target that is repeated holds; a move goes on
        np.testing.assert_array_equal(chunk[:acted], actions[k : k + acted])
        assert (chunk[acted:] == chunk[acted - 1]).all()


@pytest.mark.parametrize("name", ["push-v3", "door-open-v3", "pick-place-v3"])
def test_metaworlds_state_replays_exactly_in_another_instance(name: str) -> None:
    env, copy = (external.make(f"metaworld/{name}", **METAWORLD).unwrapped for _ in range(2))
    env.reset(seed=3)
    copy.reset(seed=9)  # another scene: the state says which one it is of
    expert = external.make_expert(env)
    for _ in range(12):
        env.step(expert.act())
    copy.set_state(env.get_state())
    assert (copy.get_state() == env.get_state()).all()
    rng, other = np.random.default_rng(0), external.make_expert(copy)
    for _ in range(6):
        assert (expert.act() == other.act()).all()
        action = rng.uniform(env.action_space.low, env.action_space.high).astype(np.float32)
        one, two = env.step(action), copy.step(action)
        np.testing.assert_array_equal(one[0]["agent_pos"], two[0]["agent_pos"])
        assert one[1:] == two[1:] and (env.get_state() == copy.get_state()).all()


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("branched") / "pick"
    collected_here(CONFIG, root, 3)
    return root


def collected_here(config: CollectConfig, root: Path, episodes: int) -> None:
    collect(config, root, episodes, workers=0)


def test_a_batch_is_the_chunk_label(collected: Path) -> None:
    data = open_dataset(collected)
    frames, size = np.arange(data.num_frames), data.columns["action"].shape[1]
    chunks, steps = data.columns[CHUNK].reshape(-1, H, size), data.columns[CHUNK_STEPS]
    np.testing.assert_array_equal(chunks[:, 0], data.columns["action"])
    assert steps.min() >= 1 and steps.max() == H
    for horizon in (H, 4):
        batch = ChunkLoader(data, horizon, 4).gather(frames)
        pad = np.arange(horizon) >= steps[:, None]
        np.testing.assert_array_equal(batch["action_is_pad"], pad)
        np.testing.assert_array_equal(batch["action"][~pad], chunks[:, :horizon][~pad])
    series = np.minimum(frames + 1, data.frame_end - 1)
    assert (batch["action"][:, 1] != data.columns["action"][series]).any()  # the next label answers the noise


def test_statistics_are_of_the_chunks_that_are_trained_on(collected: Path) -> None:
    batch = ChunkLoader(collected, 4, 4).gather(np.arange(open_dataset(collected).num_frames))
    relative = np.array([True, True, True, True, False])
    moved = batch["action"] - (batch["observation.state"][:, :5] * relative)[:, None]
    valid = ~batch["action_is_pad"]
    stats = load_stats(collected, 4) | load_stats(collected, 4, relative)
    for key, values in {"action": batch["action"][valid], "action.relative": moved[valid]}.items():
        np.testing.assert_allclose(stats[key]["mean"], values.mean(0, np.float64), rtol=1e-6, atol=1e-7)
        np.testing.assert_array_equal(stats[key]["max"], values.max(0))


def test_a_longer_horizon_needs_longer_branches_or_the_series(collected: Path) -> None:
    with pytest.raises(UserError, match="hold 6 actions, the policy's chunks 8 -- collect with --branch 8, or train"):
        ChunkLoader(collected, 8, 4)
    (source,) = open_sources(DataRecipe(root=(str(collected),), branched=False), config=None)  # type: ignore[arg-type]
    loader = ChunkLoader(source.dataset, 8, 4)
    batch, actions = loader.gather(np.array([0])), source.dataset.columns["action"]
    np.testing.assert_array_equal(batch["action"][0], actions[:8])


def test_which_frames_are_trainable_decides_where_chunks_start(collected: Path) -> None:
    data = open_dataset(collected)
    trainable = np.arange(data.num_frames) % 3 == 0
    loader = ChunkLoader(data, 4, 4, trainable=trainable)
    assert loader.epoch_size == trainable.sum()
    steps = np.minimum(data.columns[CHUNK_STEPS][[0, 3, 6]], 4)  # whole, whatever the next frames are
    assert ((~loader.gather(np.array([0, 3, 6]))["action_is_pad"]).sum(1) == steps).all()


def test_lerobot_reads_it_and_takes_no_label_for_an_action(collected: Path) -> None:
    dataset = LeRobotDataset("local/x", root=collected)
    data = open_dataset(collected)
    np.testing.assert_array_equal(dataset[3][CHUNK].numpy(), data.columns[CHUNK][3])
    assert int(dataset[3][CHUNK_STEPS]) == data.columns[CHUNK_STEPS][3]
    assert set(dataset_to_policy_features(dataset.meta.features)) == {"observation.state", "action"}
    assert main(["data", "check", str(collected)]) == 0


def test_datasets_with_and_without_chunk_labels_become_one(collected: Path, tmp_path: Path) -> None:
    collected_here(CollectConfig("pick", seed=1, privileged=True), tmp_path / "clean", 2)
    clean, branched = open_dataset(tmp_path / "clean"), open_dataset(collected)
    assert CHUNK not in clean.columns  # without noise the series is the expert's own
    for i, order in enumerate(([clean, branched], [branched, clean])):
        merge([d.root for d in order], tmp_path / str(i))
        whole = ChunkLoader(tmp_path / str(i), 4, 4).gather(np.arange(clean.num_frames + branched.num_frames))
        parts = [ChunkLoader(d, 4, 4).gather(np.arange(d.num_frames)) for d in order]
        for key in ("action", "action_is_pad"):
            np.testing.assert_array_equal(whole[key], np.concatenate([part[key] for part in parts]))
        assert main(["data", "check", str(tmp_path / str(i))]) == 0


def test_an_environment_whose_state_cannot_be_saved_gets_single_labels(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    config = CollectConfig("aloha/transfer_cube", noise=0.2, keep_failures=True, options={"control_hz": 10})
    config = CollectConfig(**{**vars(config), "options": {**config.options, "cameras": (), "max_episode_steps": 3}})
    collected_here(config, tmp_path / "aloha", 1)
    assert "its state cannot be saved" in capsys.readouterr().out
    assert CHUNK not in open_dataset(tmp_path / "aloha").columns

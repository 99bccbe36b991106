"""Imagined rows: exactly the simulator with it behind them; streams, chunks and guards with a model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from world_toys import ROBOT, SIZE, TASKS, record

from vla_stack.envs import EnvStep
from vla_stack.world_model import sight
from vla_stack.world_model.clips import clip_batch, encode_all, open_recording
from vla_stack.world_model.dynamics import DynamicsConfig, Remembered
from vla_stack.world_model.heads import HeadsConfig
from vla_stack.world_model.imagined_env import ImaginedEnv
from vla_stack.world_model.imagined_rows import ImaginedRows
from vla_stack.world_model.model import Limits, WorldConfig, WorldModel
from vla_stack.world_model.oracle import Oracle
from vla_stack.world_model.poses import PoseScale
from vla_stack.world_model.selection import choose, look_ahead
from vla_stack.world_model.vae import Vae, VaeConfig
from vla_stack.world_model.world_backend import RecordedStarts, Start, WorldBackend

OPTIONS: dict[str, Any] = {"image_size": 16, "cameras": ("front", "wrist")}


@pytest.mark.slow
def test_with_the_simulator_behind_it_it_is_the_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures, states, rewards and ends, through a success and a time limit."""
    import sim
    from sim.tasks.pick import Pick

    monkeypatch.setattr(Pick, "config", dataclasses.replace(Pick.config, max_episode_steps=20))
    monkeypatch.setattr(gym.spec("sim/pick-v0"), "max_episode_steps", 20)
    real = [gym.make("sim/pick-v0", **OPTIONS) for _ in range(2)]
    plain, rows = ImaginedEnv(Oracle("sim/pick-v0", 1, **OPTIONS)), ImaginedRows(Oracle("sim/pick-v0", 2, **OPTIONS), 2)
    assert plain.action_space == real[0].action_space
    assert plain.observation_space == real[0].observation_space
    ours = rows.reset([0, 1], [5, 6])
    for one, env, seed in zip(ours, real, (5, 6), strict=True):
        same(one.observation, env.reset(seed=seed)[0])
    expert = sim.make_expert(real[0])
    left, ends = [0, 1], set()
    for k in range(20):
        actions = np.stack([expert.act() if row == 0 else real[1].action_space.low for row in left])
        for row, action, one in zip(list(left), actions, rows.step(left, actions), strict=True):
            observation, reward, terminated, truncated, info = real[row].step(action)
            same(one.observation, observation)
            assert (one.reward, one.terminated, one.truncated) == (reward, terminated, truncated)
            assert one.info["is_success"] == info["is_success"]
            if terminated or truncated:
                ends.add((row, terminated, k))
                left.remove(row)
    assert {(row, won) for row, won, _ in ends} == {(0, True), (1, False)} and (1, False, 19) in ends
    rows.close()
    for env in real:
        env.close()


def same(one: dict[str, Any], two: dict[str, Any]) -> None:
    np.testing.assert_array_equal(one["agent_pos"], two["agent_pos"])
    for camera in one["pixels"]:
        np.testing.assert_array_equal(one["pixels"][camera], two["pixels"][camera])


class ToyStarts:
    def start(self, seed: int, options: dict[str, Any]) -> Start:
        rng = np.random.default_rng(seed)
        state = np.concatenate([rng.uniform(ROBOT.action_low, ROBOT.action_high), np.zeros(7)]).astype(np.float32)
        pictures = {c: rng.integers(0, 255, (SIZE, SIZE, 3), dtype=np.uint8) for c in ("front", "wrist")}
        return Start(pictures, state, TASKS[seed % 2])

    def close(self) -> None: ...


@pytest.fixture(scope="module")
def model() -> WorldModel:
    torch.manual_seed(0)
    config = WorldConfig(
        "sim/pick-v0",
        TASKS,
        PoseScale((0.2, -0.3, 0.0), (0.7, 0.3, 0.3)),
        VaeConfig(channels=3, stem=2, widths=(8, 8)),
        DynamicsConfig(history=2, future=3, width=8, blocks=1, heads=2, patch=2, members=2),
        HeadsConfig(width=8, judges=1),
        calibration=sight.simulated(ROBOT),
        limits=Limits(success=2.0),
    )
    model = WorldModel(config, ROBOT).eval()
    for p in model.dynamics.parameters():
        torch.nn.init.normal_(p, std=0.2)
    return model


def carried_out(rows: ImaginedRows, chunk: np.ndarray) -> list[EnvStep]:
    """Commands [n, 5] in row 0, all of them known from the first one on."""
    return [rows.step([0], command[None], [chunk[k + 1 :]])[0] for k, command in enumerate(chunk)]


def actions(n: int, steps: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.uniform(ROBOT.action_low, ROBOT.action_high, (steps, n, 5)).astype(np.float32)


def test_a_rollout_does_not_know_its_neighbours(model: WorldModel) -> None:
    def film(n: int, row: int) -> list[np.ndarray]:
        rows = ImaginedRows(WorldBackend(model, ToyStarts(), n, 100), n)
        seeds = [11 + i for i in range(n)]
        seeds[row] = 7
        rows.reset(range(n), seeds)
        moves = actions(1, 7)
        others = actions(n, 7, seed=3)
        others[:, row] = moves[:, 0]
        return [rows.step(range(n), a)[row].observation["pixels"]["wrist"].astype(int) for a in others]

    alone = film(1, 0)
    for n, row in ((3, 0), (3, 2)):
        for one, two in zip(alone, film(n, row), strict=True):
            assert np.abs(one - two).max() <= 1  # products of other batch sizes round differently


def test_chunks_join_and_only_the_first_frame_is_encoded(model: WorldModel, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []
    encode = Vae.encode
    monkeypatch.setattr(Vae, "encode", lambda self, p: encoded.append(len(p)) or encode(self, p))
    backend = WorldBackend(model, ToyStarts(), 1, 100)
    rows = ImaginedRows(backend, 1)
    rows.reset([0], [0])
    pictures: list[bytes] = []
    for n in range(3):
        start = backend._rollouts[0].memory.current.pose
        chunk = actions(1, 3, seed=n)[:, 0]
        pictures += [step.observation["pixels"]["front"].tobytes() for step in carried_out(rows, chunk)]
        conditioning = model.heads.adapter(start[None], torch.zeros(1, 5), torch.from_numpy(chunk)[None])
        torch.testing.assert_close(backend._rollouts[0].memory.current.pose, conditioning[0, -1])
        assert backend._rollouts[0].memory.chunks == n + 1
    assert encoded == [1] and len(pictures) == 9 == len(set(pictures))


def test_a_rollout_is_told_what_training_clips_tell(
    model: WorldModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Along a recorded episode, chunk after chunk: history, anchor, poses and times of all frames, what was seen."""
    recording = open_recording(record(tmp_path / "data", frames=14))
    latents, h, k = encode_all(model.vae, recording, torch.device("cpu")), model.horizon, model.config.dynamics.history
    first = int(recording.start[20])  # frames 14 to 27
    heard: list[tuple[np.ndarray, np.ndarray]] = []
    given: list[tuple[Remembered, torch.Tensor]] = []

    def lead(pose: torch.Tensor, before: torch.Tensor, commands: torch.Tensor) -> torch.Tensor:
        now = first + len(heard) * h
        heard.append((pose[0].numpy(), before[0].numpy()))
        return torch.from_numpy(recording.poses[None, now + 1 : now + 1 + h])

    def imagine(remembered: Remembered, tokens: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        now = first + len(given) * h
        given.append((remembered, tokens))
        return latents[None, now : now + 1 + h], torch.zeros(1)

    monkeypatch.setattr(model.heads.adapter, "forward", lead)
    monkeypatch.setattr(model.dynamics, "imagine", imagine)
    rows = ImaginedRows(WorldBackend(model, RecordedStarts(recording), 1, 100), 1)
    rows.reset([0], [None], {"start_index": first})
    for now in range(first, first + 4 * h, h):
        carried_out(rows, recording.commands[now : now + h])
        clip = clip_batch(recording, latents, np.array([now]), k, h, known=np.array([h]))
        remembered, tokens = given[-1]
        torch.testing.assert_close(remembered.history, torch.from_numpy(clip["latents"][:, :k]))
        torch.testing.assert_close(remembered.anchor, torch.from_numpy(clip["latents"][:, k]))
        told = model.tokens(torch.from_numpy(clip["poses"]), torch.from_numpy(clip["time"]))
        torch.testing.assert_close(tokens, told)
        sources = model.vae.pictures(torch.from_numpy(clip["latents"][:, [0, k]]))  # nobody has others in a rollout
        sight = model.look(sources, torch.from_numpy(clip["poses"]))
        assert remembered.sight is not None and sight is not None
        torch.testing.assert_close(vars(remembered.sight), vars(sight))
        pose, before = heard[-1]
        np.testing.assert_array_equal(pose, recording.poses[now])
        np.testing.assert_array_equal(before, recording.before(np.array([now]))[0])


def test_one_rollout_begins_anew_without_a_trace_in_the_others(model: WorldModel) -> None:
    moves = actions(2, 9)
    films = []
    for restart in (False, True):
        rows = ImaginedRows(WorldBackend(model, ToyStarts(), 2, 100), 2)
        rows.reset([0, 1], [5, 6])
        film = []
        for k, a in enumerate(moves):
            if restart and k == 4:
                rows.reset([1], [None])
                assert [rows.row(i).steps for i in (0, 1)] == [4, 0]
            film.append([step.observation["pixels"]["wrist"] for step in rows.step([0, 1], a)])
        films.append(np.array(film))
    np.testing.assert_array_equal(films[0][:, 0], films[1][:, 0])
    assert not np.array_equal(films[0][4:, 1], films[1][4:, 1])


def test_commands_that_are_known_ahead_are_imagined_once(model: WorldModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk ends where it would end step by step; what comes otherwise than announced is imagined again."""
    asked: list[int] = []
    chunk = WorldModel.chunk

    def counted(self, memories, poses, noise):
        asked.append(poses.shape[1])
        return chunk(self, memories, poses, noise)

    monkeypatch.setattr(WorldModel, "chunk", counted)
    moves, other = actions(1, 6)[:, 0], actions(1, 6, seed=1)[:, 0]

    def film(ahead: dict[int, np.ndarray]) -> tuple[list[dict[str, Any]], list[int]]:
        rows = ImaginedRows(WorldBackend(model, ToyStarts(), 1, 100), 1)
        rows.reset([0], [0])
        asked.clear()
        nothing = np.zeros((0, 5), np.float32)
        shown = [rows.step([0], move[None], [ahead.get(k, nothing)])[0] for k, move in enumerate(moves)]
        return [step.observation for step in shown], list(asked)

    blind, times = film({})
    assert times == [1, 2, 3, 1, 2, 3]
    known, times = film({k: moves[k + 1 :] for k in range(6)})
    assert times == [3, 3]  # more than a chunk is known of
    for k in (2, 5):
        same(blind[k], known[k])
    deceived, times = film({0: other[1:3], 3: moves[4:5]})
    assert times == [3, 2, 3, 2, 3]  # another second command than was announced; then the last one was not
    for k in (2, 5):
        same(blind[k], deceived[k])


def test_a_guard_ends_an_episode_and_takes_its_success(model: WorldModel) -> None:
    config = model.config
    rows = ImaginedRows(WorldBackend(model, ToyStarts(), 1, 100), 1)

    def ends(moves: np.ndarray) -> list[tuple[bool, bool, bool, tuple[str, ...]]]:
        rows.reset([0], [0])
        steps = carried_out(rows, moves)
        return [(s.terminated, s.truncated, s.info["is_success"], s.info["guards"]) for s in steps]

    try:
        model.config = dataclasses.replace(config, limits=Limits(chunks=1, success=0.0))
        assert ends(actions(1, 1)[0]) == [(True, False, True, ())]  # any frame counts as success here
        model.config = dataclasses.replace(config, limits=Limits(disagreement=-1.0, success=0.0))
        assert ends(actions(1, 1)[0]) == [(False, True, False, ("disagreement",))]  # a success has to pass it
        model.config = dataclasses.replace(config, limits=Limits(disagreement=-1.0, success=1.0))
        assert [end[:2] for end in ends(actions(1, 3)[:, 0])] == [(False, False), (False, False), (False, True)]
    finally:
        model.config = config  # where nothing succeeds, a guard waits for its chunk
    with pytest.raises(ValueError, match="finite"):
        rows.step([0], np.full((1, 5), np.nan, np.float32))


def test_of_several_chunks_the_promising_and_well_known_one_is_chosen(model: WorldModel) -> None:
    start = ToyStarts().start(0, {})
    pictures = np.stack([start.pictures[c] for c in model.cameras])
    memory = model.begin(pictures[None], start.state[None, :5])[0]
    candidates = torch.from_numpy(actions(3, 4).transpose(1, 0, 2).copy())  # longer than a chunk
    before = memory.current.pose
    best, hopes = choose(model, memory, before, candidates, task=0, seed=1, caution=0.0)
    assert best == int(hopes.argmax()) and (hopes >= 0).all() and (hopes <= 1).all()
    same = choose(model, memory, before, candidates, task=0, seed=1)[1]
    assert torch.equal(same, hopes)  # without a limit nobody knows what disagreement is large
    spread = look_ahead(model, memory, before, candidates, 1)[1]
    config = model.config
    model.config = dataclasses.replace(config, limits=Limits(disagreement=float(spread.median())))
    try:
        safest, cautious = choose(model, memory, before, candidates, task=0, seed=1, caution=2.0)
    finally:
        model.config = config
    torch.testing.assert_close(cautious, hopes - 2.0 * spread / spread.median())
    assert safest == int(cautious.argmax()) and memory.chunks == 0
    model.config = dataclasses.replace(config, limits=Limits(disagreement=0.0))  # of one member
    try:
        assert torch.equal(choose(model, memory, before, candidates, task=0, seed=1)[1], hopes)
    finally:
        model.config = config

"""The imagined environment: exactly the simulator with it behind it; streams, chunks and guards with a model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from world_toys import ROBOT, SIZE, TASKS, record

from vla_stack.world_model import sight
from vla_stack.world_model.clips import clip_batch, encode_all, open_recording
from vla_stack.world_model.dreams import Dreams, RecordedStarts, Start
from vla_stack.world_model.dynamics import DynamicsConfig, Remembered
from vla_stack.world_model.heads import HeadsConfig
from vla_stack.world_model.imagined_env import ImaginedVectorEnv
from vla_stack.world_model.model import Limits, WorldConfig, WorldModel
from vla_stack.world_model.oracle import Oracle
from vla_stack.world_model.poses import PoseScale
from vla_stack.world_model.selection import choose, look_ahead
from vla_stack.world_model.vae import Vae, VaeConfig

OPTIONS: dict[str, Any] = {"image_size": 16, "cameras": ("front", "wrist")}


@pytest.mark.slow
def test_with_the_simulator_behind_it_it_is_the_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures, states, rewards, ends and restarts, through a success and a time limit."""
    import sim
    from sim.tasks.pick import Pick

    monkeypatch.setattr(Pick, "config", dataclasses.replace(Pick.config, max_episode_steps=20))
    monkeypatch.setattr(gym.spec("sim/pick-v0"), "max_episode_steps", 20)
    real = SyncVectorEnv([lambda: gym.make("sim/pick-v0", **OPTIONS)] * 2)
    oracle = Oracle("sim/pick-v0", 2, **OPTIONS)
    imagined = ImaginedVectorEnv(oracle, 2)
    assert imagined.metadata["autoreset_mode"] == real.metadata["autoreset_mode"]
    assert imagined.single_action_space == real.single_action_space
    assert imagined.single_observation_space == real.single_observation_space
    (ours, _), (theirs, _) = imagined.reset(seed=5), real.reset(seed=5)
    expert = sim.make_expert(real.envs[0])
    ends = set()
    for k in range(45):
        same(ours, theirs)
        action = np.tile(real.single_action_space.low, (2, 1))
        action[0] = expert.act() if k < 40 else action[0]
        ours, reward, terminated, truncated, info = imagined.step(action)
        theirs, reward2, terminated2, truncated2, info2 = real.step(action)
        assert reward.tolist() == reward2.tolist() and info["is_success"].tolist() == info2["is_success"].tolist()
        assert (terminated.tolist(), truncated.tolist()) == (terminated2.tolist(), truncated2.tolist())
        ends |= {"won"} if terminated.any() else set()
        ends |= {"time"} if truncated.any() else set()
    assert ends == {"won", "time"}
    imagined.close()
    real.close()


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
        calibration=sight.simulated(("front", "wrist")),
        limits=Limits(success=2.0),
    )
    model = WorldModel(config, ROBOT).eval()
    for p in model.dynamics.parameters():
        torch.nn.init.normal_(p, std=0.2)
    return model


def actions(n: int, steps: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.uniform(ROBOT.action_low, ROBOT.action_high, (steps, n, 5)).astype(np.float32)


def test_a_rollout_does_not_know_its_neighbours(model: WorldModel) -> None:
    def film(n: int, row: int, order: bool = False) -> list[np.ndarray]:
        env = ImaginedVectorEnv(Dreams(model, ToyStarts(), n, 100), n)
        seeds: list[int | None] = [11 + i for i in range(n)]
        seeds[row] = 7
        env.reset(seed=seeds)
        moves = actions(1, 7)
        others = actions(n, 7, seed=3)
        others[:, row] = moves[:, 0]
        return [env.step(a)[0]["pixels"]["wrist"][row].astype(int) for a in others]

    alone = film(1, 0)
    for n, row in ((3, 0), (3, 2)):
        for one, two in zip(alone, film(n, row), strict=True):
            assert np.abs(one - two).max() <= 1  # products of other batch sizes round differently


def test_chunks_join_and_only_the_first_frame_is_encoded(model: WorldModel, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []
    encode = Vae.encode
    monkeypatch.setattr(Vae, "encode", lambda self, p: encoded.append(len(p)) or encode(self, p))
    dreams = Dreams(model, ToyStarts(), 1, 100)
    env = ImaginedVectorEnv(dreams, 1)
    env.reset(seed=0)
    pictures: list[np.ndarray] = []
    for n in range(3):
        start = dreams._dreams[0].memory.current.pose
        chunk = actions(1, 3, seed=n).transpose(1, 0, 2)
        info = env.step(chunk)[4]
        pictures += list(info["frames"][0]["front"])
        told = model.heads.adapter(start[None], torch.zeros(1, 5), torch.from_numpy(chunk))
        torch.testing.assert_close(dreams._dreams[0].memory.current.pose, told[0, -1])
        assert dreams._dreams[0].memory.chunks == n + 1
    assert encoded == [1] and len(pictures) == 9 == len({p.tobytes() for p in pictures})


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
    env = ImaginedVectorEnv(Dreams(model, RecordedStarts(recording), 1, 100), 1)
    env.reset(options={"start_index": first})
    for now in range(first, first + 4 * h, h):
        env.step(recording.commands[None, now : now + h])
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
        env = ImaginedVectorEnv(Dreams(model, ToyStarts(), 2, 100), 2, AutoresetMode.DISABLED)
        env.reset(seed=[5, 6])
        film = []
        for k, a in enumerate(moves):
            if restart and k == 4:
                obs, info = env.reset(options={"reset_mask": np.array([False, True])})
                assert info["steps"].tolist() == [4, 0]
            film.append(env.step(a)[0]["pixels"]["wrist"])
        films.append(np.stack(film))
    np.testing.assert_array_equal(films[0][:, 0], films[1][:, 0])
    assert not np.array_equal(films[0][4:, 1], films[1][4:, 1])


def test_single_steps_end_a_chunk_where_a_chunk_would(model: WorldModel) -> None:
    moves = actions(1, 6)
    single, whole = (ImaginedVectorEnv(Dreams(model, ToyStarts(), 1, 100), 1) for _ in range(2))
    for env in (single, whole):
        env.reset(seed=0)
    for k, action in enumerate(moves):
        obs = single.step(action)[0]
        if k % 3 == 2:
            same(obs, whole.step(moves[k - 2 : k + 1].transpose(1, 0, 2))[0])


def test_a_guard_ends_an_episode_and_takes_its_success(model: WorldModel) -> None:
    config = model.config
    try:
        model.config = dataclasses.replace(config, limits=Limits(chunks=1, success=0.0))
        env = ImaginedVectorEnv(Dreams(model, ToyStarts(), 1, 100), 1)
        env.reset(seed=0)
        assert env.step(actions(1, 1)[0])[2].all()  # any frame counts as success here
        model.config = dataclasses.replace(config, limits=Limits(disagreement=-1.0, success=0.0))
        for moves in (actions(1, 3).transpose(1, 0, 2), actions(1, 1)[0]):  # at a chunk's end, and within one
            env.reset(seed=0)
            _, _, terminated, truncated, info = env.step(moves)
            assert truncated.all() and not terminated.any() and not info["is_success"].any()
            assert info["tripped"].all() and info["guards"] == [("disagreement",)]
        model.config = dataclasses.replace(config, limits=Limits(disagreement=-1.0, success=1.0))
        env.reset(seed=0)
        ended = [bool(env.step(a)[3].all()) for a in actions(1, 3)]
        assert ended == [False, False, True]  # where nothing succeeds, a guard waits for its chunk
    finally:
        model.config = config
    with pytest.raises(ValueError, match="finite"):
        env.step(np.full((1, 5), np.nan, np.float32))


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

"""Paraphrases; episodes under varied conditions; critics on imagined chunks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from world_toys import ROBOT, SIZE, TASKS, record

import sim
from vla_stack.data.dataset import open_dataset
from vla_stack.errors import UserError
from vla_stack.evaluation.constraints.propose import Endpoint
from vla_stack.methods import imagined_critics as offline
from vla_stack.methods.ravl import RavlRecipe
from vla_stack.methods.sac import SacRecipe
from vla_stack.rollout.agents import PolicyAgent
from vla_stack.rollout.engine import run
from vla_stack.rollout.plan import Plan, Start
from vla_stack.rollout.records import EpisodeRecord
from vla_stack.runtime.executor import ExecutorConfig
from vla_stack.schema import Chunks, Observation, PolicySpec
from vla_stack.world_model import instructions, rehearsal
from vla_stack.world_model.clips import encode_all, open_recording
from vla_stack.world_model.dynamics import DynamicsConfig
from vla_stack.world_model.heads import HeadsConfig
from vla_stack.world_model.imagined_rows import ImaginedFrame, ImaginedRows
from vla_stack.world_model.model import Limits, WorldConfig, WorldModel
from vla_stack.world_model.poses import PoseScale
from vla_stack.world_model.selection import choose
from vla_stack.world_model.vae import VaeConfig

# Tasks with a few fixed sentences; those among many things bring a grammar of their own.
FEW = ("pick", "place", "push", "stack", "insert", "drawer", "obstacle", "conveyor", "so101_pick")


def test_every_task_has_other_words_that_name_the_same_things() -> None:
    for name in FEW:
        for task in sim.TASKS[name].instructions:
            found = instructions.paraphrases(task)
            named = {w for w in task.split() if w in {"red", "green", "blue", "yellow", "cube", "zone", "drawer"}}
            assert task not in found and len(set(found)) == len(found) >= 2, task
            assert all(named <= set(text.split()) for text in found), task
    assert instructions.paraphrases("dance") == ("dance",)
    assert rehearsal.in_other_words("dance", 3) == "dance"
    assert rehearsal.in_other_words("dance", 3, {"dance": ["twirl", "hop"]}) == "hop"


def test_a_language_model_may_not_forget_what_it_is_about(monkeypatch: pytest.MonkeyPatch) -> None:
    replies = iter(
        ('```json\n{"instructions": ["Grab the  red cube", "get it", 3]}\n```', '{"instructions": ["no"]}', "?")
    )
    monkeypatch.setattr(instructions, "ask", lambda *_: next(replies))
    endpoint = Endpoint("http://127.0.0.1:1/v1", "m")
    assert instructions.ask_paraphrases(endpoint, TASKS[0], ("red", "cube")) == ("Grab the red cube",)
    with pytest.raises(UserError, match="names red"):
        instructions.ask_paraphrases(endpoint, TASKS[0], ("red",))
    with pytest.raises(UserError, match="gives no instructions"):
        instructions.ask_paraphrases(endpoint, TASKS[0], ("red",))


class Counting:
    """A backend whose frame k shows k; of seed s it is done at frame 6 + s."""

    robot, max_steps, stages = ROBOT, 9, ("done",)

    def __init__(self) -> None:
        self.at: dict[int, int] = {}
        self.seeds: dict[int, int] = {}
        self.known: list[int] = []  # commands that were known ahead, step by step

    def begin(self, row, seed, options):
        self.at[row], self.seeds[row] = 0, seed
        return self._frame(row), TASKS[0]

    def advance(self, rows, actions, ahead):
        self.known += [len(a) for a in ahead]
        for row in rows:
            self.at[row] += 1
        return [self._frame(row) for row in rows]

    def _frame(self, row):
        k = self.at[row]
        pictures = {c: np.full((SIZE, SIZE, 3), k, np.uint8) for c in ("front", "wrist")}
        done = k >= 6 + self.seeds[row]
        return ImaginedFrame(pictures, np.full(12, 0.01 * k, np.float32), float(done), done)

    def close(self) -> None: ...


class Steady:
    """A policy of chunks of three equal commands but for their number."""

    spec = PolicySpec(ROBOT, 3)

    def __init__(self) -> None:
        self.seen: list[Observation] = []

    def infer(self, observations, seeds, continuations=()):
        self.seen.extend(observations)
        chunk = np.full((3, 5), 0.3, np.float32) + 0.01 * np.arange(3, dtype=np.float32)[:, None]
        return Chunks(np.repeat(chunk[None], len(seeds), 0))


def test_an_episode_holds_every_frame_once_and_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worlds: list[Counting] = []

    def make(env_id, num_envs, policy, options):
        worlds.append(Counting())
        return ImaginedRows(worlds[-1], num_envs)

    monkeypatch.setattr("vla_stack.envs.make", make)
    policy, executor = Steady(), ExecutorConfig(mode="sync", execute=3)

    def rehearse(varied: rehearsal.Varied, seeds: Sequence[int], skip: int) -> list[EpisodeRecord]:
        recorders = {rehearsal.REHEARSED: partial(rehearsal.RehearsalRecorder, skip=skip)}
        plan = Plan("counting", {}, policy.spec, varied, recorders, executor)
        return sorted(run(policy, plan, [Start(s) for s in seeds], 4), key=lambda e: e.seed)

    episodes = rehearse(rehearsal.Varied(PolicyAgent, rehearsal.in_other_words), [0, 1, 2, 3], rehearsal.DRIVE_STEPS)
    films = [e.attached[rehearsal.REHEARSED] for e in episodes]
    assert [e.success for e in episodes] == [True, True, True, True]
    assert [len(film.actions) for film in films] == [2, 3, 4, 5]  # the arm was driven for the first four steps
    assert len(policy.seen) == 4 + 2  # two are done within the first chunk: nobody asks what they would do next
    assert worlds[0].at == {0: 6, 1: 7, 2: 8, 3: 9}  # and what is over is not imagined on
    drive, chunks = [3] * 4 + [2] * 4 + [1] * 4 + [0] * 4, [2] * 4 + [1] * 4 + [0] * 3 + [2] * 2 + [1]
    assert worlds[0].known == drive + chunks  # of each row that still runs, step by step
    for film in films:
        assert [o.images["front"][0, 0, 0] for o in film.observations] == [4 + k for k in range(len(film.actions))]
        assert film.last.images["front"][0, 0, 0] == 4 + len(film.actions)
    words = [rehearsal.in_other_words(TASKS[0], seed) for seed in (0, 1, 2, 3)]
    assert [o.task for o in policy.seen] == [*words, *words[2:]]
    np.testing.assert_allclose([a[0] for a in films[3].actions], [0.3, 0.31, 0.32, 0.3, 0.31])
    episodes[1] = dataclasses.replace(episodes[1], success=False)
    assert rehearsal.record(tmp_path / "kept", ROBOT, episodes, most=2) == 2
    kept = open_dataset(tmp_path / "kept")
    assert (kept.episode_to - kept.episode_from).tolist() == [2, 4]
    assert rehearsal.record(tmp_path / "again", ROBOT, episodes, 9, lambda task, seed: f"{seed}: {task}") == 3
    assert set(open_dataset(tmp_path / "again").tasks) == {f"{seed}: {TASKS[0]}" for seed in (0, 2, 3)}

    still = rehearse(rehearsal.Varied(PolicyAgent, drive=0.0), [0], 0)[0].attached[rehearsal.REHEARSED]
    assert len(still.actions) == 6 and policy.seen[-1].task == TASKS[0]


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory):
    return open_recording(record(tmp_path_factory.mktemp("rehearsal") / "data"))


@pytest.fixture
def model(recording) -> WorldModel:
    torch.manual_seed(0)
    dynamics = DynamicsConfig(history=2, future=2, width=8, blocks=1, heads=2, patch=2, members=2, steps=1)
    vae, heads = VaeConfig(stem=2, widths=(8,), channels=4), HeadsConfig(8, 2, 4, 6)
    scale = PoseScale.of(recording.poses)
    return WorldModel(WorldConfig("", recording.tasks, scale, vae, dynamics, heads), recording.robot).eval()


RAVL = RavlRecipe(
    SacRecipe(num_critics=3, subset=3, actor=(8,), critic=(8,), batch=16), horizon=2, real=0.25, gamma=0.5
)


def test_chunks_are_told_relative_to_where_they_begin(recording, model: WorldModel) -> None:
    reach = offline.Reach.of(recording, 2)
    pose = torch.tensor([[0.4, 0.0, 0.1, 0.5, 1.0]])
    unit = torch.rand(1, 10) * 2 - 1
    torch.testing.assert_close(reach.unit(pose, reach.commands(pose, unit)), unit)
    far = pose[:, None].repeat(1, 2, 1) + torch.tensor([100, 100, 100, 3, 100])  # farther no turn is
    assert (reach.unit(pose, far) == 1).all()
    critics = offline.Critics.new(model, recording, RAVL, 0)
    latents = encode_all(model.vae, recording, torch.device("cpu"))
    batch = offline.recorded(critics, recording, latents, 64, 0.5, np.random.default_rng(0))
    now = offline.whole_chunks(recording, 2)
    assert not recording.held_out[now].any() and not recording.success[now].any()
    assert (recording.end[now] - now > 2).all()
    won = batch.reward == 1
    assert won.any() and not won.all()
    assert (batch.discount[won] == 0).all() and (batch.discount[~won] == 0.5).all()


def test_imagined_chunks_end_at_success_and_are_cut_by_guards(recording, model: WorldModel) -> None:
    critics = offline.Critics.new(model, recording, RAVL, 0)
    starts = offline.whole_chunks(recording, 2)[: offline.ROWS]
    width = critics.agent.critic.weights[0].shape[1] - critics.agent.width

    def rolled(**limits: float):
        model.config = dataclasses.replace(model.config, limits=Limits(**limits))
        store = offline.ReplayBuffer(8, width, critics.agent.width, len(starts), 0.5)
        offline.imagine(critics, recording, starts, 2, 0, store)
        return store

    free = rolled(success=1.0)
    rows = free.rows(0)
    assert len(free) == 2 * len(starts)
    assert free.columns["truncated"][rows].tolist() == [False, True] and not free.columns["terminated"][rows].any()
    assert free.sample(8, 1, np.random.default_rng(0)).discount.eq(0.5).all()  # a cut is no end
    np.testing.assert_array_equal(free.columns["next_obs"][rows[0]], free.columns["obs"][rows[1]])
    won = rolled(success=0.0)
    assert len(won) == len(starts) and won.columns["terminated"][won.rows(0)].all()
    assert won.sample(8, 1, np.random.default_rng(0)).discount.eq(0).all()
    tripped = rolled(success=0.0, disagreement=-1.0)
    assert len(tripped) == len(starts) and tripped.columns["truncated"][tripped.rows(0)].all()
    assert not tripped.columns["reward"].any()


def test_critics_are_trained_and_choose(recording, model: WorldModel) -> None:
    latents = encode_all(model.vae, recording, torch.device("cpu"))
    critics, log = offline.train(model, recording, latents, RAVL, 2, seed=0)
    assert np.isfinite(list(log[0].values())).all() and {"td", "term", "entropy"} <= set(log[0])
    memory = model.begin(recording.stacked(np.array([0])), recording.poses[:1])[0]
    now = memory.current
    options = torch.from_numpy(recording.commands[:6].reshape(3, 2, 5).copy())
    values = critics.value(now, 0, options)
    best, scores = choose(model, memory, now.pose, options, 0, seed=0, caution=0.0, critics=critics)
    assert best == int(values.argmax())
    torch.testing.assert_close(scores, values)
    assert critics.propose(now, 1).shape == (1, 2, 5)

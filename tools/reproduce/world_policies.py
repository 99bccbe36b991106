"""Cells of ``world_model.py`` that roll policies out, imagined and simulated from the same starts."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray
from world_training import DEVICE, Settings, folders, trained

import sim
from vla_stack.envs import EnvStep, options_for
from vla_stack.policies.chunk_policy import ChunkPolicy, load_policy
from vla_stack.policies.directory import resolve_policy
from vla_stack.rollout import engine
from vla_stack.rollout.agents import PolicyAgent, expert_plan
from vla_stack.rollout.engine import run
from vla_stack.rollout.plan import Agent, Decision, Episode, Plan, Query, Reply, Start
from vla_stack.rollout.records import EpisodeRecord
from vla_stack.runtime.executor import ExecutorConfig
from vla_stack.schema import Chunks, Continuation, Observation, PolicySpec
from vla_stack.world_model.model import WorldModel
from vla_stack.world_model.poses import POSE
from vla_stack.world_model.rehearsal import DRIVE_STEPS, REHEARSED, RehearsalRecorder, Rehearsed, Varied
from vla_stack.world_model.success import SuccessDetector
from vla_stack.world_model.world_backend import max_steps_of

SEED = 40_000  # of the first start
EXECUTED = 4  # actions of a chunk, of every policy
EXECUTOR = ExecutorConfig(mode="sync", execute=EXECUTED)
BATCH = 10
Where = tuple[str, dict[str, Any]]  # an environment's id and its options


@dataclass(frozen=True)
class Candidate:
    """A policy of the ranking.

    Attributes:
        kind: ``learned`` (the shipped policy), ``scripted`` (the expert's actions in the simulator from the same start,
            carried out without looking) or ``random``.
        noise: Standard deviation on tool positions in metres (learned), or the expert's noise (scripted).
        wrong: Told another instruction.
    """

    kind: str
    noise: float = 0.0
    wrong: bool = False


CANDIDATES = {
    "random": Candidate("random"),
    "scripted": Candidate("scripted"),
    "scripted_noisy": Candidate("scripted", 0.6),
    "scripted_wild": Candidate("scripted", 1.5),
    "learned": Candidate("learned"),
    "learned_noisy": Candidate("learned", 0.008),
    "learned_wild": Candidate("learned", 0.02),
    "learned_wrong": Candidate("learned", 0.0, True),
}


def ranking(settings: Settings, out: Path, name: str, seed: int) -> dict[str, Any]:
    """Successes of one policy over paired starts: simulated, imagined, and as judges see the simulated ones."""
    model, folder = trained(out, "ranking", name, seed)[-1], folders(out, "ranking", name, seed)[-1]
    policy, agent = candidate(CANDIDATES[name], model.config.env, max_steps_of(model))
    seeds = range(SEED, SEED + settings.starts)
    real, ours = (
        episodes(policy, plan(where, agent, policy, driven=0), seeds) for where in (simulated(model), imagined(folder))
    )
    films: list[Rehearsed] = [e.attached[REHEARSED] for e in ours]
    return {
        "real": [e.success for e in real],
        "model": [e.success for e in ours],
        "judged": [judged(model, e) for e in real],
        "tripped": [bool(film.guards) for film in films],
        "guards": [list(film.guards) for film in films],
    }


def judged(model: WorldModel, episode: EpisodeRecord) -> bool:
    """Whether judges and guards see a success in an episode."""
    film: Rehearsed = episode.attached[REHEARSED]
    shown, commands = [o for o in (*film.observations, film.last) if o], [None, *film.actions]
    detector = SuccessDetector(model, episode.task)
    return any(
        [
            detector.see(o.images, o.state[:POSE], None if c is None else c[:POSE])[0]
            for o, c in zip(shown, commands, strict=True)
        ]
    )


def simulated(model: WorldModel) -> Where:
    """The simulator, showing what a world model shows."""
    size = model.robot.cameras[0].height
    return model.config.env, {"cameras": model.cameras, "image_size": size, "control_hz": model.robot.rate_hz}


def imagined(folder: Path, device: str = str(DEVICE)) -> Where:
    """The world model of a run, from the simulator's first frames."""
    return f"imagined:{folder}", {"device": device}


def plan(
    where: Where, agent: Callable[[Episode], Agent], policy: engine.ChunkPolicy | None, driven: int = DRIVE_STEPS
) -> Plan:
    """Filmed episodes, whose first ``driven`` steps no film has."""
    (env_id, options), recorders = where, {REHEARSED: partial(RehearsalRecorder, skip=driven)}
    if policy is None:
        return expert_plan(env_id, options, agent, recorders)
    spec = policy.spec
    return Plan(env_id, options_for(env_id, spec, options), spec, agent, recorders, EXECUTOR)


def episodes(policy: engine.ChunkPolicy | None, plan: Plan, seeds: Iterable[int]) -> list[EpisodeRecord]:
    """One episode a seed, in their order."""
    return sorted(run(policy, plan, [Start(s) for s in seeds], BATCH), key=lambda e: e.seed)


def candidate(c: Candidate, env_id: str, steps: int) -> tuple[engine.ChunkPolicy | None, Callable[[Episode], Agent]]:
    """What the engine asks, if anything, and who acts; a function of observation, seed and time alone."""
    if c.kind == "scripted":
        return None, lambda episode: OpenLoop(scripted(env_id, episode.start.seed, c.noise, steps))
    if c.kind == "random":
        return None, lambda episode: OpenLoop(wandering(episode.start.seed, steps))
    instructions = next(i.instructions for i in sim.TASKS.values() if i.id == env_id)

    def reword(task: str, seed: int) -> str:
        return next(t for t in instructions if t != task) if c.wrong else task

    return Noisy(shipped(), c.noise), Varied(PolicyAgent, reword, drive=0.0)


@cache
def shipped() -> ChunkPolicy:
    return load_policy(resolve_policy("shipped"))


@dataclass(frozen=True)
class Noisy:
    """A policy whose chunks are offset, each by a random place of that standard deviation in metres."""

    policy: ChunkPolicy
    noise: float

    @property
    def spec(self) -> PolicySpec:
        return self.policy.spec

    def infer(
        self,
        observations: Sequence[Observation],
        seeds: Sequence[int],
        continuations: Sequence[Continuation | None] = (),
    ) -> Chunks:
        return Chunks(noisy(self.policy.infer(observations, seeds).actions, self.noise, seeds))


class OpenLoop:
    """Carries out commands [T, A] without looking."""

    def __init__(self, commands: NDArray[np.float32]) -> None:
        self._commands = commands

    def act(self, k: int, observation: Observation, now: EnvStep) -> Generator[Query, Reply, Decision | None]:
        return Decision(self._commands[k], ahead=self._commands[k + 1 :])
        yield  # a generator, as agents that ask a policy are

    def result(self) -> None: ...


def wandering(seed: int, steps: int) -> NDArray[np.float32]:
    """Random goals, each held for as long as a chunk is executed: commands [T, A], T at least ``steps``."""
    rngs = [np.random.default_rng([seed, k]) for k in range(0, steps, EXECUTED)]
    goals = np.stack([r.uniform((0.3, -0.25, 0.02, -1, 0), (0.6, 0.25, 0.3, 1, 1)) for r in rngs])
    return np.repeat(goals, EXECUTED, 0).astype(np.float32)


def noisy(chunks: NDArray[np.float32], noise: float, seeds: Sequence[int]) -> NDArray[np.float32]:
    """Chunks [N, n, A] with one offset of the tool's position each, of that standard deviation in metres."""
    chunks = chunks.copy()
    for row, seed in enumerate(seeds):
        chunks[row, :, :3] += np.random.default_rng(seed).normal(0.0, noise, 3)
    return chunks


def scripted(env_id: str, seed: int, noise: float, steps: int) -> NDArray[np.float32]:
    """Actions [steps, A] of the expert in the simulator; the last one is held."""
    env = gym.make(env_id, cameras=())
    env.reset(seed=seed)
    expert = sim.make_expert(env, noise=noise, seed=seed)
    actions: list[NDArray[np.float32]] = []
    for _ in range(steps):
        actions.append(np.asarray(expert.perturb(expert.act()), np.float32))
        if env.step(actions[-1])[2]:
            break
    env.close()
    return np.stack([*actions, *[actions[-1]] * (steps - len(actions))])

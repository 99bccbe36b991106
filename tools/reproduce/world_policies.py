"""Cells of ``world_model.py`` that roll policies out, imagined and simulated from the same starts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from world_training import DEVICE

from vla_stack.envs import options_for
from vla_stack.policies.chunk_policy import ChunkPolicy, load_policy
from vla_stack.policies.directory import resolve_policy
from vla_stack.rollout import engine
from vla_stack.rollout.agents import expert_plan
from vla_stack.rollout.engine import run
from vla_stack.rollout.plan import Agent, Episode, Plan, Start
from vla_stack.rollout.records import EpisodeRecord
from vla_stack.runtime.executor import ExecutorConfig
from vla_stack.world_model.model import WorldModel
from vla_stack.world_model.poses import POSE
from vla_stack.world_model.rehearsal import DRIVE_STEPS, REHEARSED, RehearsalRecorder, Rehearsed
from vla_stack.world_model.success import SuccessDetector

SEED = 40_000  # of the first start
EXECUTED = 4  # actions of a chunk, of every policy
EXECUTOR = ExecutorConfig(mode="sync", execute=EXECUTED)
BATCH = 10
Where = tuple[str, dict[str, Any]]  # an environment's id and its options


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


@cache
def shipped() -> ChunkPolicy:
    return load_policy(resolve_policy("shipped"))


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

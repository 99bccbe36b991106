"""Cells of ``world_model.py`` that roll policies out, imagined and simulated from the same starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray
from world_training import Settings, trained

import sim
from vla_stack.policies.chunk_policy import ChunkPolicy, load_policy
from vla_stack.policies.shipped import resolve_policy
from vla_stack.schema import Observation
from vla_stack.world_model.dreams import Dreams, SimulatedStarts, max_steps_of
from vla_stack.world_model.imagined_env import ImaginedVectorEnv
from vla_stack.world_model.model import WorldModel
from vla_stack.world_model.oracle import Oracle
from vla_stack.world_model.rehearsal import Act, Episode, roll

SEED = 40_000  # of the first start
EXECUTED = 4  # actions of a chunk, of every policy
BATCH = 10


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
    model = trained(out, "ranking", name, seed)[-1]
    env_id, candidate, steps = model.config.env, CANDIDATES[name], max_steps_of(model)
    starts = list(range(SEED, SEED + settings.starts))
    result: dict[str, Any] = {"real": [], "model": [], "judged": [], "tripped": [], "guards": []}
    for i in range(0, len(starts), BATCH):
        seeds = starts[i : i + BATCH]
        act = actor(candidate, env_id, steps, seeds)
        for key, env in (("real", simulated_env(model, len(seeds))), ("model", imagined_env(model, len(seeds)))):
            episodes = roll(env, act, seeds)
            env.close()
            result[key] += [e.success for e in episodes]
            if key == "real":
                result["judged"] += [judged(model, e) for e in episodes]
            else:
                result["tripped"] += [bool(e.guards) for e in episodes]
                result["guards"] += [list(e.guards) for e in episodes]
    return result


@torch.no_grad()
def judged(model: WorldModel, episode: Episode) -> bool:
    """Whether the judges see a success in an episode."""
    film = [np.stack([o.images[c] for c in model.cameras]) for o in (*episode.observations, episode.last) if o]
    device = model.bank.device
    task = torch.tensor([model.config.tasks.index(episode.task)], device=device)
    success, _ = model.heads.success(torch.from_numpy(np.stack(film))[None].to(device), task)
    return bool((success > model.config.limits.success).any())


def simulated_env(model: WorldModel, rows: int) -> ImaginedVectorEnv:
    """The simulator behind the imagined environment's class."""
    size = model.robot.cameras[0].height
    oracle = Oracle(model.config.env, rows, cameras=model.cameras, image_size=size, control_hz=model.robot.rate_hz)
    return ImaginedVectorEnv(oracle, rows, AutoresetMode.DISABLED)


def imagined_env(model: WorldModel, rows: int) -> ImaginedVectorEnv:
    """The world model, from the simulator's first frames."""
    starts = SimulatedStarts(model.config.env, model.robot)
    return ImaginedVectorEnv(Dreams(model, starts, rows, max_steps_of(model)), rows, AutoresetMode.DISABLED)


def actor(candidate: Candidate, env_id: str, steps: int, seeds: Sequence[int]) -> Act:
    """How a policy acts, a function of observation, seed and time alone."""
    if candidate.kind == "scripted":
        plans = {s: scripted(env_id, s, candidate.noise, steps) for s in seeds}
        return lambda observations, seeds, k: np.stack([plans[int(s)][k : k + EXECUTED] for s in seeds])
    if candidate.kind == "random":
        return wander
    instructions = next(i.instructions for i in sim.TASKS.values() if i.id == env_id)
    policy = shipped()

    def act(observations: Sequence[Observation], seeds: NDArray[np.int64], k: int) -> NDArray[np.float32]:
        if candidate.wrong:
            others = [next(t for t in instructions if t != o.task) for o in observations]
            observations = [replace(o, task=t) for o, t in zip(observations, others, strict=True)]
        chunks = policy.infer(observations, [int(s) * 1000 + k for s in seeds]).actions[:, :EXECUTED]
        return noisy(chunks, candidate.noise, seeds, k)

    return act


@cache
def shipped() -> ChunkPolicy:
    return load_policy(resolve_policy("shipped"))


def wander(observations: Sequence[Observation], seeds: NDArray[np.int64], k: int) -> NDArray[np.float32]:
    """Random goals, each held for a chunk."""
    rngs = [np.random.default_rng([int(s), k]) for s in seeds]
    goals = np.stack([r.uniform((0.3, -0.25, 0.02, -1, 0), (0.6, 0.25, 0.3, 1, 1)) for r in rngs])
    return np.repeat(goals[:, None], EXECUTED, 1).astype(np.float32)


def noisy(chunks: NDArray[np.float32], noise: float, seeds: NDArray[np.int64], k: int) -> NDArray[np.float32]:
    """Chunks [N, n, A] with one offset of the tool's position each, of that standard deviation in metres."""
    chunks = chunks.copy()
    for row, seed in enumerate(seeds):
        chunks[row, :, :3] += np.random.default_rng([int(seed), k]).normal(0.0, noise, 3)
    return chunks


def scripted(env_id: str, seed: int, noise: float, steps: int) -> NDArray[np.float32]:
    """Actions [steps + EXECUTED, A] of the expert in the simulator; the last one is held."""
    env = gym.make(env_id, cameras=())
    env.reset(seed=seed)
    expert = sim.make_expert(env, noise=noise, seed=seed)
    actions: list[NDArray[np.float32]] = []
    for _ in range(steps):
        actions.append(expert.perturb(expert.act()))
        if env.step(actions[-1])[2]:
            break
    env.close()
    return np.stack([*actions, *[actions[-1]] * (steps + EXECUTED - len(actions))])

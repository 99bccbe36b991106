"""Cells of ``world_model.py`` that roll policies out, imagined and simulated from the same starts, and improve one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray
from world_cells import Settings, data, trained

import sim
from vla_stack.data import EpisodeRecorder
from vla_stack.data.collect import CollectConfig, collect
from vla_stack.evaluation.rollouts import evaluate
from vla_stack.policies.chunk_policy import load_policy
from vla_stack.policies.shipped import resolve_policy
from vla_stack.schema import Observation
from vla_stack.world_model.dreams import Dreams, SimulatedStarts, max_steps_of
from vla_stack.world_model.imagined_env import ImaginedVectorEnv
from vla_stack.world_model.model import load
from vla_stack.world_model.oracle import Oracle

SEED = 40_000  # of the first start
EXECUTED = 4  # actions of a chunk, of every policy
BATCH = 10
Act = Callable[[dict[str, Any], Sequence[str], NDArray[np.int64], int], NDArray[np.float32]]  # -> [N, EXECUTED, A]


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
    """Successes of one policy over paired starts: simulated, imagined, and judged by the world model's judges."""
    model = load(trained(settings, out, "full", seed, data(settings, out)))
    env_id, candidate = model.config.env, CANDIDATES[name]
    starts = np.arange(SEED, SEED + settings.starts)
    steps = max_steps_of(model)
    result: dict[str, Any] = {"real": [], "model": [], "tripped": [], "guards": []}
    for i in range(0, len(starts), BATCH):
        seeds = starts[i : i + BATCH]
        act = actor(candidate, env_id, steps, seeds)
        options = {"cameras": model.cameras, "image_size": model.robot.cameras[0].height}
        for key, backend in (
            ("real", Oracle(env_id, len(seeds), **options)),
            ("model", Dreams(model, SimulatedStarts(env_id, model.robot), len(seeds), steps)),
        ):
            env = ImaginedVectorEnv(backend, len(seeds))  # type: ignore[arg-type]
            won, guards = roll(env, act, seeds, steps)
            result[key] += won.tolist()
            if key == "model":
                result["tripped"] += [bool(g) for g in guards]
                result["guards"] += [list(g) for g in guards]
            env.close()
    return result


def roll(
    env: ImaginedVectorEnv, act: Act, seeds: NDArray[np.int64], steps: int, keep: list[Any] | None = None
) -> tuple[NDArray[np.bool_], list[tuple[str, ...]]]:
    """Successes [N] of one episode each, and the guards that fired.

    With ``keep``, actions go out one by one, and (obs, action [N, A], over [N], tasks) of each is appended.
    """
    obs, info = env.reset(seed=[int(s) for s in seeds])
    won, over = np.zeros(len(seeds), bool), np.zeros(len(seeds), bool)
    guards: list[tuple[str, ...]] = [()] * len(seeds)
    tasks = list(info["task"])
    for k in range(0, steps, EXECUTED):
        chunk = act(obs, tasks, seeds, k)
        for piece in [chunk] if keep is None else np.split(chunk, EXECUTED, axis=1):
            if keep is not None:
                keep.append((obs, piece[:, 0], over.copy(), tasks))
            obs, _, terminated, truncated, info = env.step(piece)
            won |= info["is_success"] & ~over
            guards = [g if o else new for g, new, o in zip(guards, info["guards"], over, strict=True)]
            over |= terminated | truncated
        if over.all():
            break
    return won, guards


def actor(candidate: Candidate, env_id: str, steps: int, seeds: NDArray[np.int64]) -> Act:
    """How a policy acts, a function of observation, seed and time alone."""
    if candidate.kind == "scripted":
        plans = {int(s): scripted(env_id, int(s), candidate.noise, steps) for s in seeds}
        return lambda obs, tasks, seeds, k: np.stack([plans[int(s)][k : k + EXECUTED] for s in seeds])
    policy = load_policy(resolve_policy("shipped")) if candidate.kind == "learned" else None
    instructions = next(i.instructions for i in sim.TASKS.values() if i.id == env_id)

    def act(obs: dict[str, Any], tasks: Sequence[str], seeds: NDArray[np.int64], k: int) -> NDArray[np.float32]:
        rngs = [np.random.default_rng([int(s), k]) for s in seeds]
        if policy is None:
            goals = np.stack([r.uniform((0.3, -0.25, 0.02, -1, 0), (0.6, 0.25, 0.3, 1, 1)) for r in rngs])
            return np.repeat(goals[:, None], EXECUTED, 1).astype(np.float32)
        told = [next(t for t in instructions if t != task) if candidate.wrong else task for task in tasks]
        observations = [
            Observation(obs["agent_pos"][i], {c: p[i] for c, p in obs["pixels"].items()}, told[i], k, 0)
            for i in range(len(seeds))
        ]
        chunks = policy.infer(observations, [int(s) * 1000 + k for s in seeds]).actions[:, :EXECUTED].copy()
        for row, r in enumerate(rngs):
            chunks[row, :, :3] += r.normal(0.0, candidate.noise, 3) if candidate.noise else 0.0
        return chunks

    return act


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


def improvement(settings: Settings, out: Path, arm: str, seed: int) -> dict[str, Any]:
    """Success of the shipped policy in the simulator as it is, after imagined episodes, or after as many real ones."""
    policy = resolve_policy("shipped")
    model = load(trained(settings, out, "full", seed, data(settings, out)))
    task, episodes = settings.task, max(2, settings.starts)
    extra: dict[str, Any] = {}
    if arm != "unchanged":
        root = out / f"improve-{arm}-{seed}"
        if arm == "imagined":
            extra["kept"] = imagine_data(model, root, episodes, seed)
        else:
            collect(CollectConfig(task, seed=500 + seed), root, episodes, workers=1, image_mode="image")
        if arm == "imagined" and not extra["kept"]:
            return {"successes": None, "why": "no imagined rollout succeeded without a guard firing", **extra}
        folder = out / "runs" / f"improve-{arm}-{seed}"
        steps = 4 if settings.starts < 10 else 300
        command = ["-m", "vla_stack.cli", "train", str(policy / "recipe.yaml"), f"policy.pretrained={policy}"]
        overrides = [
            f"data.root=[{root}]",
            f"output_dir={folder}",
            f"steps={steps}",
            "batch_size=16",
            "optimizer.lr=5e-5",
        ]
        if not (folder / "checkpoints" / "last").exists():
            subprocess.run([sys.executable, *command, *overrides, f"seed={seed}", "threads=1"], check=True)
        policy = folder / "checkpoints" / "last" / "pretrained_model"
    result = evaluate(load_policy(policy), f"sim/{task}-v0", episodes, seed=60_000, num_envs=8)
    return {"successes": [bool(e.success) for e in result.episodes], **extra}


def imagine_data(model: Any, root: Path, episodes: int, seed: int) -> int:
    """Imagined rollouts of the noisy policy that succeeded, as a dataset; how many."""
    steps, kept = max_steps_of(model), 0
    with EpisodeRecorder(root, model.robot, "image") as recorder:
        for i in range(0, 4 * episodes, BATCH):
            seeds = np.arange(80_000 + seed * 10_000 + i, 80_000 + seed * 10_000 + i + BATCH)
            act = actor(CANDIDATES["learned_noisy"], model.config.env, steps, seeds)
            env = ImaginedVectorEnv(Dreams(model, SimulatedStarts(model.config.env, model.robot), BATCH, steps), BATCH)
            film: list[Any] = []
            won, _ = roll(env, act, seeds, steps, film)
            env.close()
            for row in np.flatnonzero(won)[: episodes - kept]:
                kept += 1
                for k, (obs, action, over, tasks) in enumerate(film):
                    if over[row]:
                        break
                    pictures = {c: p[row] for c, p in obs["pixels"].items()}
                    o = Observation(obs["agent_pos"][row], pictures, tasks[row], k, k * 100_000_000)
                    recorder.add_frame(o, action[row])
                recorder.save_episode(True)
            if kept >= episodes:
                break
    return kept

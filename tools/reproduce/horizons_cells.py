"""Runs one cell of ``mixture_of_horizons.py``: trains its arm where that has not been done, and rolls it out."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from horizons_arms import (
    CLIP,
    EMA,
    EULER_STEPS,
    LR,
    NOISE,
    START_SEED,
    VALIDATION_SEED,
    VALIDATION_START,
    Arm,
    Cell,
    Settings,
    arms,
)

from vla_stack.data.dataset import open_dataset
from vla_stack.data.loader import ChunkLoader
from vla_stack.evaluation.evaluate import evaluate
from vla_stack.evaluation.metrics import boundary_discontinuity
from vla_stack.methods.imitation.recipe import Imitation
from vla_stack.methods.mixture_of_horizons.recipe import MixtureOfHorizons
from vla_stack.policies.chunk_policy import ChunkPolicy, load_policy
from vla_stack.rollout.collect import CollectConfig, collect
from vla_stack.rollout.records import EvalResult
from vla_stack.runtime.executor import ExecutorConfig
from vla_stack.schema import ACTION, OBS_STATE, Chunks, Observation, PolicySpec
from vla_stack.training.optimizer_recipe import OptimizerRecipe
from vla_stack.training.recipe import DataRecipe, PolicyRecipe, Recipe
from vla_stack.training.train import train


def demonstrations(settings: Settings, out: Path) -> list[Path]:
    """Folders of the demonstrations, one a task."""
    return [out / "demos" / task for task in settings.tasks]


def collect_demonstrations(settings: Settings, out: Path) -> None:
    """Record what is missing of them."""
    for task, root in zip(settings.tasks, demonstrations(settings, out), strict=True):
        collect(
            CollectConfig(task, noise=NOISE, branch=max(settings.horizons), privileged=not settings.images),
            root,
            settings.demos,
            workers=1,
        )


def recipe(settings: Settings, name: str, arm: Arm, seed: int, roots: Sequence[Path]) -> Recipe:
    """What every arm shares, and what this one changes."""
    base = {
        "chunk_size": arm.horizon,
        "n_action_steps": 1,
        "num_inference_steps": EULER_STEPS,
        "depth": 4,
        # Half as wide where the prefix is a dozen tokens of words and numbers.
        "width": settings.width if settings.images else max(16, settings.width // 2),
        "expert_width": settings.width,
        "heads": 4,
        "head_dim": settings.width // 4,
        "max_tokens": 12,
        "vocabulary": 320,
    }
    options = {"horizons": list(settings.horizons), "base": {"type": "vla", **base}, **arm.policy}
    return Recipe(
        name=name,
        policy=PolicyRecipe("moh", options=options) if arm.mixture else PolicyRecipe("vla", options=base),
        data=DataRecipe(root=tuple(map(str, roots)), episodes=tuple(range(settings.demos - settings.held_out))),
        method=(MixtureOfHorizons if arm.mixture else Imitation)(
            **{"draws": 1} | arm.method,
            optimizer=OptimizerRecipe(
                lr=LR, betas=(0.9, 0.99), warmup_steps=min(50, settings.steps - 1), final_lr_ratio=0.01,
                clip_norm=CLIP * arm.clip,
            ),
            steps=settings.steps,
            batch_size=settings.batch,
            ema=EMA,
            log_every=max(1, settings.steps // 10),
            save_every=100,
            keep=1,
        ),
        precision="auto",
        # Arm i differs from arm a in nothing else: what two runs of one setting differ by.
        seed=seed + 1000 * (arm.weights == "again"),
        threads=1,
    )  # fmt: skip


def trained(settings: Settings, arm: Arm, seed: int, out: Path) -> tuple[Path, dict[str, Any]]:
    """Policy directory of an arm's training, and what it cost and logged; trained, or continued, where missing."""
    run = out / "runs" / f"{arm.weights}-seed{seed}"
    done = run / "train.json"
    if not done.exists():
        plan = recipe(settings, run.name, arms(settings)[arm.weights], seed, demonstrations(settings, out))
        began = time.process_time()
        checkpoint = train(plan, plan.method.loss(), run, plan.method.fits)
        log = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        write_json(done, {"cpu_s": time.process_time() - began, "log": log, "policy": str(checkpoint.relative_to(run))})
    about = json.loads(done.read_text())
    return run / about["policy"] / "pretrained_model", about


class Inference:
    """A policy; optionally the mean of several samples.

    Args:
        policy: The policy.
        samples: How many.
        lengths: Draw how many actions to execute from these, by the query's seed.
    """

    def __init__(self, policy: ChunkPolicy, samples: int = 1, lengths: Sequence[int] = ()) -> None:
        self._policy, self._samples, self._lengths = policy, samples, lengths
        self.calls, self.cpu_s = 0, 0.0
        self.executed: list[int] = []

    @property
    def spec(self) -> PolicySpec:
        return self._policy.spec

    def infer(self, observations: Sequence[Observation], seeds: Sequence[int]) -> Chunks:
        began, n = time.process_time(), self._samples
        several = [o for o in observations for _ in range(n)]
        own = [int(np.random.SeedSequence((s, i)).generate_state(1)[0]) if i else s for s in seeds for i in range(n)]
        chunks = self._policy.infer(several, own)
        self.calls, self.cpu_s = self.calls + len(observations), self.cpu_s + time.process_time() - began
        actions, execute = chunks.actions, chunks.execute
        if self._lengths:
            execute = tuple(self._lengths[s % len(self._lengths)] for s in seeds)
        self.executed += execute or ()
        return Chunks(actions.reshape(len(observations), n, *actions.shape[1:]).mean(1), execute)


def load(arm: Arm, cell: Cell, directory: Path) -> ChunkPolicy:
    """The policy of a cell, set to infer as its arm does."""
    policy = load_policy(directory)
    if arm.fusion:
        policy.policy.config.fusion = arm.fusion
    if cell.ratio and not cell.shuffled:
        policy.policy.config.consensus_ratio = cell.ratio
        policy.policy.config.consensus_min_active = 1  # of four branches; the paper's five are of ten
    return policy


def run_cell(settings: Settings, cell: Cell, out: Path) -> dict[str, Any]:
    """Roll a cell out on all starts of all tasks."""
    validating = cell.seed == VALIDATION_SEED
    start, count = (VALIDATION_START, -(-settings.starts // 3)) if validating else (START_SEED, settings.starts)
    arm = arms(settings)[cell.arm]
    directory, training = trained(settings, arm, cell.seed, out)
    policy = load(arm, cell, directory)
    lengths = json.loads(replace(cell, shuffled=False).path(out).read_text())["executed"] if cell.shuffled else ()
    inference = Inference(policy, arm.samples, lengths)
    how = ExecutorConfig(mode="sync", execute=cell.execute or None)
    record: dict[str, Any] = asdict(cell)
    began = time.process_time()
    record["tasks"] = {}
    for task in settings.tasks:
        result = evaluate(inference, f"sim/{task}-v0", count, start, how, num_envs=settings.num_envs)
        record["tasks"][task] = outcome(result, policy.spec)
    record["executed"] = inference.executed
    record |= {"policy_calls": inference.calls, "policy_cpu_s": inference.cpu_s, "cpu_s": time.process_time() - began}
    if cell.execute == settings.execute:
        record["l1"] = held_out_error(settings, inference, out)
        record["train"] = {"cpu_s": training["cpu_s"], "log": training["log"]}
        record["parameters"] = sum(p.numel() for p in policy.policy.parameters())
    return record


def outcome(result: EvalResult, spec: PolicySpec) -> dict[str, Any]:
    """What is kept of a task's episodes, in the order of their starts."""
    return {
        "success": [int(e.success) for e in result.episodes],
        "steps": [e.steps for e in result.episodes],
        "stage": [e.stage for e in result.episodes],
        "chunks": [len(set(e.chunks.tolist()) - {-1}) for e in result.episodes],
        "boundary": boundary_discontinuity(result, spec.robot),
    }


def held_out_error(settings: Settings, inference: Inference, out: Path) -> list[float]:
    """Mean L1 distance to the expert by step of the chunk, over demonstrations that no arm was trained on.

    In units of each dimension's standard deviation around the measured state, the same for all arms.
    """
    errors, longest = [], settings.horizons[-1]
    for i, root in enumerate(demonstrations(settings, out)):
        dataset = open_dataset(root)
        frames = np.flatnonzero(dataset.columns["episode_index"] >= settings.demos - settings.held_out)
        frames = np.sort(np.random.default_rng(i).choice(frames, min(settings.frames, len(frames)), replace=False))
        batch = ChunkLoader(dataset, longest, len(frames)).gather(frames)
        seen = {name: batch[key] for name, key in dataset.cameras.items()}
        observations = [
            Observation(state, {name: pictures[j] for name, pictures in seen.items()}, task)
            for j, (state, task) in enumerate(zip(batch[OBS_STATE], batch["task"], strict=True))
        ]
        chunk = inference.infer(observations, list(range(len(frames)))).actions
        action, pad = batch[ACTION][:, : chunk.shape[1]], batch[f"{ACTION}_is_pad"][:, : chunk.shape[1]]
        relative = batch[ACTION] - batch[OBS_STATE][:, None, : action.shape[-1]]
        scale = relative[~batch[f"{ACTION}_is_pad"]].std(0)
        error = (np.abs(chunk - action) / scale).mean(-1)
        errors.append(np.where(pad, np.nan, error))
    return np.nanmean(np.concatenate(errors), axis=0).tolist()


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = path.with_suffix(f".tmp{os.getpid()}")
    tmp.write_text(json.dumps(content))
    tmp.replace(path)

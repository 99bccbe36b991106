"""Success against latency for every way of executing chunks, on a quasi-static and on a dynamic task.

    python tools/reproduce/async_execution.py [--smoke] [--out FOLDER] [--jobs N] [--report-only]

Three policies learn ``pick`` and ``conveyor`` from the same demonstrations in the same number of steps: a plain one,
and two that were given action prefixes in training, one with full attention among actions and one with the Λ-mask. They
see states, with poses of objects, so that the figures are about execution and not about seeing. Then all modes run on
the same starts under the virtual clock, at delays of 0 to 500 ms, once with gamma jitter, and with other numbers of
executed steps. Cells that are on the disk are not computed again; the report is of those that there are.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

import sim
from vla_stack.evaluation.evaluate import evaluate
from vla_stack.methods.imitation.recipe import Imitation
from vla_stack.policies.chunk_policy import load_policy
from vla_stack.rollout.collect import CollectConfig, collect
from vla_stack.rollout.latency import Latency
from vla_stack.runtime.executor import ExecutorConfig
from vla_stack.training.optimizer_recipe import OptimizerRecipe
from vla_stack.training.recipe import DataRecipe, PolicyRecipe, Recipe
from vla_stack.training.train import train

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from results import parser

TASKS = {"conveyor": "dynamic", "pick": "quasi-static"}
# At 20 Hz every one of the delays is another number of control steps: 0, 1, 2, 4, 6 and 10.
RATE_HZ, HORIZON, EXECUTE, MAX_DELAY = 20.0, 24, 10, 10
LATENCIES = tuple(Latency(ms / 1000) for ms in (0, 50, 100, 200, 300, 500))
CLAIMED, JITTERED = (Latency(0.2), Latency(0.3)), Latency(0.2, "gamma")
# Decision frequencies of 4, 2 and 1.1 Hz; with a delay of 300 ms no more than 18 can be had.
EXECUTES = (5, EXECUTE, 18)
POLICIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "prefix": {"max_delay": MAX_DELAY},
    "lambda": {"max_delay": MAX_DELAY, "prefix_attention": "lambda"},
}
MAIN = (("plain", "sync"), ("plain", "naive"), ("plain", "rtc"), ("prefix", "prefix"), ("prefix", "naive"))
LAMBDA = (("lambda", "prefix"), ("lambda", "naive"))
OTHERS = (("plain", "ensemble"), ("plain", "rtc_identity"), ("plain", "future_state"))
BID = (("plain", "bid"),)
NOISE, SEED, FIRST_START = 0.3, 0, 700_000


@dataclass(frozen=True)
class Size:
    """How much of everything; the defaults are the experiment that is reported."""

    demos: int = 500
    steps: int = 1200
    width: int = 64
    starts: int = 200
    num_envs: int = 100


SMOKE = Size(demos=3, steps=2, width=16, starts=2, num_envs=2)


@dataclass(frozen=True)
class Cell:
    """One setting of the sweep."""

    policy: str
    mode: str
    task: str
    latency: Latency
    execute: int = EXECUTE

    @property
    def key(self) -> str:
        return f"{self.policy}/{self.task}/{self.mode}/{self.latency}/{self.execute}"


def cells() -> list[Cell]:
    """Every cell once, those that the claims need first."""

    def grid(pairs: Any, latencies: Any, executes: Any = (EXECUTE,)) -> Iterator[Cell]:
        for latency, execute, task, (policy, mode) in product(latencies, executes, TASKS, pairs):
            yield Cell(policy, mode, task, latency, execute)

    rest = [latency for latency in LATENCIES if latency not in CLAIMED]
    order = (
        grid(MAIN, CLAIMED),
        grid(LAMBDA + OTHERS, CLAIMED),
        grid(MAIN, rest),
        grid(MAIN, CLAIMED, EXECUTES),
        grid(LAMBDA + OTHERS, rest),
        grid(MAIN + LAMBDA, [JITTERED]),
        grid(BID, LATENCIES),
        grid(OTHERS, CLAIMED, EXECUTES),
    )
    return list(dict.fromkeys(cell for group in order for cell in group))


def recipe(size: Size, name: str, roots: list[Path]) -> Recipe:
    """Training of one of the policies."""
    options = POLICIES[name] | {
        "chunk_size": HORIZON,
        "n_action_steps": EXECUTE,
        "num_inference_steps": 5,
        "noise_scale": 0.5,
        "depth": 4,
        "width": max(16, size.width // 2),
        "expert_width": size.width,
        "heads": 4,
        "head_dim": size.width // 4,
        "max_tokens": 12,
        "vocabulary": 320,
    }
    return Recipe(
        name=name,
        policy=PolicyRecipe("vla", options=options),
        data=DataRecipe(root=tuple(map(str, roots)), episodes=tuple(range(size.demos))),
        method=Imitation(
            draws=1,
            reweight=name == "lambda",
            optimizer=OptimizerRecipe(
                lr=2e-3, betas=(0.9, 0.99), warmup_steps=min(50, size.steps - 1), final_lr_ratio=0.02
            ),
            steps=size.steps,
            batch_size=64,
            ema=0.99,
            log_every=max(1, size.steps // 10),
            save_every=max(1, size.steps // 3),
            keep=1,
        ),
        precision="fp32",
        seed=SEED,
        threads=1,
    )


def env_options(task: str) -> dict[str, Any]:
    """The task at the experiment's rate, with as many seconds as it always has."""
    return {"control_hz": RATE_HZ, "max_episode_steps": round(sim.TASKS[task].max_episode_steps * RATE_HZ / 10.0)}


def demonstrations(size: Size, out: Path) -> list[Path]:
    """Datasets of both tasks; made where they are missing."""
    roots = {task: out / "demos" / task for task in TASKS}
    for task, root in roots.items():
        config = CollectConfig(task, noise=NOISE, branch=HORIZON, privileged=True, options=env_options(task))
        collect(config, root, size.demos, workers=1)
    return list(roots.values())


def run_of(size: Size, out: Path, name: str) -> tuple[Path, Path]:
    """Run directory of a policy's training, and its final checkpoint."""
    run = out / "runs" / name
    return run, run / "checkpoints" / f"{size.steps:06d}"


def learn(size: Size, out: Path, name: str, roots: list[Path]) -> None:
    """Train one of the policies, unless it is there."""
    torch.set_num_threads(1)
    run, last = run_of(size, out, name)
    if not last.exists():
        plan = recipe(size, name, roots)
        train(plan, plan.method.loss(), run)


def file_of(out: Path, cell: Cell) -> Path:
    return out / "cells" / (cell.key.replace("/", "-").replace(" ", "") + ".json")


def run_cell(size: Size, out: Path, cell: Cell) -> str:
    """Roll a policy out on all starts in one mode at one delay, unless that has been done."""
    torch.set_num_threads(1)
    file = file_of(out, cell)
    if not file.exists():
        policy = load_policy(run_of(size, out, cell.policy)[1] / "pretrained_model")
        executor, env_id = ExecutorConfig(mode=cell.mode, execute=cell.execute), f"sim/{cell.task}-v0"
        options = env_options(cell.task)
        result = evaluate(
            policy,
            env_id,
            size.starts,
            FIRST_START,
            executor,
            cell.latency,
            num_envs=size.num_envs,
            env_options=options,
        )
        seconds = result.seconds_to_success
        record = {
            "success": [int(e.success) for e in result.episodes],
            "seconds_to_success": None if np.isnan(seconds) else seconds,
            "idle_fraction": result.idle_fraction,
            "discontinuity": None if np.isnan(result.discontinuity) else result.discontinuity,
            "wall_s": result.wall_s,
        }
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".tmp")
        partial.write_text(json.dumps(record))
        os.replace(partial, file)
    return f"{cell.key:45} {sum(json.loads(file.read_text())['success'])}/{size.starts}"


def run_all(size: Size, out: Path, jobs: int) -> None:
    """Everything that is missing."""
    roots = demonstrations(size, out)
    if jobs == 1:
        for cell in cells():
            learn(size, out, cell.policy, roots)
            print(run_cell(size, out, cell), flush=True)
        return
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        for done in [pool.submit(learn, size, out, name, roots) for name in POLICIES]:
            done.result()
        for done in [pool.submit(run_cell, size, out, cell) for cell in cells()]:
            print(done.result(), flush=True)


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--smoke", action="store_true", help="the size of a test; writes no results")
    p.add_argument("--out", type=Path, default=Path("outputs/reproduce/async_execution"))
    p.add_argument("--jobs", type=int, default=1, help="processes (default: %(default)s)")
    p.add_argument("--report-only", action="store_true", help="of the cells that there are")
    args = p.parse_args()
    size = SMOKE if args.smoke else Size()
    if not args.report_only:
        run_all(size, args.out, args.jobs)
    if not args.smoke:
        import async_report

        async_report.write_all(args.out, vars(size))


if __name__ == "__main__":
    main()

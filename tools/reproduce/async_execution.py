"""Success against latency for every way of executing chunks, on a quasi-static and on a dynamic task.

    python tools/reproduce/async_execution.py [--smoke] [--out FOLDER]

Two policies learn ``pick`` and ``conveyor`` from the same demonstrations in the same number of steps: a plain one, and
one that was given action prefixes in training (``max_delay``). They see states, with poses of objects, so that the
figures are about execution and not about seeing. Then all modes run on the same starts under the virtual clock, at
delays of 0 to 500 ms, and once with gamma jitter. Cells that are on the disk are not computed again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vla_stack.data.collect import CollectConfig, collect
from vla_stack.evaluation.latency import Latency
from vla_stack.evaluation.metrics import paired_difference
from vla_stack.evaluation.rollouts import evaluate
from vla_stack.policies.chunk_policy import load_policy
from vla_stack.runtime.executor import MODES, ExecutorConfig
from vla_stack.statistics import wilson
from vla_stack.training.recipe import DataRecipe, OptimizerRecipe, PolicyRecipe, Recipe
from vla_stack.training.train import train

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from results import RESULTS, Check, write

TASKS = {"pick": "quasi-static", "conveyor": "dynamic"}
LATENCIES = (Latency(0.0), Latency(0.1), Latency(0.2), Latency(0.3), Latency(0.5), Latency(0.2, "gamma"))
HORIZON, EXECUTE, MAX_DELAY, NOISE, SEED, FIRST_START = 16, 5, 5, 0.3, 0, 700_000


@dataclass(frozen=True)
class Size:
    """How much of everything; the defaults are the experiment that is reported."""

    demos: int = 700
    steps: int = 1500
    width: int = 96
    starts: int = 200
    num_envs: int = 50


SMOKE = Size(demos=3, steps=2, width=16, starts=2, num_envs=2)


def recipe(size: Size, name: str, max_delay: int, roots: list[Path]) -> Recipe:
    """Training of one of the two policies."""
    options = {
        "chunk_size": HORIZON,
        "n_action_steps": EXECUTE,
        "num_inference_steps": 5,
        "noise_scale": 0.5,
        "max_delay": max_delay,
        "depth": 4,
        "width": max(16, size.width // 2),
        "expert_width": size.width,
        "heads": 4,
        "head_dim": size.width // 4,
        "max_words": 8,
        "vocabulary": 256,
    }
    return Recipe(
        name=name,
        method_options={"draws": 2, "shift": 0},
        policy=PolicyRecipe("vla", options=options),
        data=DataRecipe(root=tuple(map(str, roots))),
        optimizer=OptimizerRecipe(
            lr=2e-3, betas=(0.9, 0.99), warmup_steps=min(50, size.steps - 1), final_lr_ratio=0.02
        ),
        steps=size.steps,
        batch_size=64,
        ema=0.99,
        precision="auto",
        seed=SEED,
        threads=1,
        log_every=max(1, size.steps // 10),
        save_every=max(1, size.steps // 3),
        keep=1,
    )


def policies(size: Size, out: Path) -> dict[str, Path]:
    """Policy directories of the plain policy and of the one trained on prefixes; made where they are missing."""
    roots = [out / "demos" / task for task in TASKS]
    for task, root in zip(TASKS, roots, strict=True):
        collect(CollectConfig(task, noise=NOISE, privileged=True), root, size.demos, workers=1)
    directories = {}
    for name, max_delay in (("plain", 0), ("prefix", MAX_DELAY)):
        run = out / "runs" / name
        last = run / "checkpoints" / f"{size.steps:06d}"
        if not last.exists():
            train(recipe(size, name, max_delay, roots), run, resume=(run / "recipe.yaml").exists())
        directories[name] = last / "pretrained_model"
    return directories


def cells() -> list[tuple[str, str, str, Latency]]:
    """(policy, task, mode, latency) of every cell; the policy trained on prefixes also runs as if it were plain."""
    plain = [("plain", mode) for mode in MODES if mode != "prefix"]
    pairs = [*plain, ("prefix", "prefix"), ("prefix", "naive"), ("prefix", "sync")]
    return [(policy, task, mode, latency) for latency in LATENCIES for policy, mode in pairs for task in TASKS]


def run_cell(size: Size, directory: Path, task: str, mode: str, latency: Latency) -> dict[str, Any]:
    """Roll a policy out on all starts in one mode at one delay."""
    policy, executor = load_policy(directory), ExecutorConfig(mode=mode, execute=EXECUTE)
    result = evaluate(policy, f"sim/{task}-v0", size.starts, FIRST_START, executor, latency, num_envs=size.num_envs)
    seconds = result.seconds_to_success
    return {
        "success": [int(e.success) for e in result.episodes],
        "seconds_to_success": None if np.isnan(seconds) else seconds,
        "idle_fraction": result.idle_fraction,
        "discontinuity": None if np.isnan(result.discontinuity) else result.discontinuity,
        "stopped": int(sum(not e.success and e.steps < 10 for e in result.episodes)),
        "wall_s": result.wall_s,
    }


def run_all(size: Size, out: Path) -> dict[str, dict[str, Any]]:
    """Figures of all cells, by ``policy/task/mode/latency``."""
    directories, figures = policies(size, out), {}
    for policy, task, mode, latency in cells():
        key = f"{policy}/{task}/{mode}/{latency}"
        file = out / "cells" / (key.replace("/", "-").replace(" ", "") + ".json")
        if not file.exists():
            record = run_cell(size, directories[policy], task, mode, latency)
            file.parent.mkdir(parents=True, exist_ok=True)
            partial = file.with_suffix(".tmp")
            partial.write_text(json.dumps(record))
            os.replace(partial, file)
            print(f"{key:45} {sum(record['success'])}/{size.starts}  {record['wall_s']:.0f} s", flush=True)
        figures[key] = json.loads(file.read_text())
    return figures


def report(figures: dict[str, dict[str, Any]], size: Size, name: str) -> None:
    """Checks and plot of the cells that there are."""
    checks = []
    for delay in ("200 ms", "300 ms"):
        sync = figures[f"plain/conveyor/sync/{delay}"]
        rates = {
            (p, m): figures[f"{p}/conveyor/{m}/{delay}"]
            for p, m in [("plain", m) for m in MODES if m not in ("sync", "prefix")] + [("prefix", "prefix")]
        }
        best = max(rates, key=lambda k: sum(rates[k]["success"]))
        gain = paired_difference(sync["success"], rates[best]["success"])
        checks.append(
            Check(f"conveyor, {delay}: best asynchronous mode ({best[1]}) - sync, success", gain.mean,
                  0.0, interval=(gain.low, gain.high), why="" if gain.low > 0 else "the interval contains 0")
        )  # fmt: skip
        for policy, mode in (("plain", "rtc"), ("prefix", "prefix")):
            for task in TASKS:
                ours = figures[f"{policy}/{task}/{mode}/{delay}"]["discontinuity"]
                naive = figures[f"{policy}/{task}/naive/{delay}"]["discontinuity"]
                checks.append(Check(f"{task}, {delay}: seams of {mode} / seams of naive", ours / naive, 1.0, "<="))
    rows = {k: {**{n: v for n, v in f.items() if n != "success"}, "success": sum(f["success"]), "of": size.starts,
                "wilson_95": wilson(sum(f["success"]), size.starts)} for k, f in figures.items()}  # fmt: skip
    write(name, checks, {"size": vars(size), "cells": rows}, seeds=[SEED])


def plot(figures: dict[str, dict[str, Any]], size: Size, path: Path) -> None:
    """Success and seams against delay, one line a mode."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    constant = [x for x in LATENCIES if x.jitter == "none"]
    figure, axes = plt.subplots(2, len(TASKS), figsize=(11, 7.5), sharex=True)
    for column, (task, kind) in enumerate(TASKS.items()):
        for policy, mode in [("plain", m) for m in MODES if m != "prefix"] + [("prefix", "prefix")]:
            series = [figures[f"{policy}/{task}/{mode}/{x}"] for x in constant]
            ms = [x.mean_s * 1000 for x in constant]
            rates = [sum(f["success"]) / size.starts for f in series]
            axes[0, column].plot(ms, rates, marker="o", label=mode)
            axes[1, column].plot(ms, [f["discontinuity"] or np.nan for f in series], marker="o", label=mode)
        axes[0, column].set(title=f"{task} ({kind})", ylim=(0, 1.02), ylabel="success")
        axes[1, column].set(xlabel="delay of the policy, ms", ylabel="roughness at seams / within chunks", yscale="log")
    axes[0, 0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="the size of a test; writes no results")
    parser.add_argument("--out", type=Path, default=Path("outputs/reproduce/async_execution"))
    args = parser.parse_args()
    size = SMOKE if args.smoke else Size()
    torch.set_num_threads(1)
    figures = run_all(size, args.out)
    if not args.smoke:
        report(figures, size, "async_execution")
        plot(figures, size, RESULTS / "async_execution.png")


if __name__ == "__main__":
    main()

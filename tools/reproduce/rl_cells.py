"""Runs cells of off-policy experiments: an arm of a task and seed each, from the offline training they share."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from claims import Cell

from vla_stack.methods.off_policy.loop import OffPolicyLoop
from vla_stack.registry import METHODS
from vla_stack.training.recipe import Recipe, make
from vla_stack.training.recipe_tree import read_tree

SHARED = ("offline.safetensors", "pretraining.jsonl", "metrics.jsonl", "checkpoints")


@dataclass(frozen=True)
class Arm:
    """What an arm changes.

    Attributes:
        about: In words.
        overrides: Keys of the recipe.
        pretrained: Begins with the offline training that its task and seed share.
        loop: What runs it.
    """

    about: str
    overrides: tuple[str, ...] = ()
    pretrained: bool = True
    loop: type[OffPolicyLoop] = OffPolicyLoop


def recipe(config: Path, overrides: Sequence[str], seed: int) -> Recipe:
    """The recipe of a configuration; stored episodes differ by seed.

    An arm of another method leaves out the configuration's keys that its method does not have.
    """
    own = {key.name for key in fields(METHODS.get(read_tree(config)["method"]["name"]))}
    tree = read_tree(config, [*overrides, f"seed={seed}", f"method.offline.seed={seed}"])
    known = {key.name for key in fields(METHODS.get(tree["method"]["name"]))}
    tree["method"] = {key: value for key, value in tree["method"].items() if key in known or key not in own}
    return make(tree, str(config))


def run_cell(cell: Cell, arm: Arm, config: Path, overrides: Sequence[str], out: Path) -> dict[str, Any]:
    """Run a cell from where an earlier run stopped; returns its curve."""
    base = out / "runs" / f"{cell.task}-base-seed{cell.seed}"
    run = out / "runs" / cell.name
    began = time.process_time()
    OffPolicyLoop(recipe(config, [*overrides, "method.steps=0"], cell.seed), base).run()
    if not run.exists():
        partial = run.with_name(f"{run.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        for name in SHARED if arm.pretrained else SHARED[:1]:
            whole = (base / name).is_dir()
            (shutil.copytree(base / name, partial / name, symlinks=True) if whole
             else shutil.copy(base / name, partial / name))  # fmt: skip
        partial.rename(run)
    plan = recipe(config, [*overrides, *arm.overrides], cell.seed)
    loop = arm.loop(plan, run)
    loop.run()
    log = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for record in log:  # fragments of actors pass the step of an evaluation by some: arms are compared on its grid
        record["step"] -= record["step"] % plan.eval.every
    keys = (
        "step",
        "eval/success",
        "train/success",
        "q",
        "td",
        "term",
        "entropy",
        "temperature",
        "base",
        "lag",
        "lost_actors",
    )
    return {
        "task": cell.task,
        "arm": cell.arm,
        "seed": cell.seed,
        "stored_success": loop.offline_success,
        "episodes": plan.eval.episodes,
        "warmup": plan.method.warmup,
        "curve": [{k: r[k] for k in keys if k in r} for r in log],
        "cpu_s": time.process_time() - began,
    }

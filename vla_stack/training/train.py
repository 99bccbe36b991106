"""The training loop's door: a recipe becomes a run directory that ends in a LeRobot policy directory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from vla_stack import __version__
from vla_stack.errors import UserError
from vla_stack.locks import LOCK, writing
from vla_stack.training.recipe import Recipe

if TYPE_CHECKING:
    from vla_stack.training.placement import Accelerated, Local

RUN_FILES = ("recipe.yaml", "revision.txt")  # what a run is: see write_run_files


def sleep_while_waiting() -> None:
    """Have threads wait for each other asleep rather than spinning, if torch is not loaded yet: a little slower on an
    idle machine, and many times faster on one that does something else as well (measured: 9x to 30x on two busy cores).
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def train(recipe: Recipe, run_dir: Path, resume: bool = False) -> Path:
    """Run a recipe in ``run_dir``; with ``resume``, from its last intact checkpoint (from the start if it has none).

    Returns:
        The final checkpoint.

    Raises:
        UserError: Anything that the person can mend; see :mod:`vla_stack.training.recipe`, ``build`` and ``loop``.
    """
    begin = time.monotonic()
    sleep_while_waiting()
    # Imported here: `vla train --help` and a recipe's errors should not wait for torch and lerobot.
    from vla_stack.training.placement import place

    placement = place(recipe.launcher, recipe.device)
    with writing(run_dir) if placement.is_main else nullcontext():
        return _train(recipe, run_dir, resume, placement, begin)


def _train(recipe: Recipe, run_dir: Path, resume: bool, placement: Local | Accelerated, begin: float) -> Path:
    from vla_stack.training import checkpoint as ckpt
    from vla_stack.training.build import build
    from vla_stack.training.loop import Trainer
    from vla_stack.training.memory import capacity, estimate
    from vla_stack.training.placement import native_precision, use_threads

    if recipe.precision == "auto":  # the run's recipe names what it was, so that it resumes in it on any machine
        recipe = replace(recipe, precision=native_precision(placement.device))
    threads = use_threads(recipe.threads)
    if placement.is_main and not resume and (run_dir / "recipe.yaml").exists():
        raise UserError(f"{run_dir} already holds a run", f"vla train --resume {run_dir}, or another output_dir=")
    checkpoint = ckpt.latest(run_dir / "checkpoints") if resume else None
    parts = build(recipe, placement.device, placement.rank, checkpoint)
    trainer = Trainer(recipe, parts, placement, run_dir, checkpoint)
    with withdrawn_on_failure(run_dir) if placement.is_main and not resume else nullcontext():
        if placement.is_main:
            write_run_files(recipe.to_yaml(), run_dir)
            millions = sum(p.numel() for p in trainer.parameters) / 1e6
            print(
                f"{recipe.method} on {recipe.policy.type}, {millions:.2f} M trainable parameters, {placement.device} "
                f"in {recipe.precision} with {threads} threads x {placement.world}, step {trainer.step} of "
                f"{recipe.steps} (ready in {time.monotonic() - begin:.1f} s) -> {run_dir}",
                flush=True,
            )
            print(estimate(trainer.policy, recipe).report(capacity(placement.device)), flush=True)
        outcome = trainer.run(evaluator(recipe, str(placement.device)) if recipe.eval.every else None)
    if placement.is_main:
        if outcome.stopped:
            print(f"stopped at step {outcome.step}; continue with: vla train --resume {run_dir}")
        else:
            print(f"done: {outcome.checkpoint / ckpt.PRETRAINED}")
    return outcome.checkpoint


def evaluator(recipe: Recipe, device: str) -> Callable[[Path, int], dict[str, float]]:
    """Rollouts of a checkpoint on the training's device, as the loop calls them."""
    from vla_stack.evaluation.evaluate import evaluate
    from vla_stack.policies.chunk_policy import load_policy

    def run(policy_dir: Path, step: int) -> dict[str, float]:
        names = [e["name"] for e in json.loads((policy_dir / "config.json").read_text()).get("embodiments") or ()]
        metrics = {}
        for name, env in pairings(recipe.eval.envs, names):
            policy = load_policy(policy_dir, device, name)
            result = evaluate(policy, env, recipe.eval.episodes, recipe.eval.seed)
            metrics[f"{env}/success" if name is None else f"{name}@{env}/success"] = float(result.outcomes.mean())
        return metrics

    return run


def pairings(envs: Sequence[str], embodiments: Sequence[str]) -> list[tuple[str | None, str]]:
    """Which robot is evaluated where: the one that an entry names before its ``@``, or all; None for a policy of one.

    Raises:
        UserError: An entry names a robot that the policy does not have.
    """
    pairs: list[tuple[str | None, str]] = []
    for entry in envs:
        name, at, env = entry.rpartition("@")
        if at and name not in embodiments:
            known = ", ".join(embodiments) or "one robot alone"
            raise UserError(f"'eval.envs' names '{entry}', the policy has no embodiment '{name}'", f"it has {known}")
        pairs += [(name, env)] if at else [(e, env) for e in embodiments or [None]]  # type: ignore[list-item]
    return pairs


@contextmanager
def withdrawn_on_failure(run_dir: Path) -> Iterator[None]:
    """Take a new run back that fails before it has computed anything, so that the mended command can be given again.

    What was in the directory before stays, as does a run that left anything but its own description: that one can be
    resumed.
    """
    fresh = not run_dir.exists() or all(path.name == LOCK for path in run_dir.iterdir())
    try:
        yield
    except Exception:
        files = [p.relative_to(run_dir) for p in run_dir.rglob("*") if p.is_file() and p.stat().st_size]
        files = [p for p in files if str(p) != LOCK]
        if all(str(p) in RUN_FILES or p.parts[0] == "tb" for p in files):  # TensorBoard writes a heading at once
            for name in RUN_FILES:
                (run_dir / name).unlink(missing_ok=True)
            if fresh:
                shutil.rmtree(run_dir, ignore_errors=True)
        raise


def write_run_files(recipe: str, run_dir: Path) -> None:
    """Write the resolved recipe, as YAML, and one line a start: when, which code, which command."""
    run_dir.mkdir(parents=True, exist_ok=True)
    tmp = run_dir / "recipe.yaml.tmp"
    tmp.write_text(recipe)
    tmp.replace(run_dir / "recipe.yaml")
    with (run_dir / "revision.txt").open("a") as f:
        f.write(f"{datetime.now().astimezone().isoformat(timespec='seconds')} {revision()} {' '.join(sys.argv)}\n")


def revision() -> str:
    """Version of the package and, in a clone, its git revision; ``+`` marks uncommitted changes."""
    here = Path(__file__).parent

    def git(*command: str) -> str:
        return subprocess.run(["git", *command], cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        dirty = "+" if git("status", "--porcelain", "-uno") else ""
        return f"{__version__} {git('rev-parse', '--short=12', 'HEAD')}{dirty}"
    except (OSError, subprocess.CalledProcessError):
        return __version__

"""A policy trained on datasets by a method's loss, in a run directory that ends in a LeRobot policy directory."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from vla_stack.errors import UserError
from vla_stack.training.recipe import Recipe
from vla_stack.training.run_dir import write_recipe
from vla_stack.training.side_by_side import side_by_side

if TYPE_CHECKING:  # torch, LeRobot and its datasets take seconds, which several processes take at the same time
    from vla_stack.training.build import Fits, Loss


def train(recipe: Recipe, loss: Loss, run_dir: Path, fits: Fits | None = None) -> Path:
    """Train in ``run_dir``, from its last intact checkpoint where it has one.

    Args:
        recipe: The run; its method is a :class:`~vla_stack.training.recipe.Training`.
        loss: What is minimised.
        run_dir: Run directory.
        fits: Refuses a policy that the loss is not for.

    Returns:
        The final checkpoint.

    Raises:
        UserError: Anything that the person can mend; see ``build`` and ``loop``.
        KeyboardInterrupt: A signal stopped it, after a checkpoint.
    """
    if recipe.device != "cpu":
        from vla_stack.policies.reading import find_device

        if find_device(recipe.device).type != "cpu":
            return _train(recipe, recipe, loss, run_dir, fits)
    with side_by_side(recipe, run_dir) as own:
        return _train(recipe, own, loss, run_dir, fits)


def _train(whole: Recipe, recipe: Recipe, loss: Loss, run_dir: Path, fits: Fits | None) -> Path:
    """``whole`` is what the run is, ``recipe`` this process's part of it."""
    from vla_stack.training import checkpoint as ckpt
    from vla_stack.training.build import build
    from vla_stack.training.loop import Trainer
    from vla_stack.training.memory import capacity, estimate
    from vla_stack.training.placement import native_precision, place, use_threads
    from vla_stack.training.validation import check_held_out, note_held_out

    begin = time.monotonic()
    placement = place(recipe.device, recipe.sharded)
    if recipe.precision == "auto":  # the run's recipe names what it was, so that it resumes in it on any machine
        precision = native_precision(placement.device)
        whole, recipe = replace(whole, precision=precision), replace(recipe, precision=precision)
    threads = use_threads(recipe.threads)
    checkpoint = ckpt.latest(run_dir / "checkpoints")
    parts = build(recipe, loss, placement.device, placement.rank, checkpoint, fits)
    if checkpoint is not None:
        check_held_out(run_dir, parts.held_out)
    trainer = Trainer(recipe, parts, placement, run_dir, checkpoint)
    if placement.is_main:
        write_recipe(whole, run_dir)
        note_held_out(run_dir, parts.held_out)
        millions = sum(p.numel() for p in trainer.parameters) / 1e6
        print(
            f"{recipe.method.name} on {recipe.policy.type}, {millions:.2f} M trainable parameters, {placement.device} "
            f"in {recipe.precision} with {threads} threads x {placement.world}, step {trainer.step} of "
            f"{recipe.method.steps} (ready in {time.monotonic() - begin:.1f} s) -> {run_dir}",
            flush=True,
        )
        print(estimate(trainer.policy, recipe, placement.shards).report(capacity(placement.device)), flush=True)
    evaluate = evaluator(recipe, str(placement.device)) if recipe.eval.every else None
    outcome = trainer.run(evaluate, parts.held_out)
    placement.close()
    if outcome.stopped:
        raise KeyboardInterrupt
    if placement.is_main:
        print(f"done: {outcome.checkpoint / ckpt.PRETRAINED}")
    return outcome.checkpoint


def evaluator(recipe: Recipe, device: str) -> Callable[[Path, int], dict[str, float]]:
    """Rollouts of a checkpoint on the training's device, as the loop calls them."""
    from vla_stack.evaluation.evaluate import evaluate
    from vla_stack.policies.chunk_policy import load_policy

    def run(policy_dir: Path, step: int) -> dict[str, float]:
        names = [e["name"] for e in json.loads((policy_dir / "config.json").read_text()).get("embodiments") or ()]
        metrics, e = {}, recipe.eval
        for name, env in pairings(recipe.eval_envs, names):
            result = evaluate(
                load_policy(policy_dir, device, name),
                env,
                e.episodes,
                e.seed,
                num_envs=e.num_envs,
                workers=e.workers,
                rollouts=e.rollouts,
                env_options=recipe.task.options if env == recipe.task.id else None,
            )
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

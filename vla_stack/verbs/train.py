"""``vla train``: a recipe becomes a run directory that ends in a policy directory."""

from __future__ import annotations

import argparse
from datetime import datetime
from pathlib import Path

from vla_stack.errors import UserError
from vla_stack.training import recipe as recipes
from vla_stack.training.recipe_tree import read_tree
from vla_stack.training.train import sleep_while_waiting, train
from vla_stack.trust import check_recipe

HELP = "Train a policy from a recipe. Any key of the recipe can be set on the command line as key=value."
EXAMPLES = (
    "vla train configs/pick.yaml",
    "vla train configs/pick.yaml data.root=outputs/data/pick steps=500 optimizer.lr=3e-4",
    "vla train configs/pick.yaml policy.options.chunk_size=32 eval.every=500 eval.envs=[sim/pick-v0]",
    "vla train --resume outputs/train/pick-20260101-120000",
    "vla train configs/world_model_tiny.yaml data.root=datasets/world    # a world model: docs/world_model.md",
    "vla train configs/rac_stack.yaml rounds=3      # rounds of rollouts, interventions and trainings",
    "torchrun --nproc_per_node 4 -m vla_stack.cli train configs/pick.yaml precision=bf16",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", nargs="?", help="YAML file of configs/ (with --resume: a key=value, or nothing)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="keys of the recipe, dotted")
    parser.add_argument("--resume", metavar="RUN_DIR", type=Path, help="continue a run from its last intact checkpoint")


def main(args: argparse.Namespace) -> int:
    overrides = list(args.overrides)
    if args.resume is not None and args.recipe is not None:
        overrides.insert(0, args.recipe)
    elif args.resume is None and args.recipe is None:
        raise UserError("no recipe given", f"for example: {EXAMPLES[0]}")
    source = Path(args.recipe) if args.resume is None else recipe_of(args.resume)
    tree = read_tree(source)
    if args.resume is not None:
        check_recipe(tree, str(source))
    if "world_model" in tree:
        sleep_while_waiting()
        from vla_stack.world_model import train as world_model

        return world_model.run(source, overrides, args.resume)
    if loop := tree.get("loop"):
        from vla_stack.methods.run import run

        return run(loop, source, overrides, args.resume)
    recipe = recipes.load(source, overrides)
    run_dir = args.resume or Path(recipe.output_dir or f"outputs/train/{recipe.name}-{datetime.now():%Y%m%d-%H%M%S}")
    train(recipe, run_dir, resume=args.resume is not None)
    return 0


def recipe_of(run_dir: Path) -> Path:
    """The recipe that a run keeps; raises :class:`UserError` where there is no run."""
    if not (path := run_dir / "recipe.yaml").is_file():
        what = "holds no recipe.yaml, it is no run directory" if run_dir.is_dir() else "is no directory"
        raise UserError(f"--resume: {run_dir} {what}", "find your runs with: ls -dt outputs/train/* outputs/rounds/*")
    return path

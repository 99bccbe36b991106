"""``vla train``: a recipe becomes a run directory that ends in a LeRobot policy directory, by whatever method."""

from __future__ import annotations

import argparse
import inspect
import os
from pathlib import Path
from typing import Any

from vla_stack.errors import UserError
from vla_stack.registry import METHODS
from vla_stack.training.recipe import DEFAULT_METHOD, Recipe, make
from vla_stack.training.recipe_tree import keys_of, read_tree
from vla_stack.training.recipes import find_recipe, shipped_recipes
from vla_stack.training.run_dir import begun, default_dir, recipe_of
from vla_stack.trust import check_recipe

HELP = "Train a policy by any method, from a recipe. Any key can be set on the command line as key=value."
EXAMPLES = (
    "vla train pick data.root=data/pick         # a recipe of `vla recipes`, or a file",
    "vla train pick data.root=data/pick method.steps=500 method.optimizer.lr=3e-4",
    "vla train pick data.root=data/pick policy.options.chunk_size=32 eval.every=500",
    "vla train grape_success policy=runs/pick output_dir=runs/grape    # rollouts, preferences, training, again",
    "vla train world_model_tiny data.root=data/world",
    "vla train --resume runs/pick",
    "vla train --list                                   # methods and recipes",
    "vla train grape --explain                          # the keys of a method, with defaults",
    "torchrun --nproc_per_node 4 -m vla_stack.cli train pick data.root=data/pick precision=bf16",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", nargs="?", help="recipe by name (`vla recipes`), a YAML file, or a method")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="keys of the recipe, dotted")
    parser.add_argument("--resume", metavar="RUN_DIR", type=Path, help="continue a run from its last intact checkpoint")
    parser.add_argument("--list", action="store_true", help="list methods and recipes")
    parser.add_argument("--explain", action="store_true", help="show the keys of a recipe or method, with defaults")


def main(args: argparse.Namespace) -> int:
    if args.list:
        print(listing())
        return 0
    overrides = list(args.overrides)
    if args.resume is not None:
        overrides = [args.recipe, *overrides] if args.recipe else overrides
        check_recipe(read_tree(path := recipe_of(args.resume)), str(path))  # the run may be from somebody else
        tree, source = read_tree(path, overrides), str(path)
    elif args.recipe is None or "=" in args.recipe:
        raise UserError("no recipe given", f"for example: {EXAMPLES[0].split('#')[0].strip()}; vla train --list")
    else:
        tree, source = find_recipe(args.recipe, overrides)
    if args.explain:
        print(explained(METHODS.get(str((tree.get("method") or {}).get("name", DEFAULT_METHOD)))))
        return 0
    sleep_while_waiting()
    recipe = make(tree, source)
    run_dir = args.resume or default_dir(recipe)
    try:
        with begun(recipe, run_dir, resume=args.resume is not None):
            recipe.method.run(recipe, run_dir)
    except KeyboardInterrupt:
        print(f"stopped; continue with: vla train --resume {run_dir}")
        return 130
    return 0


def listing() -> str:
    """Methods and recipes, a line each."""
    methods = {name: (inspect.getdoc(METHODS.get(name)) or "").partition("\n")[0] for name in METHODS.names()}
    recipes = shipped_recipes()
    lines = []
    for title, rows in (("methods", methods), ("recipes", recipes)):
        width = max(map(len, rows), default=0)
        lines += [f"{title}:", *(f"  {name:<{width}}  {text}" for name, text in rows.items())]
    return "\n".join(lines)


def explained(method: type) -> str:
    """Every key of a method's recipes with its default; the method's own first."""
    rows = [*keys_of(method, "method."), *(key for key in keys_of(Recipe) if not key.name.startswith("method."))]
    head = [(inspect.getdoc(method) or "").partition("\n")[0]]
    return "\n".join([*head, *(f"  {name} = {_shown(default)}\n      {text}" for name, default, text in rows)])


def _shown(value: Any) -> str:
    return f"[{', '.join(map(str, value))}]" if isinstance(value, tuple) else "null" if value is None else f"{value}"


def sleep_while_waiting() -> None:
    """Have threads wait for each other asleep rather than spinning, if torch is not loaded yet: a little slower on an
    idle machine, and many times faster on one that does something else as well (measured: 9x to 30x on two busy cores).
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

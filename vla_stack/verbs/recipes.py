"""``vla recipes``: the recipes that ship with the package."""

from __future__ import annotations

import argparse

from vla_stack.training.recipes import find_shipped, shipped_recipes

HELP = "List the recipes that ship with the package, or show one; `vla train NAME` trains by it."
EXAMPLES = (
    "vla recipes",
    "vla recipes pick                       # its keys and comments",
    "vla recipes pick > mine.yaml           # one of your own: vla train mine.yaml",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="recipe to show")


def main(args: argparse.Namespace) -> int:
    if args.name:
        print(find_shipped(args.name).read_text(), end="")
        return 0
    rows = shipped_recipes()
    width = max(map(len, rows))
    print("\n".join(f"{name:<{width}}  {text}" for name, text in rows.items()))
    return 0

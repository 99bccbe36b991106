"""Recipes by name: those that ship with the package, files, and methods with their defaults."""

from __future__ import annotations

import difflib
import re
from itertools import takewhile
from pathlib import Path
from typing import Any

from vla_stack.errors import UserError
from vla_stack.registry import METHODS
from vla_stack.training.recipe_tree import read_tree, with_overrides

SHIPPED = Path(__file__).resolve().parents[1] / "configs"


def find_recipe(name: str, overrides: list[str]) -> tuple[dict[str, Any], str]:
    """The keys of a recipe, by file, by its name among those that ship, or by a method's; and what messages call it.

    Raises:
        UserError: There is none.
    """
    if (path := Path(name)).suffix in (".yaml", ".yml") or path.is_file():
        return read_tree(path, overrides), name
    if (shipped := SHIPPED / f"{name}.yaml").is_file():
        return read_tree(shipped, overrides), str(shipped)
    if name in METHODS.names() or ":" in name:
        return with_overrides({"name": name.rpartition(":")[2], "method": name}, overrides), name
    near = difflib.get_close_matches(name, [*shipped_recipes(), *METHODS.names()], n=1, cutoff=0.0)
    raise UserError(f"there is no recipe or method '{name}'", f"did you mean '{near[0]}'? vla recipes has all")


def find_shipped(name: str) -> Path:
    """The file of a recipe that ships; raises :class:`UserError` where there is none of that name."""
    if (path := SHIPPED / f"{name}.yaml").is_file():
        return path
    near = difflib.get_close_matches(name, shipped_recipes(), n=1, cutoff=0.0)
    raise UserError(f"there is no recipe '{name}'", f"did you mean '{near[0]}'? vla recipes has all")


def shipped_recipes() -> dict[str, str]:
    """What each recipe that ships is for, by its name: the first sentence of its comment."""
    return {path.stem: _first_sentence(path.read_text()) for path in sorted(SHIPPED.glob("*.yaml"))}


def _first_sentence(text: str) -> str:
    comment = " ".join(line.removeprefix("#").strip() for line in takewhile(_is_comment, text.splitlines()))
    return re.split(r"(?<=\.)\s", comment, maxsplit=1)[0].rstrip(".") + "."


def _is_comment(line: str) -> bool:
    return line.startswith("#")

"""The way of a recipe through the code, as it runs: which files are handed it, or a part of it that is still a recipe.

A recipe is the tree that was read from YAML, then the typed ``Recipe``; its parts are the dataclasses in it, those of
the method included. A name, a number or a path that was taken out of it is none any more.
"""

from __future__ import annotations

import dataclasses
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from vla_stack.training.recipe import Recipe

ROOT = Path(__file__).resolve().parents[2]
OF_CODE = ("vla_stack", "sim", "robot_drivers")


def files_handed_the_recipe(run: Callable[[], Any]) -> set[str]:
    """Files of the project, relative to its root, with a function that a recipe was an argument of, on this thread."""
    kinds: set[type] = set(_kinds(Recipe))
    found = {"vla_stack/verbs/train.py"}  # whose main makes it

    def see(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(str(ROOT)) or code.co_name == "<module>":
            return
        place = Path(code.co_filename).relative_to(ROOT)
        if place.parts[0] not in OF_CODE:
            return
        for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
            value = frame.f_locals.get(name)
            if isinstance(value, Recipe):
                kinds.update(_kinds(type(value.method)))
            if type(value) in kinds or (isinstance(value, dict) and {"method", "policy"} & value.keys()):
                found.add(place.as_posix())

    sys.setprofile(see)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def _kinds(cls: type) -> Iterator[type]:
    """A dataclass and those that are defined for its fields."""
    yield cls
    for kind in typing.get_type_hints(cls).values():
        for part in (kind, *typing.get_args(kind)):
            if isinstance(part, type) and dataclasses.is_dataclass(part):
                yield from _kinds(part)

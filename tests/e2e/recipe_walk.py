"""The way of a recipe through the code, as it runs: which files are handed it, or a part of it that is still a recipe.

A recipe is the tree that was read from YAML, then the typed ``Recipe``; its parts are the dataclasses in it, those of
the method included. A name, a number or a path that was taken out of it is none any more.
"""

from __future__ import annotations

import dataclasses
import sys
import typing
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from threading import get_ident
from types import CodeType
from typing import Any

from vla_stack.training.recipe import Recipe

ROOT = Path(__file__).resolve().parents[2]
OF_CODE = ("vla_stack", "sim", "robot_drivers")


def files_handed_the_recipe(run: Callable[[], Any]) -> set[str]:
    """Files of the project, relative to its root, with a function that a recipe was an argument of, on this thread."""
    kinds: set[type] = set(_kinds(Recipe))
    found = {"vla_stack/verbs/train.py"}  # whose main makes it

    def see(code: CodeType, _: int) -> Any:
        place = _place(code)
        if place is None:
            return sys.monitoring.DISABLE  # whatever is not ours runs at its own speed
        if get_ident() != here:
            return None
        values = sys._getframe(1).f_locals
        for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
            value = values.get(name)
            if isinstance(value, Recipe):
                kinds.update(_kinds(type(value.method)))
            if type(value) in kinds or (isinstance(value, dict) and {"method", "policy"} & value.keys()):
                found.add(place)
        return None

    events, tool, here = sys.monitoring.events, sys.monitoring.PROFILER_ID, get_ident()
    sys.monitoring.use_tool_id(tool, __name__)
    try:
        sys.monitoring.restart_events()  # those that an earlier walk had disabled
        sys.monitoring.register_callback(tool, events.PY_START, see)
        sys.monitoring.set_events(tool, events.PY_START)
        run()
    finally:
        sys.monitoring.set_events(tool, events.NO_EVENTS)
        sys.monitoring.free_tool_id(tool)
    return found


@cache
def _place(code: CodeType) -> str | None:
    """The file of a function of ours, relative to the root."""
    if not code.co_filename.startswith(str(ROOT)) or code.co_name == "<module>":
        return None
    place = Path(code.co_filename).relative_to(ROOT)
    return place.as_posix() if place.parts[0] in OF_CODE else None


def _kinds(cls: type) -> Iterator[type]:
    """A dataclass and those that are defined for its fields."""
    yield cls
    for kind in typing.get_type_hints(cls).values():
        for part in (kind, *typing.get_args(kind)):
            if isinstance(part, type) and dataclasses.is_dataclass(part):
                yield from _kinds(part)

"""Names that a person trusts: what a file may otherwise not name, because it runs code.

A policy, a dataset or a run directory comes from somewhere. It may choose among what this package knows to be data in,
data out; a processor step, a policy type or a module beyond that is used only where the person at the keyboard has
named it: ``--trust NAME``. Recipes and command lines are typed by that person and need no trust.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from vla_stack.errors import UserError
from vla_stack.registry import ENVIRONMENTS

NAMING = (
    "method",  # its name
    "type",
    "task",
    "env",
    "envs",
    "id",
    "tasks",
)  # keys of recipes whose values can be module:attribute
VARIABLE = "VLA_TRUST"  # in the environment, so that processes started by this one trust the same names


def trust(names: Iterable[str]) -> None:
    """Trust further names, in this process and in those that it starts."""
    os.environ[VARIABLE] = ",".join(sorted(trusted() | set(names)))


def trusted() -> frozenset[str]:
    """The names that are trusted."""
    return frozenset(name for name in os.environ.get(VARIABLE, "").split(",") if name)


def check_trusted(name: str, what: str) -> None:
    """Refuse a name that nobody trusts.

    Args:
        name: What a file names.
        what: That file and what the name is for, as the start of a sentence.

    Raises:
        UserError: It is not trusted.
    """
    if name not in trusted():
        remedy = f"if you know who wrote it and that it may run code here: --trust {name}"
        raise UserError(f"{what} '{name}', which can run code and is not known here", remedy)


def check_module(name: str, source: str) -> None:
    """Refuse what a file names as ``module:id`` or ``module:attribute``: the module would be imported.

    Raises:
        UserError: It names a module that is not trusted.
    """
    module, colon, _ = name.partition(":")
    if colon and module not in ("sim", *ENVIRONMENTS.names()):
        check_trusted(module, f"{source}: '{name}' is of the module")


def check_recipe(tree: Any, source: str) -> None:
    """Refuse code that the recipe of a run directory names; the run may come from somebody else.

    Raises:
        UserError: A method, policy type or environment is of a module that is not trusted.
    """
    if isinstance(tree, list):
        for value in tree:
            check_recipe(value, source)
    elif isinstance(tree, dict):
        for key, value in tree.items():
            check_recipe(value, source)
            if key == "method" and isinstance(value, dict):
                value = value.get("name")
            for name in value if isinstance(value, list) else [value]:
                if key in NAMING and isinstance(name, str):
                    check_module(name.rpartition("@")[2], source)

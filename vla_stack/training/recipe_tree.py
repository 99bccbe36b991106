"""Dataclasses from YAML: unknown keys and values of the wrong type are errors that name the nearest valid one."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from vla_stack.errors import UserError


def read_tree(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The mapping that a YAML file holds, with overrides applied; raises :class:`UserError` as :func:`load` does."""
    try:
        tree = yaml.safe_load(path.read_text()) or {}
    except OSError as e:
        raise UserError(f"cannot read recipe {path}: {e.strerror}", "recipes are in configs/") from None
    except yaml.YAMLError as e:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(e).split())}") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path} holds a {type(tree).__name__}, a recipe is a mapping of keys to values")
    for override in overrides:
        _override(tree, override)
    return tree


def build(cls: type, tree: Any, source: str) -> Any:
    """Dataclass ``cls`` from a mapping; raises :class:`UserError` naming ``source`` and the key.

    Keys that are not given keep the default of the field they lie in: a recipe's own settings of a nested dataclass,
    where it has some, and not that dataclass's.
    """
    return _build(cls, tree, "", source)


def _override(tree: dict[str, Any], text: str) -> None:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UserError(f"override '{text}' is not of the form key=value", "for example optimizer.lr=3e-4")
    *parents, leaf = key.split(".")
    for parent in parents:
        child = tree.setdefault(parent, {})
        if not isinstance(child, dict):
            raise UserError(f"override '{text}': '{parent}' is a value, it has no keys")
        tree = child
    try:
        tree[leaf] = yaml.safe_load(value)
    except yaml.YAMLError:
        tree[leaf] = value


def _build(cls: type, tree: Any, prefix: str, source: str, default: Any = None) -> Any:
    """Dataclass ``cls`` from a mapping, every value coerced to its field's type; ``default`` has the others."""
    if not isinstance(tree, dict):
        raise UserError(f"{source}: '{prefix.rstrip('.')}' needs keys below it, got {tree!r}")
    hints = typing.get_type_hints(cls)
    for key in tree:
        if key not in hints:
            near = difflib.get_close_matches(str(key), hints, n=1, cutoff=0.0)
            raise UserError(f"{source}: unknown key '{prefix}{key}'", f"the nearest valid key is '{prefix}{near[0]}'")
    before = vars(default) if default is not None else _defaults(cls)
    values = {k: _coerce(hints[k], value, f"{prefix}{k}", source, before.get(k)) for k, value in tree.items()}
    return cls(**values) if default is None else dataclasses.replace(default, **values)


def _defaults(cls: type) -> dict[str, Any]:
    """Default of each field of a dataclass that has one."""
    made = {
        f.name: f.default_factory() for f in dataclasses.fields(cls) if f.default_factory is not dataclasses.MISSING
    }
    return made | {f.name: f.default for f in dataclasses.fields(cls) if f.default is not dataclasses.MISSING}


def _coerce(kind: Any, value: Any, key: str, source: str, default: Any = None) -> Any:
    """``value`` as ``kind``; a lone value becomes a tuple of one where a tuple is meant."""
    if dataclasses.is_dataclass(kind):
        return _build(typing.cast(type, kind), value if value is not None else {}, f"{key}.", source, default)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:  # X | None
        return None if value is None else _coerce(args[0], value, key, source, default)
    try:
        if origin is Literal:
            if value not in args:
                raise ValueError(f"one of {', '.join(map(str, args))}")
            return value
        if origin is tuple:
            items = value if isinstance(value, list | tuple) else [value]
            if args[-1] is not Ellipsis and len(items) != len(args):
                raise ValueError(f"{len(args)} values")
            named = dataclasses.is_dataclass(args[0])  # data.sources[1].weight
            keys = [f"{key}[{i}]" if named else key for i in range(len(items))]
            return tuple(_coerce(args[0], item, k, source) for k, item in zip(keys, items, strict=True))
        if origin is dict:
            if not isinstance(value, dict):
                raise ValueError("a mapping")
            return value
        return _scalar(kind, value)
    except ValueError as e:
        raise UserError(f"{source}: '{key}' is {value!r}, expected {e}") from None


def _scalar(kind: type, value: Any) -> Any:
    if kind is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            return float(value)  # YAML 1.1 reads 1e-3 as a string
        except ValueError:
            raise ValueError("a number") from None
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if kind is str and value is None:
        return ""
    if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    raise ValueError({int: "a whole number", str: "a text", float: "a number", bool: "true or false"}[kind])


def plain(value: Any) -> Any:
    """Tuples as lists, so that the YAML stays free of Python tags."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value

"""Dataclasses from YAML: unknown keys, values of the wrong type or out of range are errors that name the key.

A range stands where the field is declared: ``steps: Annotated[int, AtLeast(1)] = 2000``. What depends on several fields
is checked by the dataclass's own method ``check()``, which raises a :class:`UserError`.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import yaml

from vla_stack.errors import UserError


@dataclass(frozen=True)
class AtLeast:
    """Range of a number: not below ``bound``."""

    bound: float

    def holds(self, value: float) -> bool:
        return value >= self.bound

    def __str__(self) -> str:
        return f"at least {self.bound:g}"


@dataclass(frozen=True)
class Above:
    """Range of a number: more than ``bound``."""

    bound: float

    def holds(self, value: float) -> bool:
        return value > self.bound

    def __str__(self) -> str:
        return f"more than {self.bound:g}"


@dataclass(frozen=True)
class Within:
    """Range of a number: from ``low`` to ``high``; ``high`` itself is allowed where ``closed``."""

    low: float
    high: float
    closed: bool = True

    def holds(self, value: float) -> bool:
        return self.low <= value and (value <= self.high if self.closed else value < self.high)

    def __str__(self) -> str:
        return f"a number in [{self.low:g}, {self.high:g}{']' if self.closed else ')'}"


# Sections that may be given as a text, which is then this key of theirs: ``task: sim/pick-v0``.
SHORT = {"task": "id", "policy": "pretrained", "method": "name"}

Count = Annotated[int, AtLeast(1)]
Natural = Annotated[int, AtLeast(0)]
Positive = Annotated[float, Above(0)]
NotNegative = Annotated[float, AtLeast(0)]
Share = Annotated[float, Within(0, 1)]
Decay = Annotated[float, Within(0, 1, closed=False)]


def read_tree(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The mapping that a YAML file holds, with overrides applied; raises :class:`UserError` as :func:`load` does."""
    try:
        tree = yaml.safe_load(path.read_text()) or {}
    except OSError as e:
        raise UserError(f"cannot read recipe {path}: {e.strerror}", "vla recipes lists those that ship") from None
    except yaml.YAMLError as e:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(e).split())}") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path} holds a {type(tree).__name__}, a recipe is a mapping of keys to values")
    return with_overrides(tree, overrides)


def with_overrides(tree: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A tree with ``dotted.key=value`` strings applied in order, and sections that were given as a text spelt out."""
    for key, short in SHORT.items():
        if isinstance(tree.get(key), str):
            tree[key] = {short: tree[key]}
    for override in overrides:
        _override(tree, override)
    return tree


def build(cls: type, tree: Any, source: str, prefix: str = "") -> Any:
    """Dataclass ``cls`` from a mapping; raises :class:`UserError` naming ``source`` and the key, below ``prefix``.

    Keys that are not given keep the default of the field they lie in: a recipe's own settings of a nested dataclass,
    where it has some, and not that dataclass's.
    """
    return _build(cls, tree, prefix, source)


def _of(source: str) -> str:
    return f"{source}: " if source else ""


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
        given = yaml.safe_load(value)
    except yaml.YAMLError:
        given = value
    if isinstance(given, str) and key in SHORT:  # method=own_loss keeps the other keys of the section
        tree.setdefault(key, {})[SHORT[key]] = given
    else:
        tree[leaf] = given


def _build(cls: type, tree: Any, prefix: str, source: str, default: Any = None) -> Any:
    """Dataclass ``cls`` from a mapping, every value coerced to its field's type; ``default`` has the others."""
    if not isinstance(tree, dict):
        raise UserError(f"{_of(source)}'{prefix.rstrip('.')}' needs keys below it, got {tree!r}")
    hints = typing.get_type_hints(cls, include_extras=True)
    for key in tree:
        if key not in hints:
            near = difflib.get_close_matches(str(key), hints, n=1, cutoff=0.0)
            raise UserError(
                f"{_of(source)}unknown key '{prefix}{key}'", f"the nearest valid key is '{prefix}{near[0]}'"
            )
    before = vars(default) if default is not None else _defaults(cls)
    values = {k: _coerce(hints[k], value, f"{prefix}{k}", source, before.get(k)) for k, value in tree.items()}
    made = cls(**values) if default is None else dataclasses.replace(default, **values)
    if (check := getattr(made, "check", None)) is not None:
        try:
            check()
        except UserError as e:
            raise UserError(f"{_of(source)}{e.message}", e.remedy) from None
    return made


def _defaults(cls: type) -> dict[str, Any]:
    """Default of each field of a dataclass that has one."""
    made = {
        f.name: f.default_factory() for f in dataclasses.fields(cls) if f.default_factory is not dataclasses.MISSING
    }
    return made | {f.name: f.default for f in dataclasses.fields(cls) if f.default is not dataclasses.MISSING}


def _coerce(kind: Any, value: Any, key: str, source: str, default: Any = None) -> Any:
    """``value`` as ``kind``; a lone value becomes a tuple of one where a tuple is meant."""
    if typing.get_origin(kind) is Annotated:
        kind, *ranges = typing.get_args(kind)
        made = _coerce(kind, value, key, source, default)
        for bound in ranges:
            if made is not None and not bound.holds(made):
                raise UserError(f"{_of(source)}'{key}' is {made}, expected {bound}")
        return made
    if kind is Any:
        return value
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
        raise UserError(f"{_of(source)}'{key}' is {value!r}, expected {e}") from None


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


class Key(NamedTuple):
    """A key that a recipe may hold: dotted, with its default and what its dataclass says of it."""

    name: str
    default: Any
    text: str


def keys_of(cls: type, prefix: str = "") -> Iterator[Key]:
    """All leaf keys of a dataclass, those of nested ones dotted; the keys of a list's items follow ``[]``."""
    hints, defaults, texts = typing.get_type_hints(cls), _defaults(cls), descriptions(cls)
    for field in dataclasses.fields(cls):
        kind, many = hints[field.name], ""
        if typing.get_origin(kind) is tuple and dataclasses.is_dataclass(typing.get_args(kind)[0]):
            kind, many = typing.get_args(kind)[0], "[]"
        if dataclasses.is_dataclass(kind):
            default = defaults.get(field.name)
            for key in keys_of(typing.cast(type, kind), f"{prefix}{field.name}{many}."):
                within = default
                for part in key.name.removeprefix(f"{prefix}{field.name}.").split("."):
                    within = getattr(within, part, key.default) if not many else key.default
                yield key._replace(default=within)
        else:
            yield Key(f"{prefix}{field.name}", defaults.get(field.name), texts.get(field.name, ""))


def descriptions(cls: type) -> dict[str, str]:
    """What the section ``Attributes`` of a dataclass's docstring, and of those that it extends, says of each field."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        _, _, section = inspect.cleandoc(base.__dict__.get("__doc__") or "").partition("Attributes:\n")
        names: list[str] = []
        for line in section.splitlines():
            if line.startswith("    ") and not line.startswith("     "):
                head, _, text = line.strip().partition(": ")
                names = [name.strip() for name in head.split(",")]
                found |= dict.fromkeys(names, text)
            elif line.startswith("     "):
                found |= {name: f"{found[name]} {line.strip()}" for name in names}
            elif line:
                break
    return found


def plain(value: Any) -> Any:
    """Tuples as lists, so that the YAML stays free of Python tags."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value


# Old names ----------------------------------------------------------------------------------------------------------

# Keys and values of old recipes, each with what it is called now: they are answered by one line, and not read.
SAME = (  # keys that moved into ``method`` under their own name
    *("steps", "batch_size", "accumulate", "optimizer", "ema", "log_every", "save_every", "keep", "wandb"),
    *("constraints", "objective", "weights", "pairs", "starts", "start_seed", "execute", "beta", "calibration"),
    *("sigma", "films", "mode", "recover", "rewind", "demos", "human_frames"),
    *("iterations", "reward", "judge", "horizon", "gamma", "offline", "scenes", "operator"),
    *("generated", "vae_from", "vae", "dynamics", "heads", "svd"),
)
RENAMED = {
    **{key: f"method.{key}" for key in SAME},
    "loop": "method.name",
    "launcher": "chosen by itself under torchrun; on a CPU, processes",
    "world_model": "method=world_model with method.start, tiny or svd",
    "method_options": "method, whose keys its options are",
    "rounds": "method.iterations",
    "rollouts": "method.rollouts, or eval.rollouts of evaluations",
    "num_envs": "method.num_envs, or eval.num_envs of evaluations",
    "episodes": "eval.episodes, or method.episodes for what an iteration learns from",
    "env": "task, with task.options",
    "env_options": "task.options",
    "eval_every": "eval.every",
    "eval_episodes": "eval.episodes",
    "eval_seed": "eval.seed",
    "eval_envs": "eval.num_envs",
    "wsrl": "method.name=wsrl, whose keys its settings are",
    "expo": "method.name=expo, whose keys its settings are",
    "ray": "method: method.workers, method.fragment, method.max_lag",
    "train": "the recipe itself: train.policy is policy, train.data is data, train.steps is method.steps",
    "privileged": "task.options={cameras: [], privileged: true}",
    "image_size": "task.options.image_size",
    "method.decay": "method.gae_lambda",
    "method.sac.members": "method.sac.num_critics",
    "stages": "three keys: method.train_vae, method.train_dynamics, method.train_heads",
    "method.stages": "three keys: method.train_vae, method.train_dynamics, method.train_heads",
}
VALUES = {("method.reward", "own"): "task"}


def check_names(tree: Mapping[str, Any], source: str) -> None:
    """Raise a :class:`UserError` for the first key or value of an old recipe, naming the new one."""
    for name, value in _entries(tree):
        if name in RENAMED:
            raise UserError(f"{source}: '{name}' is no longer a key", f"it is now {RENAMED[name]}; docs/recipes.md")
        if isinstance(value, str) and (new := VALUES.get((name, value))):
            raise UserError(f"{source}: '{name}={value}' is no longer a value", f"it is now {new}; docs/recipes.md")


def _entries(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values of a mapping's keys and of those below them."""
    for key, value in tree.items():
        yield f"{prefix}{key}", value
        if isinstance(value, Mapping):
            yield from _entries(value, f"{prefix}{key}.")

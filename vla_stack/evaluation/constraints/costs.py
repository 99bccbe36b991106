"""Cost types: what each tick of an episode costs, and conditions that begin and end stages.

A cost is a function of a trace and of parameters that its annotations declare: ``Entity`` is a named point, ``Group``
several (``obstacle.*``), ``Held`` something that can be held, ``float`` a number. That is the whole schema: the YAML of
a person and the JSON of a model are checked against it, and neither can name Python. Types of GRAPE are marked with
their place in the paper (arXiv:2411.19309, appendix E.2); the others are added here.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vla_stack.errors import UserError
from vla_stack.evaluation.constraints.trace import Trace
from vla_stack.registry import COSTS

Floats = NDArray[np.float64]
# Told apart by name: annotations are text here.
type Entity = str
type Group = str
type Held = str
KINDS = ("Entity", "Group", "Held", "float")
Condition = Callable[..., NDArray[np.bool_]]
CONDITIONS: dict[str, Condition] = {}


@cache
def cost_types() -> dict[str, Callable[..., Floats]]:
    """The cost types by name: those of the registry, then those of files that :func:`load_costs` has run.

    Raises:
        UserError: An installed package's cannot be imported, or has a parameter of no known kind.
    """
    found = {name: COSTS.get(name) for name in COSTS.names()}
    for name, function in found.items():
        _check_kinds(function, f"the cost type '{name}' of the package {COSTS.entry(name).package}")
    return found


def register_cost(function: Callable[..., Floats]) -> Callable[..., Floats]:
    """Make ``function(trace, **parameters) -> [T]`` of a person's file a cost type of its name."""
    cost_types()[function.__name__] = function
    return function


def _condition(name: str) -> Callable[[Condition], Condition]:
    def register(function: Condition) -> Condition:
        CONDITIONS[name] = function
        return function

    return register


def parameters(function: Callable[..., Any]) -> dict[str, tuple[str, Any]]:
    """Name -> (kind, default) of a cost's or condition's parameters; ``inspect.Parameter.empty`` has to be given."""
    listed = list(inspect.signature(function).parameters.values())[1:]
    return {p.name: (str(p.annotation), p.default) for p in listed}


def load_costs(path: Path) -> None:
    """Run a Python file that a person named, which registers cost types of theirs.

    Raises:
        UserError: It cannot be run, or a parameter is of no known kind.
    """
    spec = importlib.util.spec_from_file_location("vla_custom_costs", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise UserError(f"cannot read {path}", "give a Python file with @register_cost functions")
    before = set(cost_types())
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    for name in set(cost_types()) - before:
        _check_kinds(cost_types()[name], f"{path}: '{name}'")


def _check_kinds(function: Callable[..., Any], what: str) -> None:
    kinds = {kind for kind, _ in parameters(function).values()}
    if odd := kinds - set(KINDS):
        raise UserError(f"{what} has a parameter of kind '{odd.pop()}'", f"kinds are {', '.join(KINDS)}")


# --- Costs -----------------------------------------------------------------------------------------------------------


def distance(trace: Trace, a: Entity, b: Entity) -> Floats:
    """Between two points, m (E.2.1, path and target constraints)."""
    return np.linalg.norm(trace.points[a] - trace.points[b], axis=1)


def steps_to(trace: Trace, a: Entity, b: Entity, step: float = 0.01) -> Floats:
    """Distance in whole steps of ``step`` metres (E.2.3, "efficiency")."""
    return np.floor(distance(trace, a, b) / step)


def above(trace: Trace, a: Entity, b: Entity, by: float = 0.0) -> Floats:
    """1 where ``a`` is not at least ``by`` metres above ``b`` (E.2.1)."""
    return (trace.points[a][:, 2] < trace.points[b][:, 2] + by).astype(np.float64)


def align_xy(trace: Trace, a: Entity, b: Entity) -> Floats:
    """Horizontal distance, m (the evaluator's second stage)."""
    return np.linalg.norm((trace.points[a] - trace.points[b])[:, :2], axis=1)


def clearance(trace: Trace, a: Entity, b: Group, dmin: float = 0.1) -> Floats:
    """How far ``a`` is closer than ``dmin`` to each of ``b``, summed, m (E.2.2)."""
    return np.sum([np.maximum(0.0, dmin - distance(trace, a, one)) for one in members(trace.points, b)], axis=0)


def grasped(trace: Trace, obj: Held) -> Floats:
    """1 where it is not held (the evaluator's grasp stage)."""
    return (~trace.held[obj]).astype(np.float64)


def at_rest(trace: Trace, obj: Entity, speed: float = 0.02) -> Floats:
    """1 where it moves faster than ``speed``, m/s (the prompt's wording)."""
    return (_speed(trace, obj) > speed).astype(np.float64)


def path_length(trace: Trace, a: Entity = "ee") -> Floats:
    """Way of a tick, m; its sum is the length of the path."""
    return _speed(trace, a) * trace.dt


def duration(trace: Trace) -> Floats:
    """Time of a tick, s."""
    return np.full(len(trace), trace.dt)


def contact_count(trace: Trace) -> Floats:
    """1 in ticks that touch something forbidden."""
    return trace.contact.astype(np.float64)


def force_max(trace: Trace) -> Floats:
    """Force on the gripper, N; to be reduced by ``max``, with its limit as ``tau``."""
    return np.linalg.norm(trace.wrench[:, :3], axis=1)


def speed_max(trace: Trace, a: Entity = "ee") -> Floats:
    """Speed, m/s; to be reduced by ``max``."""
    return _speed(trace, a)


def jerk(trace: Trace, a: Entity = "ee") -> Floats:
    """Third difference of the position, m/s^3."""
    out = np.zeros(len(trace))
    if len(trace) > 3:
        out[3:] = np.linalg.norm(np.diff(trace.points[a], n=3, axis=0), axis=1) / trace.dt**3
    return out


def tilt(trace: Trace) -> Floats:
    """Angle between the tool's own axis and the downward one, rad."""
    _, x, y, _ = trace.ee[:, 3:].T
    return np.arccos(np.clip(2.0 * (x * x + y * y) - 1.0, -1.0, 1.0))


def joint_margin(trace: Trace, margin: float = 0.1) -> Floats:
    """How far joints are closer than ``margin`` to a limit, summed, rad."""
    low, high = trace.joint_range.T
    return np.maximum(0.0, margin - np.minimum(trace.q - low, high - trace.q)).sum(1)


def keepout_box(trace: Trace, a: Entity, x0: float, x1: float, y0: float, y1: float, z0: float, z1: float) -> Floats:
    """How deep ``a`` is inside a box, m; 0 outside."""
    p = trace.points[a]
    return np.maximum(0.0, np.minimum(p - [x0, y0, z0], np.array([x1, y1, z1]) - p).min(axis=1))


def height_range(trace: Trace, a: Entity, low: float, high: float) -> Floats:
    """How far ``a`` is below ``low`` or above ``high``, m."""
    z = trace.points[a][:, 2]
    return np.maximum(0.0, low - z) + np.maximum(0.0, z - high)


# --- Conditions ------------------------------------------------------------------------------------------------------


@_condition("grasped")
def is_held(trace: Trace, obj: Held) -> NDArray[np.bool_]:
    """The gripper holds it."""
    return trace.held[obj].astype(bool)


@_condition("released")
def released(trace: Trace, obj: Held) -> NDArray[np.bool_]:
    """The gripper does not hold it."""
    return ~trace.held[obj].astype(bool)


@_condition("near")
def near(trace: Trace, a: Entity, b: Entity, within: float) -> NDArray[np.bool_]:
    """The points are within so many metres."""
    return distance(trace, a, b) <= within


@_condition("aligned")
def aligned(trace: Trace, a: Entity, b: Entity, within: float) -> NDArray[np.bool_]:
    """Horizontally within so many metres."""
    return align_xy(trace, a, b) <= within


@_condition("above")
def is_above(trace: Trace, a: Entity, b: Entity, by: float) -> NDArray[np.bool_]:
    """``a`` is at least ``by`` metres above ``b``."""
    return above(trace, a, b, by) == 0.0


@_condition("higher")
def higher(trace: Trace, a: Entity, than: float) -> NDArray[np.bool_]:
    """``a`` is higher than so many metres."""
    return trace.points[a][:, 2] > than


@_condition("past")
def past(trace: Trace, a: Entity, b: Entity, by: float) -> NDArray[np.bool_]:
    """``a`` is at least ``by`` metres farther from the robot (along x) than ``b``."""
    return trace.points[a][:, 0] >= trace.points[b][:, 0] + by


def members(names: dict[str, Any], pattern: str) -> list[str]:
    """The names that a pattern means: itself, or all that begin with what stands before its ``*``."""
    if not pattern.endswith("*"):
        return [pattern] if pattern in names else []
    return sorted(name for name in names if name.startswith(pattern[:-1]))


def _speed(trace: Trace, a: str) -> Floats:
    out = np.zeros(len(trace))
    out[1:] = np.linalg.norm(np.diff(trace.points[a], axis=0), axis=1) / trace.dt
    return out

"""The constraint language: stages of a task, when each begins and ends, and what it costs.

    version: 1
    objective: safety
    stages:
     - name: transport
       enter: {grasped: obj.target}                  # else the stage begins when the one before is done
       done: {near: [obj.target, goal.target, 0.04]}
       unreached_penalty: 3                          # what an episode pays that never gets here
       costs:
       - {type: clearance, a: ee, b: "obstacle.*", dmin: 0.1, group: collision, tau: 0, weight: 5, scale: 0.1}

A stage i costs C_i = sum_j weight_j max(0, c_ij - tau_j) / scale_j with c_ij the ``reduce`` of the cost's ticks in that
stage. One schema for people (YAML) and models (JSON); whatever is not in it is refused with the place of the mistake.
"""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from vla_stack.errors import UserError
from vla_stack.evaluation.constraints.costs import CONDITIONS, cost_types, members, parameters

SHIPPED = Path(__file__).resolve().parents[2] / "configs" / "constraints"
MAX_STAGES, MAX_COSTS, MAX_BYTES, LARGEST = 8, 8, 32_768, 1e4
# Deep nesting takes the YAML reader quadratic time.
NESTED = re.compile(r"([\[{][^\]}]*){8}|(- ){8}|(\? ){3}")
REDUCES = ("sum", "mean", "max", "min", "last")
OBJECTIVES = ("success", "safety", "efficiency")
GROUPS = ("collision", "grasp", "path")
# Objective -> group -> (factor of weight, factor of tau): safety lowers the threshold of collision, efficiency that of
# the path (arXiv:2411.19309, section 3.6), and what is not asked for counts less.
PRESETS = {
    "success": {"collision": (1.0, 1.0), "grasp": (1.0, 1.0), "path": (1.0, 1.0)},
    "safety": {"collision": (3.0, 0.5), "grasp": (1.0, 1.0), "path": (0.2, 1.0)},
    "efficiency": {"collision": (0.2, 1.0), "grasp": (1.0, 1.0), "path": (2.0, 0.0)},
}


@dataclass(frozen=True)
class Cost:
    """One cost of a stage.

    Attributes:
        type: One of ``costs.cost_types``.
        arguments: Its parameters.
        group: Which threshold an objective moves.
        reduce: Of the stage's ticks.
        tau: What is free.
        weight: What the excess counts.
        scale: Excess that counts 1.
    """

    type: str
    arguments: dict[str, Any]
    group: str = "path"
    reduce: str = "sum"
    tau: float = 0.0
    weight: float = 1.0
    scale: float = 1.0


@dataclass(frozen=True)
class Stage:
    """A part of the task; ``enter`` and ``done`` map conditions to their arguments, all of which have to hold."""

    name: str
    done: dict[str, tuple[Any, ...]]
    costs: tuple[Cost, ...]
    enter: dict[str, tuple[Any, ...]]
    unreached_penalty: float = 1.0


@dataclass(frozen=True)
class Spec:
    """Constraints of a task."""

    objective: str
    stages: tuple[Stage, ...]

    def with_objective(self, objective: str) -> Spec:
        """The same constraints with weights and thresholds of another objective's preset; there and back is the same.

        Raises:
            UserError: There is no such objective, or the present one's preset sets thresholds to 0, so that those of
                another cannot be known.
        """
        if objective not in PRESETS:
            raise UserError(f"there is no objective '{objective}'", f"choose one of {', '.join(PRESETS)}")
        if objective == self.objective:
            return self
        now, then = PRESETS[self.objective], PRESETS[objective]

        def moved(cost: Cost) -> Cost:
            (weight, tau), (new_weight, new_tau) = now[cost.group], then[cost.group]
            if not tau:
                raise UserError(
                    f"constraints of objective '{self.objective}' do not say what '{objective}' leaves free: their "
                    f"thresholds of group '{cost.group}' are 0",
                    "write them for objective: success, from which every other follows",
                )
            return replace(cost, weight=cost.weight * new_weight / weight, tau=cost.tau * new_tau / tau)

        stages = tuple(replace(s, costs=tuple(map(moved, s.costs))) for s in self.stages)
        return Spec(objective, stages)

    def to_yaml(self) -> str:
        """The text that :func:`parse` reads."""
        stages = []
        for s in self.stages:
            conditions = {key: {k: list(v) for k, v in getattr(s, key).items()} for key in ("enter", "done")}
            rows = [
                {"type": c.type, **c.arguments} | {k: v for k, v in asdict(c).items() if k not in ("type", "arguments")}
                for c in s.costs
            ]
            stages.append(
                {
                    "name": s.name,
                    **{k: v for k, v in conditions.items() if v},
                    "unreached_penalty": s.unreached_penalty,
                    "costs": rows,
                }
            )
        tree = {"version": 1, "objective": self.objective, "stages": stages}
        return yaml.safe_dump(tree, sort_keys=False, width=120)


def load_spec(path: Path, entities: Collection[str] | None = None) -> Spec:
    """Read constraints from a YAML file, or those that ship of a task by its name; see :func:`parse`."""
    if not path.exists() and (shipped := SHIPPED / f"{path}.yaml").is_file():
        path = shipped
    try:
        return parse(path.read_text(), entities, str(path))
    except (OSError, UnicodeDecodeError) as e:
        known = ", ".join(sorted(p.stem for p in SHIPPED.glob("*.yaml")))
        raise UserError(f"cannot read constraints {path}: {e}", f"those that ship are of {known}") from None


def parse(text: str, entities: Collection[str] | None = None, source: str = "constraints") -> Spec:
    """Read and check constraints.

    Args:
        text: YAML or JSON, from anybody.
        entities: Names that may be spoken of; None accepts all.
        source: Where the text is from, for errors.

    Raises:
        UserError: Anything is not as the schema has it; the message names the place.
    """
    if len(text.encode()) > MAX_BYTES:
        raise UserError(f"{source}: larger than {MAX_BYTES} bytes")
    if NESTED.search(text):
        raise UserError(f"{source}: nested too deeply")
    try:
        if any(isinstance(token, yaml.AliasToken | yaml.AnchorToken) for token in yaml.scan(text, yaml.SafeLoader)):
            raise UserError(f"{source}: anchors and aliases are not allowed")  # they multiply what a text holds
        tree = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as e:
        raise UserError(f"{source}: not valid YAML: {' '.join(str(e).split())[:200]}") from None
    return Reader(source, None if entities is None else set(entities)).spec(tree)


class Reader:
    """Turns a tree of plain values into a spec, or says where it does not fit."""

    def __init__(self, source: str, entities: set[str] | None) -> None:
        self.source, self.entities = source, entities

    def fail(self, place: str, message: str, remedy: str = "") -> UserError:
        return UserError(f"{self.source}: {place or 'top'}: {message}", remedy)

    def spec(self, tree: Any) -> Spec:
        self.keys(tree, "", ("version", "objective", "stages"), ("version", "stages"))
        if tree["version"] != 1:
            raise self.fail("version", f"is {_short(tree['version'])}", "this program reads version 1")
        objective = self.choice(tree.get("objective", "success"), "objective", OBJECTIVES)
        stages = self.items(tree["stages"], "stages", MAX_STAGES)
        read = tuple(self.stage(s, f"stages[{i}]") for i, s in enumerate(stages))
        if len({s.name for s in read}) < len(read):
            raise self.fail("stages", "two stages have one name")
        return Spec(objective, read)

    def stage(self, tree: Any, at: str) -> Stage:
        self.keys(tree, at, ("name", "enter", "done", "unreached_penalty", "costs"), ("name", "done", "costs"))
        name = tree["name"]
        if not (isinstance(name, str) and name.isidentifier() and len(name) <= 40):
            raise self.fail(f"{at}.name", f"is {_short(name)}", "a name is letters, digits and _")
        costs = self.items(tree["costs"], f"{at}.costs", MAX_COSTS)
        return Stage(
            name=name,
            done=self.conditions(tree["done"], f"{at}.done"),
            costs=tuple(self.cost(c, f"{at}.costs[{i}]") for i, c in enumerate(costs)),
            enter=self.conditions(tree["enter"], f"{at}.enter") if "enter" in tree else {},
            unreached_penalty=self.number(tree.get("unreached_penalty", 1.0), f"{at}.unreached_penalty", 0.0),
        )

    def cost(self, tree: Any, at: str) -> Cost:
        kind = self.choice(tree.get("type") if isinstance(tree, dict) else None, f"{at}.type", tuple(cost_types()))
        takes = parameters(cost_types()[kind])
        common = ("type", "group", "reduce", "tau", "weight", "scale")
        needed = [name for name, (_, default) in takes.items() if default is inspect.Parameter.empty]
        self.keys(tree, at, (*common, *takes), needed)
        arguments = {n: self.value(tree[n], f"{at}.{n}", takes[n][0]) for n in takes if n in tree}
        scale = self.number(tree.get("scale", 1.0), f"{at}.scale", 0.0)
        if scale == 0.0:
            raise self.fail(f"{at}.scale", "is 0")
        return Cost(
            kind,
            arguments,
            group=self.choice(tree.get("group", "path"), f"{at}.group", GROUPS),
            reduce=self.choice(tree.get("reduce", "sum"), f"{at}.reduce", REDUCES),
            tau=self.number(tree.get("tau", 0.0), f"{at}.tau", 0.0),
            weight=self.number(tree.get("weight", 1.0), f"{at}.weight", 0.0),
            scale=scale,
        )

    def conditions(self, tree: Any, at: str) -> dict[str, tuple[Any, ...]]:
        self.keys(tree, at, tuple(CONDITIONS), ())
        if not tree:
            raise self.fail(at, "names no condition", f"conditions are {', '.join(CONDITIONS)}")
        out = {}
        for name, given in tree.items():
            takes = parameters(CONDITIONS[name])
            values = given if isinstance(given, list) else [given]
            if len(values) != len(takes):
                raise self.fail(f"{at}.{name}", f"takes {len(takes)} values ({', '.join(takes)}), got {len(values)}")
            kinds = [kind for kind, _ in takes.values()]
            out[name] = tuple(self.value(v, f"{at}.{name}", k) for v, k in zip(values, kinds, strict=True))
        return out

    def value(self, value: Any, at: str, kind: str) -> Any:
        if kind == "float":
            return self.number(value, at)
        if not (isinstance(value, str) and 0 < len(value) <= 60):
            raise self.fail(at, f"is {_short(value)}, expected a name")
        if "*" in value and (kind != "Group" or value.index("*") != len(value) - 1):
            raise self.fail(
                at, f"'{value}' is a pattern", "name one entity; only groups like 'obstacle.*' are patterns"
            )
        if self.entities is not None and not members(dict.fromkeys(self.entities), value):
            raise self.fail(at, f"there is no entity '{value}'", f"entities are {', '.join(sorted(self.entities))}")
        return value

    def number(self, value: Any, at: str, low: float = -LARGEST) -> float:
        fine = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not (fine and low <= value <= LARGEST):
            raise self.fail(at, f"is {_short(value)}, expected a number from {low:g} to {LARGEST:g}")
        return float(value)

    def choice(self, value: Any, at: str, choices: tuple[str, ...]) -> str:
        if not isinstance(value, str) or value not in choices:
            raise self.fail(at, f"is {_short(value)}", f"choose one of {', '.join(choices)}")
        return value

    def items(self, value: Any, at: str, most: int) -> list[Any]:
        if not isinstance(value, list) or not 1 <= len(value) <= most:
            raise self.fail(at, f"expected a list of 1 to {most} entries")
        return value

    def keys(self, tree: Any, at: str, known: Collection[str], needed: Collection[str]) -> None:
        if not isinstance(tree, dict):
            raise self.fail(at, f"is {_short(tree)}, expected keys and values")
        for key in tree:
            if key not in known:
                raise self.fail(at, f"unknown key {_short(key)}", f"keys are {', '.join(known)}")
        if missing := [key for key in needed if key not in tree]:
            raise self.fail(at, f"'{missing[0]}' is missing")


def schema(entities: Collection[str]) -> dict[str, Any]:
    """The same rules as a JSON schema, for models that answer in one."""
    numbers = {"type": "number"}
    names = {"type": "string", "enum": sorted(entities)}
    patterns = sorted({f"{e.split('.')[0]}.*" for e in entities if "." in e})
    groups = {"type": "string", "enum": [*sorted(entities), *patterns]}
    of = {"Entity": names, "Held": names, "Group": groups, "float": numbers}
    costs = []
    for kind, function in cost_types().items():
        takes = parameters(function)
        own = {n: of[k] for n, (k, _) in takes.items()}
        common: dict[str, Any] = {"group": {"enum": list(GROUPS)}, "reduce": {"enum": list(REDUCES)}}
        common |= dict.fromkeys(("tau", "weight", "scale"), numbers)
        needed = ["type", *(n for n, (_, d) in takes.items() if d is inspect.Parameter.empty)]
        costs.append(_object({"type": {"const": kind}, **own, **common}, needed))
    conditions = _object({name: {"type": ["array", "string"]} for name in CONDITIONS}, [])
    stage = {
        "name": {"type": "string"},
        "enter": conditions,
        "done": conditions,
        "unreached_penalty": numbers,
        "costs": {"type": "array", "minItems": 1, "maxItems": MAX_COSTS, "items": {"anyOf": costs}},
    }
    stages = {
        "type": "array",
        "minItems": 1,
        "maxItems": MAX_STAGES,
        "items": _object(stage, ["name", "done", "costs"]),
    }
    top = {"version": {"const": 1}, "objective": {"enum": list(OBJECTIVES)}, "stages": stages}
    return _object(top, list(top))


def _object(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _short(value: Any) -> str:
    return json.dumps(value, default=str)[:60]

"""Which topic of a recording is what in a dataset, as the user says it: by arguments or in a small YAML file."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_args

import yaml

from vla_stack.errors import UserError, check_options
from vla_stack.schema import Dim, Unit

MAX_FILE = 1 << 20  # bytes


@dataclass(frozen=True)
class BagMap:
    """What becomes of the topics of a recording.

    Attributes:
        state: Topic of sensor_msgs/JointState: what is measured.
        action: Topic of sensor_msgs/JointState: what is commanded.
        rate_hz: Frames per second of the dataset.
        cameras: Camera -> topic of sensor_msgs/Image or CompressedImage.
        task: Instruction of all episodes.
        task_topic: Topic of std_msgs/String with the instruction, in place of ``task``.
        joints: Joints to take, in this order; empty: those of the action, and in the state its others after them.
        units: Joint -> unit, where it is not rad.
        grippers: Joint -> its position when closed and when open; it becomes an opening ratio, 0 closed, 1 open.
        split_topic: Each message of this topic, of any type, begins an episode.
        split_gap: Seconds without a measurement or a picture that end an episode; 0: nothing does.
        log_time: Time is when a message was recorded, whatever its header says.
        robot: Name of the robot.
    """

    state: str
    action: str
    rate_hz: float
    cameras: dict[str, str] = field(default_factory=dict)
    task: str = ""
    task_topic: str = ""
    joints: tuple[str, ...] = ()
    units: dict[str, Unit] = field(default_factory=dict)
    grippers: dict[str, tuple[float, float]] = field(default_factory=dict)
    split_topic: str = ""
    split_gap: float = 0.0
    log_time: bool = False
    robot: str = "ros"

    @classmethod
    def of(cls, values: Mapping[str, Any], owner: str) -> BagMap:
        """From plain values; ``owner`` says whose, for messages.

        Raises:
            UserError: A key is missing, not known, or has a value that cannot be.
        """
        check_options(owner, values.keys(), [f.name for f in fields(cls)])
        for key in ("state", "action", "rate_hz"):
            if key not in values:
                raise UserError(f"{owner} does not say '{key}'", f"--{key.removesuffix('_hz')}, or {key}: in a file")
        read = {key: _READERS[key](value) for key, value in values.items()}
        for key, value in read.items():
            if value is None:
                raise UserError(f"{owner}: '{key}' is {values[key]!r}", f"expected {_EXPECTED[key]}")
        if bool(read.get("task")) == bool(read.get("task_topic")):
            raise UserError(
                f"{owner} says {'two' * bool(read.get('task')) or 'no'} instructions", "--task or --task-topic"
            )
        return cls(**read)

    def dim(self, joint: str) -> Dim:
        """What a joint is in the dataset."""
        name = joint if joint.endswith(".pos") else f"{joint}.pos"
        if joint in self.grippers:
            return Dim(name, "ratio", 0.0, 1.0, kind="gripper")
        return Dim(name, self.units.get(joint, "rad"))


def read_map(path: Path) -> dict[str, Any]:
    """Values of a YAML file for :meth:`BagMap.of`.

    Raises:
        UserError: It cannot be read or is no mapping.
    """
    try:
        if path.stat().st_size > MAX_FILE:
            raise UserError(f"{path} is larger than {MAX_FILE >> 20} MB")
        values = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as e:
        raise UserError(f"{path} is not YAML ({str(e).splitlines()[0]})") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} is no mapping", "write lines such as `state: /joint_states`")
    return {str(key): value for key, value in values.items()}


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _number(value: Any, low: float, high: float) -> float | None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
    return float(value) if good else None


def _named(value: Any, read: Any) -> dict[str, Any] | None:
    if not isinstance(value, dict) or not all(isinstance(k, str) for k in value):
        return None
    items = {k: read(v) for k, v in value.items()}
    return None if None in items.values() else items


def _cameras(value: Any) -> dict[str, str] | None:
    found = _named(value, _text)
    return found if found is not None and all(re.fullmatch(r"[A-Za-z0-9_-]+", name) for name in found) else None


def _joints(value: Any) -> tuple[str, ...] | None:
    good = isinstance(value, list | tuple) and all(map(_text, value)) and len(set(value)) == len(value)
    return tuple(value) if good else None


def _ends(value: Any) -> tuple[float, float] | None:
    if not isinstance(value, list | tuple) or len(value) != 2:
        return None
    closed, opened = (_number(v, -math.inf, math.inf) for v in value)
    good = closed is not None and opened is not None and math.isfinite(closed - opened) and closed != opened
    return (closed, opened) if good else None  # type: ignore[return-value]


_READERS: dict[str, Any] = dict.fromkeys(("state", "action", "task", "task_topic", "split_topic", "robot"), _text) | {
    "rate_hz": lambda v: _number(v, 0.1, 1000.0),
    "split_gap": lambda v: _number(v, 0.0, 1e6),
    "cameras": _cameras,
    "joints": _joints,
    "units": lambda v: _named(v, lambda unit: unit if unit in get_args(Unit) else None),
    "grippers": lambda v: _named(v, _ends),
    "log_time": lambda v: v if isinstance(v, bool) else None,
}
_EXPECTED = dict.fromkeys(("state", "action", "task_topic", "split_topic"), "the name of a topic") | {
    "task": "a text",
    "robot": "a name",
    "rate_hz": "frames per second, 0.1 to 1000",
    "split_gap": "seconds",
    "cameras": "names of letters, digits, '_' and '-', each with a topic",
    "joints": "a list of different names",
    "units": f"joints, each with one of {', '.join(get_args(Unit))}",
    "grippers": "joints, each with its position closed and open, for example [0.0, 0.04]",
    "log_time": "true or false",
}

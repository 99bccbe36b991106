"""The limits file of one robot: what it may do, in YAML, checked against what it is.

    robot: lerobot/so_follower        # RobotSpec.name; another robot is refused
    dimensions:                       # action dimensions, in their SI units; what is absent is the robot's own
      shoulder_pan.pos: {low: -1.6, high: 1.6, max_rate: 1.5, max_acceleration: 10.0, max_load: 0.7}
    tool: {kinematics: so101, x: [0.05, 0.4], y: [-0.25, 0.25], z: [0.02, 0.4]}   # metres, base frame
    soft_start_s: 1.0                 # velocities grow to their limits over this time after arming
    max_sensor_age_s: 0.2

``max_load`` is the share of a motor's rated torque (0 to 1) beyond which the robot stops, where its driver reports it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from vla_stack.errors import UserError
from vla_stack.runtime.safety import SafetyConfig, SafetyEnvelope
from vla_stack.schema import RobotSpec

DIMENSION_KEYS = ("low", "high", "max_rate", "max_acceleration", "max_load")
SOFT_START_S = 1.0  # of everything but a simulation, where nothing else is said
KEYS = ("robot", "dimensions", "tool", "soft_start_s", "max_sensor_age_s", "max_refusals")


@dataclass(frozen=True)
class Limits:
    """A limits file.

    Attributes:
        robot: Name of the robot that it is for.
        safety: For the safety envelope.
        max_load: Action dimension -> share of rated torque; for the driver.
    """

    robot: str
    safety: SafetyConfig
    max_load: dict[str, float] = field(default_factory=dict)


def read_limits(path: Path) -> Limits:
    """Read and check a limits file.

    Raises:
        UserError: It cannot be read, or a key or value makes no sense; the text names it.
    """
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as e:
        raise UserError(f"limits file {path}: {' '.join(str(e).split())}", "see docs/robots.md for an example") from e
    if not isinstance(content, dict) or not isinstance(content.get("robot"), str):
        raise UserError(f"limits file {path}: there is no 'robot'", "name the robot, as `vla robot check` prints it")
    _only(path, "", content, KEYS)
    dimensions = content.get("dimensions") or {}
    of: dict[str, dict[str, Any]] = {key: {} for key in DIMENSION_KEYS}
    for name, values in _map(path, "dimensions", dimensions).items():
        _only(path, f"dimensions.{name}.", _map(path, f"dimensions.{name}", values), DIMENSION_KEYS)
        for key, value in values.items():
            of[key][name] = _number(path, f"dimensions.{name}.{key}", value, positive=key.startswith("max"))
    names = set(of["low"]) | set(of["high"])
    inf = float("inf")
    workspace = {name: (of["low"].get(name, -inf), of["high"].get(name, inf)) for name in names}
    for name, (low, high) in workspace.items():
        if low >= high:
            raise UserError(f"limits file {path}: dimensions.{name}: low {low:g} is not below high {high:g}")
    tool = dict(_map(path, "tool", content.get("tool") or {}))
    _only(path, "tool.", tool, ("kinematics", "x", "y", "z"))
    kinematics = str(tool.pop("kinematics", ""))
    if bool(tool) != bool(kinematics):
        raise UserError(f"limits file {path}: tool needs 'kinematics' and a range of x, y or z", "give both or neither")
    scalars: dict[str, Any] = {
        k: _number(path, k, content[k], positive=k != "soft_start_s") for k in KEYS[3:] if k in content
    }
    if "max_refusals" in scalars:
        scalars["max_refusals"] = int(scalars["max_refusals"])
    safety = SafetyConfig(
        workspace=workspace,
        max_rate=of["max_rate"],
        max_acceleration=of["max_acceleration"],
        tool_box={axis: _range(path, f"tool.{axis}", value) for axis, value in tool.items()},
        kinematics=kinematics,
        **scalars,
    )
    return Limits(content["robot"], safety, of["max_load"])


def check_limits(limits: Limits, robot: RobotSpec) -> None:
    """Raise ``UserError`` where limits are not for this robot or name a dimension that it does not have."""
    if limits.robot != robot.name:
        raise UserError(f"these limits are for '{limits.robot}', the robot is '{robot.name}'", "use its own file")
    make_envelope(robot, limits.safety)
    for name in set(limits.max_load) - {d.name for d in robot.action}:
        raise UserError(f"max_load: the robot has no action dimension '{name}'")


def make_envelope(robot: RobotSpec, config: SafetyConfig, commands: int = 1) -> SafetyEnvelope:
    """The envelope of a robot that is sent a number of commands a control step, each of which is to pass it.

    Loads the robot's kinematic model where the configuration names one.
    """
    age_s = 5 * robot.dt if config.max_sensor_age_s is None else config.max_sensor_age_s
    config = replace(config, max_sensor_age_s=age_s, max_refusals=commands * config.max_refusals)
    often = replace(robot, rate_hz=commands * robot.rate_hz)
    if not config.kinematics:
        return SafetyEnvelope(often, config)
    from vla_stack.runtime.kinematics import Kinematics

    return SafetyEnvelope(often, config, Kinematics(config.kinematics, robot).tool)


def predict_touching(robot: RobotSpec, config: SafetyConfig) -> Callable[[NDArray[np.float64]], frozenset[str]] | None:
    """What would touch what at an action [A], by a model of its own; None where the configuration names none."""
    if not config.kinematics:
        return None
    from vla_stack.runtime.kinematics import Kinematics

    return Kinematics(config.kinematics, robot).touching


def describe_limits(robot: RobotSpec, config: SafetyConfig) -> str:
    """A table of what the robot may do, in degrees beside radians; for people."""
    envelope = make_envelope(robot, config)
    rows = [f"{'dimension':<22}{'low':>10}{'high':>10}{'rate':>10}{'accel.':>10}  unit"]
    for i, dim in enumerate(robot.action):
        low, high, rate, acceleration = envelope.limits(i)
        rows.append(f"{dim.name:<22}{low:>10.3f}{high:>10.3f}{rate:>10.3g}{acceleration:>10.3g}  {dim.unit}")
    for axis, (low, high) in config.tool_box.items():
        rows.append(f"{'tool ' + axis:<22}{low:>10.3f}{high:>10.3f}{'':>20}  m")
    rows.append(f"soft start {config.soft_start_s:g} s, stop after {config.max_refusals} refused commands in a row")
    return "\n".join(rows)


def _only(path: Path, where: str, given: dict[str, Any], known: tuple[str, ...]) -> None:
    for key in given:
        if key not in known:
            raise UserError(f"limits file {path}: unknown key '{where}{key}'", f"the keys are {', '.join(known)}")


def _map(path: Path, where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"limits file {path}: {where} is no map", "see docs/robots.md for an example")
    return value


def _number(path: Path, where: str, value: Any, positive: bool) -> float:
    good = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")
    if not good or (positive and value <= 0) or (where == "soft_start_s" and value < 0):
        raise UserError(f"limits file {path}: {where} is {value!r}", "give a number, above zero for a maximum")
    return float(value)


def _range(path: Path, where: str, value: Any) -> tuple[float, float]:
    if not isinstance(value, list) or len(value) != 2:
        raise UserError(f"limits file {path}: {where} is {value!r}", "give [low, high] in metres")
    return _number(path, where, value[0], False), _number(path, where, value[1], False)

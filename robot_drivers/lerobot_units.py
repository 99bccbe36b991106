"""A feature of a LeRobot robot as a dimension: its unit (``vla_stack.lerobot_units``), its range, its rate.

What LeRobot's motors say of themselves is compared with the unit that a feature's name says: percent of a joint's
range, read as degrees, would make every limit wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from robot_drivers.lerobot_port import arms, buses
from vla_stack.errors import UserError
from vla_stack.lerobot_units import UNITS, unit_of
from vla_stack.schema import Dim

# Largest velocities where ``limits`` say nothing, SI: a LeKiwi's, whose wheels LeRobot turns by at most 3000 ticks/s.
FASTEST = {"m/s": 0.27, "rad/s": 1.85}


def describe(
    name: str,
    units: Mapping[str, str],
    limits: Mapping[str, tuple[float, float]],
    max_rate: float,
    calibrated: tuple[float, float],
) -> Dim:
    """A feature as a dimension; ``limits`` (SI) win over the ``calibrated`` range of a joint, radians, and FASTEST."""
    unit = UNITS[unit_of(name, units)][1]
    if name.rpartition(".")[0].endswith("gripper") and unit == "ratio":  # one in angles is a joint like others
        low, high = limits.get(name, (0.0, 1.0))
        return Dim(name, unit, low, high, kind="gripper")
    fastest = FASTEST.get(unit, np.inf)
    low, high = limits.get(name, calibrated if unit == "rad" else (-fastest, fastest))
    rate = max_rate if unit == "rad" else np.inf
    return Dim(name, unit, low, high, rate, "angle" if unit == "rad" else "position")


def calibrated_range(robot: Any, name: str) -> tuple[float, float]:
    """Range of a joint in radians about its middle, which is where LeRobot puts zero degrees."""
    for prefix, arm in arms(robot).items():
        joint = name.rpartition(".")[0].removeprefix(prefix)
        if name != f"{prefix}{joint}.pos":
            continue
        if (fixed := _fixed_limits(arm).get(joint)) is not None:
            return float(np.deg2rad(fixed[0])), float(np.deg2rad(fixed[1]))
        bus: Any = getattr(arm, "bus", None)
        calibration = getattr(arm, "calibration", {}).get(joint)
        resolutions = getattr(bus, "model_resolution_table", None)
        if resolutions and calibration is not None and joint in bus.motors:
            ticks = resolutions[bus.motors[joint].model] - 1
            half = (calibration.range_max - calibration.range_min) / 2 * 2 * np.pi / ticks
            return -half, half
    return -np.pi, np.pi


def check_units(device: Any, kind: str, units: Mapping[str, str]) -> None:
    """Compare what the motors of a device speak with what their features' names, or ``units``, say.

    Args:
        device: A LeRobot robot or teleoperator.
        kind: Its type, for messages.
        units: As of :func:`unit_of`.

    Raises:
        UserError: A motor speaks percent where degrees are expected, or the other way round.
    """
    for prefix, arm in arms(device).items():
        for motor, spoken in _spoken(arm).items():
            name = f"{prefix}{motor}.pos"
            if name not in device.action_features or (spoken == unit_of(name, units) and spoken in UNITS):
                continue
            if spoken == "deg":
                text = f"{kind}: motor '{prefix}{motor}' speaks degrees, not {unit_of(name, units)}"
                low_high = "[lowest, highest in radians]"
                raise UserError(text, f"give units={{'{name}': deg}} and limits={{'{name}': {low_high}}}")
            text = f"{kind}: motor '{prefix}{motor}' speaks percent of its calibrated range, which is no angle"
            if spoken == "percent":
                raise UserError(text, f"where an opening ratio is meant, give units={{'{name}': percent}}")
            raise UserError(text, "LeRobot has no degrees for it: use a device that has, such as an SO-101")


def _spoken(arm: Any) -> dict[str, str]:
    """Motor -> ``deg``, ``percent`` (0 to 100) or ``+-percent`` (-100 to 100), for motors that say so."""
    words = {"degrees": "deg", "range_0_100": "percent", "range_m100_100": "+-percent"}
    spoken = dict.fromkeys(_fixed_limits(arm), "deg")
    for bus in buses(arm).values():
        modes = {name: getattr(motor, "norm_mode", None) for name, motor in bus.motors.items()}
        spoken |= {name: words[mode.value] for name, mode in modes.items() if mode is not None}
    if isinstance(joints := getattr(arm, "joints", None), Mapping):  # of devices without a bus
        modes = {name: getattr(mode, "value", None) for name, mode in joints.items()}
        spoken |= {name: words[mode] for name, mode in modes.items() if mode in words}
    return spoken


def _fixed_limits(arm: Any) -> Mapping[str, tuple[float, float]]:
    """Limits in the config of an arm that takes no ranges from its calibration, degrees."""
    config = getattr(arm, "config", None)
    limits = getattr(config, "joint_limits", None) or getattr(config, "joint_ranges", None)
    return limits if isinstance(limits, Mapping) else {}

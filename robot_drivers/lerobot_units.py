"""Degrees and percent on LeRobot's side, radians and ratios on ours: what a feature's numbers mean.

A feature's unit follows from its name (``gripper.pos`` percent, other ``.pos`` degrees, ``.vel`` metres per second,
``theta.vel`` degrees per second) unless ``units`` says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vla_stack.errors import UserError
from vla_stack.schema import Dim, Unit

# Unit of a feature -> (factor to SI, SI unit)
UNITS: dict[str, tuple[float, Unit]] = {
    "deg": (np.pi / 180, "rad"),
    "deg/s": (np.pi / 180, "rad/s"),
    "percent": (0.01, "ratio"),
    "mm": (0.001, "m"),
    "rad": (1.0, "rad"),
    "rad/s": (1.0, "rad/s"),
    "m": (1.0, "m"),
    "m/s": (1.0, "m/s"),
    "ratio": (1.0, "ratio"),
}


def unit_of(name: str, units: Mapping[str, str]) -> str:
    """Key in :data:`UNITS` of a feature; ``units`` wins over what its name says.

    Raises:
        UserError: Neither says anything known.
    """
    part, _, quantity = name.rpartition(".")
    usual = ""
    if quantity == "pos":
        usual = "percent" if part.endswith("gripper") else "deg"
    elif quantity == "vel":
        usual = "deg/s" if part == "theta" else "m/s"
    unit = units.get(name) or usual
    if unit not in UNITS:
        raise UserError(f"the unit of '{name}' is unknown", f"give units={{'{name}': ...}}, one of {', '.join(UNITS)}")
    return unit


def factors(names: list[str], units: Mapping[str, str]) -> NDArray[np.float64]:
    """Factor to SI of each feature."""
    return np.array([UNITS[unit_of(name, units)][0] for name in names])


def describe(
    name: str,
    units: Mapping[str, str],
    limits: Mapping[str, tuple[float, float]],
    max_rate: float,
    calibrated: tuple[float, float],
) -> Dim:
    """A feature as a dimension; ``limits`` (SI) win over the ``calibrated`` range of a joint, radians."""
    unit = UNITS[unit_of(name, units)][1]
    if name.rpartition(".")[0].endswith("gripper"):
        low, high = limits.get(name, (0.0, 1.0))
        return Dim(name, unit, low, high, kind="gripper")
    low, high = limits.get(name, calibrated if unit == "rad" else (-np.inf, np.inf))
    rate = max_rate if unit == "rad" else np.inf
    return Dim(name, unit, low, high, rate, "angle" if unit == "rad" else "position")


def calibrated_range(robot: Any, name: str) -> tuple[float, float]:
    """Range of a joint in radians about its middle, which is where LeRobot puts zero degrees."""
    joint = name.rpartition(".")[0]
    bus, calibration = getattr(robot, "bus", None), getattr(robot, "calibration", {}).get(joint)
    if bus is None or calibration is None or joint not in bus.motors:
        return -np.pi, np.pi
    ticks = bus.model_resolution_table[bus.motors[joint].model] - 1
    half = (calibration.range_max - calibration.range_min) / 2 * 2 * np.pi / ticks
    return -half, half

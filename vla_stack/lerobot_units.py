"""What the numbers of LeRobot's robots and datasets mean: degrees and percent, where this side has radians and ratios.

A feature's unit follows from its name (``gripper.pos`` percent, other ``.pos`` degrees, ``.vel`` metres per second,
``theta.vel`` degrees per second) unless ``units`` says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vla_stack.errors import UserError
from vla_stack.schema import Unit

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


def factors(names: Sequence[str], units: Mapping[str, str]) -> NDArray[np.float64]:
    """Factor to SI of each feature."""
    return np.array([UNITS[unit_of(name, units)][0] for name in names])


def dimension_names(feature: Mapping[str, Any]) -> list[str] | None:
    """Names of a vector's dimensions in a LeRobotDataset's metadata; None unless there is one for each.

    Older datasets hold them in a mapping, ``{"motors": [...]}``, those of a gamepad in one of name to place,
    ``{"delta_x": 0, ...}``; others name the vector as a whole, or nothing.
    """
    names = feature.get("names") or ()
    if isinstance(names, Mapping) and all(isinstance(place, int) for place in names.values()):
        names = sorted(names, key=names.__getitem__)
    elif isinstance(names, Mapping):
        names = [name for group in names.values() for name in (group if isinstance(group, list) else [group])]
    return [str(name) for name in names] if len(names) == feature["shape"][0] else None

"""Robots behind one protocol: simulated ones, any LeRobot robot. A driver is imported when it is asked for."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from vla_stack.errors import UserError, check_options
from vla_stack.runtime.driver import Driver, EpisodicDriver

__all__ = ["DRIVERS", "Driver", "EpisodicDriver", "driver_type", "make_driver"]

DRIVERS = {
    "sim": "robot_drivers.simulated:SimulatedRobot",  # a MuJoCo task in real time
    "lerobot": "robot_drivers.lerobot_robot:LeRobotRobot",  # any robot that LeRobot knows
    "remote": "robot_drivers.remote:RemoteRobot",  # a robot on another computer, which runs `vla robot serve`
    "replay": "robot_drivers.replay:ReplayRobot",  # a recorded episode, open loop
}


def driver_type(name: str) -> type[Driver]:
    """The class of a driver by its name in :data:`DRIVERS`; its ``capabilities`` are known without a robot.

    Raises:
        UserError: There is no such driver.
    """
    if name not in DRIVERS:
        remedy = f"use one of {', '.join(DRIVERS)}; a robot of LeRobot's is --robot.type={name}"
        raise UserError(f"robot '{name}' does not exist", remedy)
    module, _, attribute = DRIVERS[name].partition(":")
    kind: type[Driver] = getattr(importlib.import_module(module), attribute)
    return kind


def make_driver(name: str, **kwargs: Any) -> Driver:
    """A driver by its name in :data:`DRIVERS`, not connected yet; ``kwargs`` are those of its class.

    Raises:
        UserError: There is no such driver, or it takes no such argument.
    """
    kind = driver_type(name)
    parameters = inspect.signature(kind).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):  # who takes any checks them itself
        check_options(f"robot '{name}'", kwargs, parameters)
    try:
        driver: Driver = kind(**kwargs)
    except TypeError as e:
        raise UserError(f"robot '{name}': {e}", f"its arguments are described in {kind.__module__}") from e
    return driver

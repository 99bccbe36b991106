"""Robots behind one protocol: simulated ones, any LeRobot robot. A driver is imported when it is asked for."""

from __future__ import annotations

import inspect
from typing import Any

from vla_stack.errors import UserError, check_options
from vla_stack.registry import ROBOTS
from vla_stack.runtime.driver import Driver, EpisodicDriver

__all__ = ["Driver", "EpisodicDriver", "driver_type", "make_driver"]


def driver_type(name: str) -> type[Driver]:
    """The class of a driver by its registered name or ``module:Class``; its ``capabilities`` are known without a robot.

    Raises:
        UserError: There is no such driver.
    """
    kind: type[Driver] = ROBOTS.get(name)
    return kind


def make_driver(name: str, **kwargs: Any) -> Driver:
    """A driver by its registered name or ``module:Class``, not connected yet; ``kwargs`` are those of its class.

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

"""Robots behind one protocol: simulated ones, any LeRobot robot. A driver is imported when it is asked for."""

from __future__ import annotations

from typing import Any

from robot_drivers.driver import Driver, EpisodicDriver
from vla_stack.errors import UserError

__all__ = ["Driver", "EpisodicDriver", "make_driver"]


def make_driver(name: str, **kwargs: Any) -> Driver:
    """A driver by name, not connected yet.

    Args:
        name: ``sim`` (a MuJoCo task in real time) or ``lerobot`` (any robot that LeRobot knows).
        **kwargs: See :class:`~robot_drivers.simulated.SimulatedRobot` and
            :class:`~robot_drivers.lerobot_robot.LeRobotRobot`.

    Raises:
        UserError: There is no such driver.
    """
    if name == "sim":
        from robot_drivers.simulated import SimulatedRobot

        return SimulatedRobot(**kwargs)
    if name == "lerobot":
        from robot_drivers.lerobot_robot import LeRobotRobot

        return LeRobotRobot(**kwargs)
    raise UserError(f"robot '{name}' does not exist", "use sim or lerobot")

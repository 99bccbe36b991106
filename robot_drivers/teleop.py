"""Teleoperators behind one interface: what a hand asks for, in the action space of the robot that it drives.

A leader arm says where to be (a target), a keyboard or gamepad how fast to move (a velocity). Velocities of the tool
become velocities of the joints where the robot is commanded in joint space. Whatever is asked for passes the safety
envelope like a policy's command.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from vla_stack.errors import UserError
from vla_stack.key_map import left_out
from vla_stack.registry import TELEOPERATORS
from vla_stack.runtime.kinematics import Kinematics
from vla_stack.schema import RobotSpec

TOOL_SPEED, TURN_SPEED, JOINT_SPEED, GRIPPER_SPEED = (
    0.15,
    0.8,
    0.5,
    1.5,
)  # m/s, rad/s, rad/s, ratio/s at full deflection


class Intent(NamedTuple):
    """What the hand wants at one control step.

    Attributes:
        engaged: The dead-man is held: the robot may move. Otherwise it holds.
        velocity: float [A], SI units per second; None where there is a target.
        target: float [A], absolute command.
        event: ``success``, ``discard``, ``end``, ``rearm``, ``estop`` or empty.
    """

    engaged: bool
    velocity: NDArray[np.float64] | None = None
    target: NDArray[np.float64] | None = None
    event: str = ""


class Axes(NamedTuple):
    """Deflections in [-1, 1] of a device that knows nothing of robots.

    Attributes:
        engaged: The dead-man is held.
        tool: float [6]: x, y, z forward, left, up; then roll, pitch, yaw about them.
        gripper: 1 opens, -1 closes.
        event: As in :class:`Intent`.
    """

    engaged: bool
    tool: NDArray[np.float64]
    gripper: float
    event: str = ""


class Device(Protocol):
    """Something with axes."""

    HELP: str

    def connect(self) -> None:
        """Raises ``UserError`` where it is not there."""
        ...

    def axes(self) -> Axes:
        """As of now; does not wait."""
        ...

    def disconnect(self) -> None: ...


class Teleop(Protocol):
    """A teleoperator for one robot. Called from one thread, about once a control step.

    Attributes:
        HELP: What to press, for people.
        RECORDED: Whether its commands are a recording's, one for each control step.
    """

    HELP: str
    RECORDED: bool

    def connect(self) -> None: ...

    def read(self, command: NDArray[np.floating]) -> Intent:
        """What the hand wants, given the last command [A]; does not wait."""
        ...

    def disconnect(self) -> None: ...


def make_teleop(name: str, robot: RobotSpec, kinematics: str = "", **kwargs: Any) -> Teleop:
    """A teleoperator by its registered name or ``module:Class``, not connected yet.

    Args:
        name: Which.
        robot: What it drives.
        kinematics: Model for tool motion of a robot in joint space; without one its joints move one by one.
        **kwargs: Of the teleoperator's class.

    Raises:
        UserError: There is none of that name, or it takes no such argument.
    """
    kind = TELEOPERATORS.get(name)
    try:
        if hasattr(kind, "axes"):
            return ToolControl(kind(**kwargs), robot, kinematics)
        made: Teleop = kind(robot, **kwargs)
    except TypeError as e:
        raise UserError(f"teleoperator '{name}': {e}", f"its arguments are described in {kind.__module__}") from e
    return made


class ToolControl:
    """A device's axes as velocities of a robot.

    Tool commands (``tcp_x.pos``, ...) take the axes as they are. A robot in joint space moves its tool by differential
    inverse kinematics; without a model the first six axes turn its first six joints. Wheels stand still: there are no
    axes left for them.

    Raises:
        UserError: The robot has neither a tool nor joints that could be moved.
    """

    RECORDED = False

    def __init__(self, device: Device, robot: RobotSpec, kinematics: str = "") -> None:
        self._device, self._robot = device, robot
        self.HELP = device.HELP + left_out(robot)
        self._kinematics = Kinematics(kinematics, robot) if kinematics else None
        names = [d.name for d in robot.action]
        self._gripper = np.flatnonzero(robot.gripper_mask)
        tool = ("tcp_x.pos", "tcp_y.pos", "tcp_z.pos", "tcp_roll.pos", "tcp_pitch.pos", "tcp_yaw.pos")
        self._tool = {names.index(name): axis for axis, name in enumerate(tool) if name in names}
        if not self._tool and self._kinematics is None:
            joints = [i for i, d in enumerate(robot.action) if d.unit == "rad" and i not in self._gripper]
            self._joints = dict(zip(joints, range(6), strict=False))
            if not joints:
                raise UserError(
                    f"{robot.name} has no joint that an axis could turn", "drive it by another teleoperator"
                )

    def connect(self) -> None:
        self._device.connect()

    def disconnect(self) -> None:
        self._device.disconnect()

    def read(self, command: NDArray[np.floating]) -> Intent:
        axes = self._device.axes()
        speeds = np.array([TOOL_SPEED] * 3 + [TURN_SPEED] * 3)
        twist = axes.tool * speeds
        velocity: NDArray[np.float64] = np.zeros(len(self._robot.action))
        if self._tool:
            for i, axis in self._tool.items():
                velocity[i] = twist[axis]
        elif self._kinematics is not None:
            turns = bool(axes.tool[3:].any())
            if axes.tool.any():
                velocity = self._kinematics.joint_velocity(command, twist if turns else twist[:3])
        else:
            for i, axis in self._joints.items():
                velocity[i] = axes.tool[axis] * JOINT_SPEED
        velocity[self._gripper] = axes.gripper * GRIPPER_SPEED
        return Intent(axes.engaged, velocity=velocity, event=axes.event)

"""What the guardian has to know of a LeRobot robot's buses, and the one way to let its motors go."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from robot_drivers.guarding import GuardedBus
from robot_drivers.lerobot_port import arms, buses, insist, shared
from robot_drivers.lerobot_reopen import let_go, registers

POSITION, VELOCITY = 0, 1  # values of Feetech's Operating_Mode that have a rest without letting go
NEEDED = ("Present_Position", "Goal_Position", "Goal_Velocity")


def guarded_buses(robot: Any) -> list[GuardedBus]:
    """The buses of a connected robot; none where the guardian does not speak to every motor that it has.

    Raises:
        ConnectionError: A motor does not say in which mode it is.
    """
    found = buses(robot)
    if not sys.platform.startswith("linux") or len(found) < len(arms(robot)):
        return []
    guarded = []
    for prefix, bus in found.items():
        if getattr(bus, "protocol_version", None) != 0 or not {"Operating_Mode", *NEEDED} <= registers(bus):
            return []
        tables = [bus.model_ctrl_table[motor.model] for motor in bus.motors.values()]
        first, *others = [[table[name] for name in NEEDED] for table in tables]
        if any(other != first for other in others) or {size for _, size in first} != {2}:
            return []
        modes = insist(arms(robot)[prefix], partial(bus.sync_read, "Operating_Mode", normalize=False))
        if set(modes.values()) - {POSITION, VELOCITY}:
            return []
        ids = {kind: [bus.motors[name].id for name, mode in modes.items() if mode == kind] for kind in (0, 1)}
        guarded.append(
            GuardedBus(
                str(bus.port), int(bus.port_handler.baudrate), ids[POSITION], ids[VELOCITY], *(at for at, _ in first)
            )
        )
    return guarded


def release(robot: Any) -> None:
    """Switch the motors off. An arm without brakes falls: only for a person who asks for it.

    Raises:
        ConnectionError: A motor does not answer, or the robot has none that can be asked.
    """
    found = buses(robot)
    if len(found) < len(arms(robot)):
        raise ConnectionError(f"{robot.name} has motors that are not on a bus")
    try:
        for prefix, bus in found.items():
            if not bus.is_connected:
                with shared(bus):  # a person's wish counts, whoever drives it
                    bus.connect()
            insist(arms(robot)[prefix], bus.disable_torque)
    finally:
        let_go(robot)

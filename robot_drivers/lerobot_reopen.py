"""Opening a LeRobot robot again after its bus was lost, without letting its motors go.

LeRobot's own ``connect`` configures the motors, for which it switches them off, and its ``disconnect`` switches them
off for good: an arm without brakes falls. A bus is lost when a plug is pulled or a cable spoils what it carries, and
then the motors hold all the while. So here a port is opened and asked, and nothing else is said to motors that hold.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from robot_drivers.lerobot_port import arms, buses, insist, unhurried


def let_go(device: Any) -> None:
    """Close the ports of what may be half open, without a word to the motors; other devices are left alone."""
    for bus in buses(device).values():
        port = getattr(bus, "port_handler", None)
        with contextlib.suppress(Exception):
            if port is None:
                bus.disconnect(disable_torque=False)
            else:
                port.closePort()
        if port is not None:
            port.is_open = port.is_using = False


def join(robot: Any) -> None:
    """Connect a robot for the first time; motors that hold already, since another program left them so, go on holding.

    One that is not calibrated is left connected as it is.

    Raises:
        Exception: It cannot be opened; LeRobot's errors have no common class.
    """
    found = buses(robot)
    known = len(found) == len(arms(robot)) and all("Torque_Enable" in registers(bus) for bus in found.values())
    if not known or any(getattr(arm, "cameras", None) for arm in (robot, *arms(robot).values())):
        robot.connect(calibrate=False)  # it has more than motors to connect
        return
    for bus in found.values():
        bus.connect()
    if robot.is_calibrated:
        for prefix, bus in found.items():
            _switch_on(arms(robot)[prefix], bus)


def reopen(robot: Any, brake: Callable[[], object] | None = None) -> None:
    """Open a robot that was connected once more; motors that hold go on holding.

    Motors that have all lost their power are configured and switched on as LeRobot does it; one that is off among
    others that hold is switched on where it is.

    Args:
        robot: Whose ports it opens.
        brake: Brings it to rest as far as that goes without answers; called as soon as the ports are open.

    Raises:
        Exception: It cannot be opened, or has another calibration; LeRobot's errors have no common class.
    """
    let_go(robot)
    with unhurried(robot):  # no control loop waits for these answers
        _open(robot, brake)


def _open(robot: Any, brake: Callable[[], object] | None) -> None:
    found = buses(robot)
    if brake is not None:  # a wheel turns until it is told otherwise, and motors may hear that cannot be heard
        for bus in found.values():
            bus.connect(handshake=False)
        brake()
        for bus in found.values():
            bus._handshake()
    elif all(hasattr(bus, "connect") for bus in found.values()) and len(found) == len(arms(robot)):
        for bus in found.values():
            bus.connect()
    elif not robot.is_connected:  # who has no bus that we know opens itself, or is still open
        robot.connect(calibrate=False)
    if not robot.is_calibrated:
        raise ConnectionError("its calibration is not the one it had")
    for prefix, bus in found.items():
        if "Torque_Enable" in registers(bus):
            _switch_on(arms(robot)[prefix], bus)


def registers(bus: Any) -> set[str]:
    """Registers that all of a bus's motors have; none where motors have no registers."""
    tables = getattr(bus, "model_ctrl_table", None)
    if not tables:
        return set()
    return set.intersection(*(set(tables[motor.model]) for motor in bus.motors.values()))


def _switch_on(arm: Any, bus: Any) -> None:
    def ask(register: str, motor: str) -> int:
        return int(insist(arm, lambda: bus.read(register, motor, normalize=False)))

    limp = [motor for motor in bus.motors if not ask("Torque_Enable", motor)]
    if len(limp) == len(bus.motors):
        arm.configure()
        return
    for motor in limp:
        bus.write("Goal_Position", motor, ask("Present_Position", motor), normalize=False)
        bus.enable_torque(motor)

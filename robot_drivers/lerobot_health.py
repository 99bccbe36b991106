"""Whether a robot's motors are well: load, the alarms that they raise themselves, joints that do not follow.

Registers beyond the positions are read in turn, one kind a reading and only some readings, so that the bus keeps time
for positions. What LeRobot's own drivers ignore is looked at here: a servo in overload protection switches its torque
off and says so in its status register alone.

A servo's answer does not say what was asked, and the SDK takes a late one for the answer to the next question: a status
byte and its checksum then read as a position. So other registers are read only while answers are prompt, without
retries, and after one that failed or was slow the line is left to fall silent; and :func:`impossible` looks at every
reading.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robot_drivers.lerobot_port import buses, silence
from robot_drivers.lerobot_reopen import registers
from vla_stack.errors import UserError
from vla_stack.runtime.driver import Fault
from vla_stack.schema import RobotSpec

EVERY_S = 0.1  # between two readings of extra registers
FOLLOW_RAD, FOLLOW_S = 0.35, 1.0  # a joint this far from its goal that has not moved for this long is stuck
STILL_RAD = 0.02
PROMPT_S = 0.015  # an exchange that takes longer may have answers under way
FARTHEST_RAD, FARTHEST_RATIO = 2 * np.pi, 2.0  # no calibrated joint reads more
JUMP_RAD, JUMP_S = 1.0, 0.2  # no joint moves so far between two readings that are less than this apart
LOAD_UNIT = 0.001  # Feetech: of the rated torque
ALARMS = {
    0: "voltage",
    1: "sensor",
    2: "over-temperature",
    3: "over-current",
    5: "overload",
}  # bits of Feetech's Status


class Health:
    """Watches one connected robot; used by the thread that reads it.

    Args:
        robot: The LeRobot robot.
        spec: Its description.
        max_load: Action dimension -> share of rated torque.

    Attributes:
        fault: What is wrong, None where all is well; ``load``, ``motor`` or ``following``, each stops the robot.

    Raises:
        UserError: ``max_load`` names an unknown dimension, or the robot does not report loads.
    """

    def __init__(self, robot: Any, spec: RobotSpec, max_load: Mapping[str, float]) -> None:
        self.fault: Fault | None = None
        self._robot, self._spec = robot, spec
        self._buses = buses(robot)
        tables = [registers(bus) for bus in self._buses.values()]
        table = set.intersection(*tables) if tables else set()
        self._max_load = {name.removesuffix(".pos"): limit for name, limit in max_load.items()}
        for name in self._max_load:
            if name not in {d.name.removesuffix(".pos") for d in spec.action}:
                raise UserError(f"max_load: {spec.name} has no action dimension '{name}'")
        if self._max_load and "Present_Load" not in table:
            raise UserError(f"{spec.name} does not report loads", "remove max_load")
        self._checks = [self._check_load] if self._max_load else []
        if "Status" in table:
            self._checks.append(self._check_alarms)
        self._next_s, self._turn = 0.0, 0
        self._overloads = self._alarms = 0
        self._joints = np.array([d.unit == "rad" for d in spec.action])
        self._goal: NDArray[np.float32] | None = None
        self._still_at: NDArray[np.float32] = np.zeros(len(spec.action), np.float32)
        self._still_since: NDArray[np.float64] = np.full(len(spec.action), time.monotonic())

    def commanded(self, goal: NDArray[np.float32]) -> None:
        """A command [A] was sent."""
        self._goal = goal

    def rest(self) -> None:
        """The robot stands still on purpose."""
        self._goal = None

    def check(self, state: NDArray[np.float32], took_s: float = 0.0) -> None:
        """Look at the motors after a reading [S] that took ``took_s``."""
        now = time.monotonic()
        stuck = self._stuck(state[: len(self._joints)], now)
        if stuck:
            self.fault = Fault("following", stuck, stop=True)
        elif self.fault is not None and self.fault.kind == "following":
            self.fault = None
        if self._checks and now >= self._next_s and took_s < PROMPT_S:
            self._next_s = now + EVERY_S
            self._turn = (self._turn + 1) % len(self._checks)
            try:
                self._checks[self._turn]()
            except Exception:  # whether the bus is lost is for the positions to say
                silence(self._robot)

    def _stuck(self, at: NDArray[np.float32], now: float) -> str:
        moved = np.abs(at - self._still_at) > STILL_RAD
        self._still_at = np.where(moved, at, self._still_at)
        self._still_since = np.where(moved, now, self._still_since)
        if self._goal is None:
            self._still_since[:] = now
            return ""
        error = np.abs(self._goal - at)
        stuck = self._joints & (error > FOLLOW_RAD)
        self._still_since = np.where(stuck, self._still_since, now)  # a joint near its goal may rest there for ever
        stuck &= now - self._still_since > FOLLOW_S
        if not stuck.any():
            return ""
        i = int(np.flatnonzero(stuck)[0])
        name = self._spec.action[i].name.removesuffix(".pos")
        return f"{name} does not follow: {np.rad2deg(error[i]):.0f} degrees from its goal for {FOLLOW_S:g} s"

    def _check_load(self) -> None:
        loads = self._read("Present_Load")
        over = {
            n: abs(loads[n]) * LOAD_UNIT for n, limit in self._max_load.items() if abs(loads[n]) * LOAD_UNIT > limit
        }
        self._overloads = self._overloads + 1 if over else 0
        if self._overloads >= 2:  # one reading may be the start of a motion
            name, load = max(over.items(), key=lambda item: item[1])
            text = f"{name} carries {load:.0%} of its rated torque, the limit is {self._max_load[name]:.0%}"
            self.fault = Fault("load", text, stop=True)
        elif self.fault is not None and self.fault.kind == "load" and not over:
            self.fault = None

    def _check_alarms(self) -> None:
        raised = {n: [text for bit, text in ALARMS.items() if v >> bit & 1] for n, v in self._read("Status").items()}
        bad = [f"{name}: {', '.join(texts)}" for name, texts in raised.items() if texts]
        self._alarms = self._alarms + 1 if bad else 0
        if self._alarms >= 2:
            self.fault = Fault("motor", f"alarm of {'; '.join(bad)}", stop=True)
        elif self.fault is not None and self.fault.kind == "motor" and not bad:
            self.fault = None

    def _read(self, register: str) -> dict[str, int]:
        """Register of each motor, by the name of its features."""
        asked = time.monotonic()
        values: dict[str, int] = {}
        for prefix, bus in self._buses.items():
            read = bus.sync_read(register, normalize=False, num_retry=0)
            values |= {prefix + motor: value for motor, value in read.items()}
        if time.monotonic() - asked > PROMPT_S:
            silence(self._robot)
        return values


def impossible(spec: RobotSpec, state: NDArray[np.floating], before: NDArray[np.floating] | None) -> str:
    """What about a reading [S], or the [A] first of it, cannot be; empty where it may be.

    ``before`` is a reading of just before, if there is.

    An answer to another question, or none at all, reads as a position all the same.
    """
    for i, dim in enumerate(spec.state[: len(spec.action)]):
        x = float(state[i])
        if dim.unit == "rad" and not abs(x) <= FARTHEST_RAD:
            return f"{dim.name} reads {np.rad2deg(x):.0f} degrees"
        if dim.unit == "ratio" and not abs(x) <= FARTHEST_RATIO:
            return f"{dim.name} reads {x:.0%}"
        if dim.unit == "rad" and before is not None and abs(x - float(before[i])) > JUMP_RAD:
            return f"{dim.name} jumps by {np.rad2deg(x - float(before[i])):.0f} degrees"
    return "" if np.isfinite(state).all() else "a reading is not a number"

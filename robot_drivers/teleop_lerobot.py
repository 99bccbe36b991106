"""A LeRobot teleoperator, such as a leader arm, as one of ours: degrees and percent become radians and ratios.

A leader arm has no buttons: how an episode ends is said on the keyboard of the terminal beside it. One that is lost is
opened again in the background; meanwhile the robot holds, and the terminal says why.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robot_drivers.lerobot_build import make_lerobot
from robot_drivers.lerobot_health import JUMP_S, impossible
from robot_drivers.lerobot_port import QUIET_S, hasten, insist, one_line, silence, unhurried
from robot_drivers.lerobot_reopen import let_go
from robot_drivers.lerobot_units import check_units
from robot_drivers.teleop import Intent
from robot_drivers.teleop_keyboard import EVENTS_HELP, Keyboard, terminal_keyboard
from vla_stack.errors import UserError
from vla_stack.lerobot_units import UNITS, factors, unit_of
from vla_stack.schema import RobotSpec

MISSES = 3  # readings in a row that may fail before the robot holds
LOST_S = 0.3  # and for so long before the leader counts as lost
RECONNECT_S = 0.5  # between attempts


class LeRobotLeader:
    """A leader whose joints have the names of the robot's.

    Args:
        robot: What it drives.
        teleop_type: Name under which its config is registered, e.g. ``so101_leader``.
        module: Module to import first, which registers the config.
        units: Feature -> unit where its name does not say, see ``vla_stack.lerobot_units``.
        **config: Fields of its config: ``port``, ``id``, ...

    Attributes:
        trouble: Why the robot holds, one line; empty where the leader answers.
    """

    RECORDED = False
    HELP = "the robot follows the leader; Ctrl-C ends"

    def __init__(
        self,
        robot: RobotSpec,
        teleop_type: str,
        module: str | None = None,
        units: Mapping[str, str] | None = None,
        **config: Any,
    ) -> None:
        self._robot, units = robot, dict(units or {})
        self._names = [d.name for d in robot.action]
        self._factors = factors(self._names, units)
        self._type = teleop_type
        self._leader = make_lerobot("teleoperator", teleop_type, config, module)
        check_units(self._leader, teleop_type, units)
        for dim in robot.action:
            if (unit := UNITS[unit_of(dim.name, units)][1]) != dim.unit:
                text = f"{teleop_type} gives '{dim.name}' in {unit}, {robot.name} takes {dim.unit}"
                raise UserError(text, "say with the teleoperator's units what it speaks")
        self._budget_s = 0.5 * robot.dt - QUIET_S
        self._lock = threading.Lock()  # held by who uses the bus
        self._last: NDArray[np.float64] | None = None
        self._last_s = 0.0
        self._misses = 0
        self._lost = False
        self._ended = threading.Event()
        self.trouble = ""
        self._keyboard: Keyboard | None = None  # where the program runs in a terminal

    def connect(self) -> None:
        """Connect and check the calibration.

        Raises:
            UserError: It does not answer, is not calibrated, is a leader of another robot, or another program has it.
        """
        try:
            self._leader.connect(calibrate=False)
        except UserError:  # another program has its port
            let_go(self._leader)
            raise
        except Exception as e:
            raise UserError(f"{self._type}: {one_line(e)}", "check port, power and cables") from e
        if not self._leader.is_calibrated:
            self._leader.disconnect()
            raise UserError(
                f"{self._type} is not calibrated", f"run: vla robot calibrate --teleop.type={self._type} ..."
            )
        missing = [name for name in self._names if name not in self._leader.action_features]
        if missing:
            self._leader.disconnect()
            raise UserError(f"{self._type} has no '{missing[0]}'", f"it has {', '.join(self._leader.action_features)}")
        try:
            hasten(self._leader, self._leader.get_action)
        except Exception as e:
            self._leader.disconnect()
            raise UserError(f"{self._type} cannot be read: {one_line(e)}", "check power and cables") from e
        if (keyboard := terminal_keyboard()) is not None:
            keyboard.connect()
            self._keyboard, self.HELP = keyboard, f"the robot follows the leader; {EVENTS_HELP}, Ctrl-C stops recording"

    def read(self, command: NDArray[np.floating]) -> Intent:
        """Where the leader is, and the event that was typed; a failed reading repeats the last, several disengage."""
        if not self._lost:
            self._ask()
        engaged = self._last is not None and self._misses <= MISSES
        event = self._keyboard.axes().event if self._keyboard is not None else ""
        return Intent(engaged, target=self._last, event=event)

    def disconnect(self) -> None:
        self._ended.set()
        if self._keyboard is not None:
            self._keyboard.disconnect()
            self._keyboard = None
        with self._lock:
            if self._leader.is_connected:
                self._leader.disconnect()

    def _ask(self) -> None:
        with self._lock:
            try:
                self._take(insist(self._leader, self._leader.get_action, self._budget_s))
                self._misses = 0
                return
            except Exception as e:  # serial and SDK errors have no common class
                error = e
                silence(self._leader)
        self._misses += 1
        gone = not isinstance(error, (ConnectionError, RuntimeError, TimeoutError))
        if gone or self._misses > max(MISSES, LOST_S / self._robot.dt):
            self._lost, self._misses = True, MISSES + 1
            self.trouble = f"{self._type} is lost, trying to reconnect: {one_line(error)}"
            print(f"\n{self.trouble}; the robot holds", file=sys.stderr, flush=True)
            threading.Thread(target=self._reconnect, daemon=True, name="reconnect leader").start()

    def _take(self, action: Mapping[str, float]) -> None:
        """Keep a reading; raises ``ConnectionError`` where it cannot be one."""
        state = np.array([action[name] for name in self._names], np.float64) * self._factors
        now = time.monotonic()
        before = self._last if now - self._last_s < JUMP_S else None
        if why := impossible(self._robot, state, before):
            raise ConnectionError(why)
        self._last, self._last_s = state, now

    def _reconnect(self) -> None:
        """Open the leader again until it answers."""
        while not self._ended.is_set():
            with self._lock:
                if self._ended.is_set():
                    return
                try:
                    let_go(self._leader)
                    if not self._leader.is_connected:  # it has no torque to lose: LeRobot's own way is safe
                        with unhurried(self._leader):
                            self._leader.connect(calibrate=False)
                    if not self._leader.is_calibrated:
                        raise ConnectionError("its calibration is not the one it had")
                    self._take(insist(self._leader, self._leader.get_action))
                    self._misses, self.trouble, self._lost = 0, "", False
                    print(f"{self._type} answers again", file=sys.stderr, flush=True)
                    return
                except Exception as e:
                    self.trouble = f"{self._type} is lost, trying to reconnect: {one_line(e)}"
            self._ended.wait(RECONNECT_S)

"""A LeRobot teleoperator, such as a leader arm, as one of ours: degrees and percent become radians and ratios.

A leader arm has no buttons: how an episode ends is said on the keyboard of the terminal beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robot_drivers.lerobot_build import make_lerobot
from robot_drivers.lerobot_port import insist, silence
from robot_drivers.lerobot_units import factors
from robot_drivers.teleop import Intent
from robot_drivers.teleop_keyboard import EVENTS_HELP, Keyboard, terminal_keyboard
from vla_stack.errors import UserError
from vla_stack.schema import RobotSpec

MISSES = 3  # readings in a row that may fail before the robot holds


class LeRobotLeader:
    """A leader whose joints have the names of the robot's.

    Args:
        robot: What it drives.
        teleop_type: Name under which its config is registered, e.g. ``so101_leader``.
        module: Module to import first, which registers the config.
        units: Feature -> unit where its name does not say, see ``lerobot_units``.
        **config: Fields of its config: ``port``, ``id``, ...
    """

    HELP = "the robot follows the leader; Ctrl-C ends"

    def __init__(
        self,
        robot: RobotSpec,
        teleop_type: str,
        module: str | None = None,
        units: Mapping[str, str] | None = None,
        **config: Any,
    ) -> None:
        self._names = [d.name for d in robot.action]
        self._factors = factors(self._names, dict(units or {}))
        self._type = teleop_type
        self._leader = make_lerobot("teleoperator", teleop_type, config, module)
        self._last: NDArray[np.float64] | None = None
        self._misses = 0
        self._keyboard: Keyboard | None = None  # where the program runs in a terminal

    def connect(self) -> None:
        """Connect and check the calibration.

        Raises:
            UserError: It does not answer, is not calibrated, or is a leader of another robot.
        """
        try:
            self._leader.connect(calibrate=False)
        except Exception as e:
            raise UserError(f"{self._type}: {' '.join(str(e).split())}", "check port, power and cables") from e
        if not self._leader.is_calibrated:
            self._leader.disconnect()
            raise UserError(
                f"{self._type} is not calibrated", f"run: vla robot calibrate --teleop.type={self._type} ..."
            )
        missing = [name for name in self._names if name not in self._leader.action_features]
        if missing:
            self._leader.disconnect()
            raise UserError(f"{self._type} has no '{missing[0]}'", f"it has {', '.join(self._leader.action_features)}")
        if (keyboard := terminal_keyboard()) is not None:
            keyboard.connect()
            self._keyboard, self.HELP = keyboard, f"the robot follows the leader; {EVENTS_HELP}, Ctrl-C stops recording"

    def read(self, command: NDArray[np.floating]) -> Intent:
        """Where the leader is, and the event that was typed; a failed reading repeats the last, several disengage."""
        try:
            action = insist(self._leader, self._leader.get_action)
            self._last = np.array([action[name] for name in self._names], np.float64) * self._factors
            self._misses = 0
        except Exception:  # serial and SDK errors have no common class
            self._misses += 1
            silence(self._leader)
        engaged = self._last is not None and self._misses <= MISSES
        event = self._keyboard.axes().event if self._keyboard is not None else ""
        return Intent(engaged, target=self._last, event=event)

    def disconnect(self) -> None:
        if self._keyboard is not None:
            self._keyboard.disconnect()
            self._keyboard = None
        if self._leader.is_connected:
            self._leader.disconnect()

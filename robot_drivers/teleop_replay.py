"""The commands of a recorded episode as a teleoperator: the same motion again, on this robot."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from robot_drivers.replay import recorded_actions
from robot_drivers.teleop import Intent
from vla_stack.errors import UserError
from vla_stack.schema import ACTION, RobotSpec


class Replay:
    """Plays one episode, one command a control step, and ends.

    Args:
        robot: What it drives.
        root: A dataset of that robot.
        episode: Which.
    """

    RECORDED = True
    HELP = "a recorded episode plays; Ctrl-C ends"

    def __init__(self, robot: RobotSpec, root: str, episode: int = 0) -> None:
        data, self._actions = recorded_actions(root, episode)
        names, ours = list(data.features[ACTION]["names"]), [d.name for d in robot.action]
        if names != ours:
            raise UserError(f"{root} commands {', '.join(names)}", f"the robot takes {', '.join(ours)}")
        self._next = 0

    def connect(self) -> None: ...

    def read(self, command: NDArray[np.floating]) -> Intent:
        row = self._actions[min(self._next, len(self._actions) - 1)].astype(np.float64)
        self._next += 1
        return Intent(True, target=row, event="end" if self._next > len(self._actions) else "")

    def disconnect(self) -> None: ...

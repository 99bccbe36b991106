"""What an arm's actuators are told within one control step."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray


class Drives:
    """Targets of joints and gripper in the last control steps, [N, J+1], newest last.

    Args:
        actuators: J+1; the gripper's is the last.
        interpolates: Whether joints move along a line from target to target, else at once, as a gripper does.
        latest: The most that commands are late, control steps; as many targets are remembered, three at least.
    """

    def __init__(self, actuators: int, interpolates: bool, latest: float = 0.0) -> None:
        self.targets: NDArray[np.float64] = np.zeros((2 + max(1, math.ceil(latest)), actuators))
        self._switched = slice(-1 if interpolates else 0, None)

    @property
    def joints(self) -> NDArray[np.float64]:
        """The newest targets of the joints, [J]."""
        return self.targets[-1, :-1]

    def rest_at(self, targets: NDArray[np.float64]) -> None:
        """As if these [J+1] had been commanded for long."""
        self.targets[:] = targets

    def path(self, targets: NDArray[np.float64], substeps: int, late: float) -> NDArray[np.float64]:
        """Take new targets; what is commanded in each substep, [substeps, J+1], ``late`` control steps too late."""
        self.targets = np.vstack([self.targets[1:], targets])
        s = np.arange(1, substeps + 1) / substeps - late  # 0: the target before the newest, 1: the newest
        back = np.maximum(np.ceil(-s), 0).astype(int)  # steps between the newest line and that which is being moved on
        begin, end = self.targets[-2 - back], self.targets[-1 - back]
        along = (s + np.maximum(back - 1, 0))[:, None] * (end - begin)
        path = np.where(back[:, None] == 0, begin, end) + along
        reached = self.targets[np.minimum(-1, np.ceil(s).astype(int) - 2)]
        path[:, self._switched] = reached[:, self._switched]
        return path

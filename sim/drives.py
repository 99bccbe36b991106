"""What an arm's actuators are told within one control step."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class Drives:
    """Targets of joints and gripper in the last three control steps, [3, J+1], newest last.

    Args:
        actuators: J+1; the gripper's is the last.
        interpolates: Whether joints move along a line from target to target, else at once, as a gripper does.
    """

    def __init__(self, actuators: int, interpolates: bool) -> None:
        self.targets: NDArray[np.float64] = np.zeros((3, actuators))
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
        oldest, old, new = self.targets
        s = np.arange(1, substeps + 1)[:, None] / substeps - late
        path = np.where(s >= 0, old + s * (new - old), old + s * (old - oldest))
        jumps = self._switched
        path[:, jumps] = np.where(s > 0, new[jumps], old[jumps])
        return path

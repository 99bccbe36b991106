"""What a task is made of, besides its environment class."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Variant = dict[str, str]  # what an episode asks for, e.g. {"colour": "red"}
LIMIT_RATE_HZ = 10.0  # control steps a second that time limits are written down for


@dataclass(frozen=True)
class TaskConfig:
    """What a task's ``default_config()`` returns.

    Attributes:
        max_episode_steps: Control steps at :data:`LIMIT_RATE_HZ` after which an episode is truncated.
        rewards: Stage name -> reward when the stage is first reached (``reward="staged"``), in order; sums to one.
        start: Where the tool starts before its jitter, (x, y, z) in metres.
    """

    max_episode_steps: int
    rewards: dict[str, float]
    start: tuple[float, float, float] = (0.44, 0.0, 0.20)

    def limit(self, rate_hz: float) -> int:
        """Control steps after which an episode is truncated at a control rate in Hz: always the same seconds."""
        return max(1, round(self.max_episode_steps * rate_hz / LIMIT_RATE_HZ))


@dataclass(frozen=True)
class ToolGoal:
    """Where a scripted expert wants the tool: (x, y, z) in metres, yaw in radians, opening ratio."""

    position: NDArray[np.float64]
    yaw: float
    gripper: float

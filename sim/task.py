"""What a task is made of, besides its environment class."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Variant = dict[str, str]  # what an episode asks for, e.g. {"colour": "red"}


@dataclass(frozen=True)
class TaskConfig:
    """What a task's ``default_config()`` returns.

    Attributes:
        max_episode_steps: Control steps at 10 Hz after which an episode is truncated.
        rewards: Stage name -> reward when the stage is first reached (``reward="staged"``), in order; sums to one.
        start: Where the tool starts before its jitter, (x, y, z) in metres.
    """

    max_episode_steps: int
    rewards: dict[str, float]
    start: tuple[float, float, float] = (0.44, 0.0, 0.20)


@dataclass(frozen=True)
class ToolGoal:
    """Where a scripted expert wants the tool: (x, y, z) in metres, yaw in radians, opening ratio."""

    position: NDArray[np.float64]
    yaw: float
    gripper: float

"""The tasks, and their registration with gymnasium."""

from __future__ import annotations

from dataclasses import dataclass

import gymnasium as gym

from sim.arm import Arm
from sim.env import ArmEnv
from sim.task import Variant
from sim.tasks.conveyor import Conveyor
from sim.tasks.drawer import Drawer
from sim.tasks.insert import Insert
from sim.tasks.obstacle import Obstacle
from sim.tasks.pick import Pick
from sim.tasks.place import Place
from sim.tasks.push import Push
from sim.tasks.so101_pick import So101Pick
from sim.tasks.stack import Stack

_TASKS: tuple[type[ArmEnv], ...] = (Pick, Place, Push, Stack, Insert, Drawer, Obstacle, Conveyor, So101Pick)


@dataclass(frozen=True)
class TaskInfo:
    """What is known of a task without building it.

    Attributes:
        id: gymnasium id.
        max_episode_steps: Control steps after which an episode is truncated.
        variants: What an episode may ask for, e.g. ``({"colour": "red"}, ...)``.
        instructions: The instruction of each variant.
        stages: Stage names in order.
        arm: Which arm does it.
    """

    id: str
    max_episode_steps: int
    variants: tuple[Variant, ...]
    instructions: tuple[str, ...]
    stages: tuple[str, ...]
    arm: Arm


TASKS: dict[str, TaskInfo] = {
    t.name: TaskInfo(
        id=f"sim/{t.name}-v0",
        max_episode_steps=t.config.max_episode_steps,
        variants=t.variants,
        instructions=tuple(t.instruct(v) for v in t.variants),
        stages=tuple(t.config.rewards),
        arm=t.arm,
    )
    for t in _TASKS
}

for _task in _TASKS:
    gym.register(
        id=TASKS[_task.name].id,
        entry_point=f"{_task.__module__}:{_task.__qualname__}",
        max_episode_steps=_task.config.max_episode_steps,
    )

"""The tasks, and their registration with gymnasium."""

from __future__ import annotations

from dataclasses import dataclass

import gymnasium as gym
from gymnasium.envs.registration import WrapperSpec
from gymnasium.wrappers import TimeLimit

from sim.arm import Arm
from sim.env import ArmEnv
from sim.task import TaskConfig, Variant
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
        config: Its time limit, stages and start.
        variants: What an episode may ask for, e.g. ``({"colour": "red"}, ...)``.
        instructions: The instruction of each variant.
        stages: Stage names in order.
        arm: Which arm does it.
    """

    id: str
    config: TaskConfig
    variants: tuple[Variant, ...]
    instructions: tuple[str, ...]
    stages: tuple[str, ...]
    arm: Arm

    @property
    def max_episode_steps(self) -> int:
        """Control steps at 10 Hz after which an episode is truncated."""
        return self.config.max_episode_steps

    def limit(self, rate_hz: float) -> int:
        """The same at another control rate, Hz."""
        return self.config.limit(rate_hz)


class OwnLimit(TimeLimit):
    """The time limit of a task at the rate of its environment, unless ``gymnasium.make`` was given another one.

    A registered limit would be one number of steps for all rates.
    """

    def __init__(self, env: gym.Env) -> None:
        given = env.spec.max_episode_steps if env.spec else None
        task: ArmEnv = env.unwrapped  # type: ignore[assignment]
        super().__init__(env, given or task.config.limit(task.spec_robot.rate_hz))


TASKS: dict[str, TaskInfo] = {
    t.name: TaskInfo(
        id=f"sim/{t.name}-v0",
        config=t.config,
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
        additional_wrappers=(WrapperSpec("OwnLimit", f"{__name__}:{OwnLimit.__name__}", {}),),
    )

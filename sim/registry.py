"""The tasks, and their registration with gymnasium: those of the registry, of this project and of other packages.

A task that is not registered is named by its class, ``module:Class``, which is its gymnasium id as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import gymnasium as gym
from gymnasium.envs.registration import WrapperSpec
from gymnasium.wrappers import TimeLimit

from sim.arm import Arm
from sim.env import ArmEnv
from sim.task import TaskConfig, Variant
from vla_stack import registry
from vla_stack.errors import UserError


@dataclass(frozen=True)
class TaskInfo:
    """What is known of a task without building it.

    Attributes:
        id: gymnasium id; ``module:Class`` of a task that is named so.
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


class Tasks(Mapping[str, TaskInfo]):
    """The registered tasks by name, others by ``module:Class``; imported when looked up, or a ``UserError``."""

    def __getitem__(self, name: str) -> TaskInfo:
        task: type[ArmEnv] = registry.TASKS.get(name)
        if not (isinstance(task, type) and issubclass(task, ArmEnv)):
            raise UserError(f"'{name}' is no task", "a task is a subclass of sim.env.ArmEnv")
        if ":" in name:
            _register(name.partition(":")[2], name)  # gymnasium imports the module, then looks for the rest
        return TaskInfo(
            id=task_id(name),
            config=task.config,
            variants=task.variants,
            instructions=tuple(task.instruct(v) for v in task.variants),
            stages=tuple(task.config.rewards),
            arm=task.arm,
        )

    def __contains__(self, name: object) -> bool:
        return name in registry.TASKS.names()

    def __iter__(self) -> Iterator[str]:
        return iter(registry.TASKS.names())

    def __len__(self) -> int:
        return len(registry.TASKS.names())


def task_id(name: str) -> str:
    """The gymnasium id of a task."""
    return name if ":" in name else f"sim/{name}-v0"


def is_task(env_id: str) -> bool:
    """Whether an environment's id is one of a task, ``sim/<name>-v0`` or ``module:Class``; imports that module."""
    if not env_id.partition(":")[2].isidentifier():
        return env_id.startswith("sim/")
    try:
        return bool(TASKS[env_id])
    except UserError:  # an environment that its module registers with gymnasium, or nothing at all
        return False


def _register(env_id: str, target: str) -> None:
    own_limit = WrapperSpec("OwnLimit", f"{__name__}:{OwnLimit.__name__}", {})
    known = gym.registry.get(env_id)
    if known is None or known.entry_point != target:
        gym.register(env_id, target, additional_wrappers=(own_limit,))


TASKS = Tasks()
for _entry in registry.TASKS.entries().values():
    _register(task_id(_entry.name), _entry.target)

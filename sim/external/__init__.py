"""Benchmarks of other projects in this project's observation form: MetaWorld, gym-aloha, LIBERO, installed packages'.

An id is ``<family>/<task>``, what LeRobot calls ``--env.type`` and ``--env.task``: ``metaworld/push-v3``,
``aloha/transfer_cube``, ``libero/libero_spatial/3`` (suite and index of the task). The packages are optional; nothing
of them is imported before an environment is made.
"""

from __future__ import annotations

from typing import Any, Protocol

import gymnasium as gym

from sim.external.benchmark import BenchmarkEnv, BenchmarkExpert
from vla_stack.errors import UserError
from vla_stack.registry import BENCHMARKS
from vla_stack.schema import RobotSpec


class Benchmark(Protocol):
    """A module that is registered as a benchmark."""

    def make(self, task: str, **options: Any) -> BenchmarkEnv:
        """A task's environment."""
        ...

    def options_like(self, robot: RobotSpec | None) -> dict[str, Any]:
        """Keyword arguments with which a task becomes what a policy was trained on, beside cameras and image size.

        None: the policy left no description of its robot.
        """
        ...


def is_external(env_id: str) -> bool:
    """Whether an id is ``<benchmark>/<task>`` of a registered benchmark."""
    family, slash, _ = env_id.partition("/")
    return bool(slash) and family in BENCHMARKS.names()


def benchmark(env_id: str) -> Benchmark:
    """The benchmark that an id names; raises :class:`UserError` where its package is not installed."""
    try:
        found: Benchmark = BENCHMARKS.get(env_id.partition("/")[0])
    except ModuleNotFoundError as e:
        package = str(e.name).partition(".")[0]
        raise UserError(f"{env_id} needs the package '{package}'", 'pip install "vla-stack[sim-extra]"') from None
    return found


def make(env_id: str, **options: Any) -> gym.Env:
    """An external environment, truncated after its benchmark's number of steps.

    Args:
        env_id: For example ``metaworld/push-v3``.
        options: Keyword arguments of the family's class, e.g. ``cameras``, ``image_size``, ``control_hz``, ``visuals``;
            ``max_episode_steps`` overrides the benchmark's limit, in control steps.

    Raises:
        UserError: The package is not installed, there is no such task, or an option is not valid.
    """
    limit = options.pop("max_episode_steps", None)
    sizes = options.get("image_size", 1)
    numbers = {"max_episode_steps": 1 if limit is None else limit, "control_hz": options.get("control_hz", 1.0)}
    numbers["image_size"] = min(sizes) if isinstance(sizes, tuple | list) else sizes
    for name, value in numbers.items():
        if not value > 0:
            raise UserError(f"{env_id}: {name}={value} is not positive", "leave it out for the benchmark's own")
    try:
        env = benchmark(env_id).make(env_id.partition("/")[2], **options)
    except TypeError as e:
        raise UserError(f"{env_id} does not take these options: {e}") from e
    return gym.wrappers.TimeLimit(env, env.default_steps if limit is None else limit)


def make_expert(env: gym.Env, noise: float = 0.0, seed: int = 0) -> BenchmarkExpert:
    """The scripted expert of an external environment; call after each ``reset``.

    Raises:
        UserError: The benchmark has no expert for this task.
    """
    return env.unwrapped.make_expert(noise, seed)  # type: ignore[attr-defined]

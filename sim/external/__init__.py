"""Benchmarks of other projects in this project's observation form: MetaWorld, gym-aloha and LIBERO.

An id is ``<family>/<task>``, what LeRobot calls ``--env.type`` and ``--env.task``: ``metaworld/push-v3``,
``aloha/transfer_cube``, ``libero/libero_spatial/3`` (suite and index of the task). The packages are optional; nothing
of them is imported before an environment is made.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import gymnasium as gym

from sim.external.benchmark import BenchmarkEnv, BenchmarkExpert
from vla_stack.errors import UserError
from vla_stack.registry import BENCHMARKS


@dataclass(frozen=True)
class Family:
    """Where a family of tasks comes from: the package that must be there, and the line that installs it."""

    package: str
    install: str


FAMILIES = {
    "metaworld": Family("metaworld", "in the clone: pip install -e '.[sim-extra]'"),
    "aloha": Family("gym_aloha", "in the clone: pip install -e '.[sim-extra]'"),
    "libero": Family("libero", "docs/benchmarks.md has the lines that install LIBERO"),
}


def is_external(env_id: str) -> bool:
    """Whether an id belongs to one of :data:`FAMILIES`."""
    return env_id.partition("/")[0] in FAMILIES and "/" in env_id


def make(env_id: str, **options: Any) -> gym.Env:
    """An external environment, truncated after its benchmark's number of steps.

    Args:
        env_id: For example ``metaworld/push-v3``.
        options: Keyword arguments of the family's class, e.g. ``cameras``, ``image_size``, ``control_hz``, ``visuals``;
            ``max_episode_steps`` overrides the benchmark's limit, in control steps.

    Raises:
        UserError: The package is not installed, there is no such task, or an option is not valid.
    """
    name, _, task = env_id.partition("/")
    family = FAMILIES[name]
    if importlib.util.find_spec(family.package) is None:
        raise UserError(f"{env_id} needs the package '{family.package}'", family.install)
    limit = options.pop("max_episode_steps", None)
    try:
        env: BenchmarkEnv = BENCHMARKS.get(name).make(task, **options)
    except TypeError as e:
        raise UserError(f"{env_id} does not take these options: {e}") from e
    return gym.wrappers.TimeLimit(env, limit or env.default_steps)


def make_expert(env: gym.Env, noise: float = 0.0, seed: int = 0) -> BenchmarkExpert:
    """The scripted expert of an external environment; call after each ``reset``.

    Raises:
        UserError: The benchmark has no expert for this task.
    """
    return env.unwrapped.make_expert(noise, seed)  # type: ignore[attr-defined]

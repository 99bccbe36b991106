"""The simulator behind the imagined environment's class: what it shows is true, so a difference is the class's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

import sim  # noqa: F401  registers the tasks
from vla_stack.schema import RobotSpec
from vla_stack.world_model.imagined_rows import ImaginedFrame


class Oracle:
    """A :class:`vla_stack.world_model.imagined_rows.Backend` that renders instead of imagining.

    Args:
        env_id: A task of ``sim``.
        rows: Number of rollouts.
        options: Keyword arguments of the environment.
    """

    def __init__(self, env_id: str, rows: int, **options: Any) -> None:
        made = [gym.make(env_id, **options) for _ in range(rows)]
        self._max_steps = int(made[0].spec.max_episode_steps)  # type: ignore[union-attr, arg-type]
        self.envs: list[Any] = [env.unwrapped for env in made]  # without their limit: time is the class's business

    @property
    def robot(self) -> RobotSpec:
        return self.envs[0].spec_robot

    @property
    def max_steps(self) -> int:
        return self._max_steps

    @property
    def stages(self) -> tuple[str, ...]:
        return self.envs[0].stages

    def begin(self, row: int, seed: int | None, options: dict[str, Any]) -> tuple[ImaginedFrame, str]:
        raw, info = self.envs[row].reset(seed=seed, options=options)
        return _frame(raw, info, False), info["task"]

    def advance(
        self, rows: Sequence[int], actions: NDArray[np.float32], ahead: Sequence[NDArray[np.float32]] = ()
    ) -> list[ImaginedFrame]:
        frames = []
        for row, action in zip(rows, actions, strict=True):
            raw, _, terminated, _, info = self.envs[row].step(action)
            frames.append(_frame(raw, info, terminated))
        return frames

    def close(self) -> None:
        for env in self.envs:
            env.close()


def _frame(raw: dict[str, Any], info: dict[str, Any], terminated: bool) -> ImaginedFrame:
    won = bool(info["is_success"])
    return ImaginedFrame(raw["pixels"], raw["agent_pos"], float(won), won, terminated and not won)

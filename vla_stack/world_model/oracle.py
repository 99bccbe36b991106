"""The simulator behind the imagined environment's class: what it shows is true, so a difference is the class's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

import sim  # noqa: F401  registers the tasks
from vla_stack.schema import RobotSpec
from vla_stack.world_model.imagined_env import Frames


class Oracle:
    """A :class:`vla_stack.world_model.imagined_env.Backend` that renders instead of imagining.

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

    def begin(self, row: int, seed: int | None, options: dict[str, Any]) -> tuple[Frames, str]:
        raw, info = self.envs[row].reset(seed=seed, options=options)
        return _frames([(raw, info, False)]), info["task"]

    def advance(self, rows: Sequence[int], actions: NDArray[np.float32]) -> list[Frames]:
        films = []
        for row, chunk in zip(rows, actions, strict=True):
            steps = []
            for action in chunk:
                raw, _, terminated, _, info = self.envs[row].step(action)
                steps.append((raw, info, terminated))
            films.append(_frames(steps))
        return films

    def close(self) -> None:
        for env in self.envs:
            env.close()


def _frames(steps: list[tuple[dict[str, Any], dict[str, Any], bool]]) -> Frames:
    won = np.array([info["is_success"] for _, info, _ in steps])
    pictures = {c: np.stack([raw["pixels"][c] for raw, _, _ in steps]) for c in steps[0][0]["pixels"]}
    states = np.stack([raw["agent_pos"] for raw, _, _ in steps])
    ended = np.array([terminated for _, _, terminated in steps]) & ~won
    return Frames(pictures, states, won.astype(np.float32), won, ended)

"""Imagination as the engine's rows: whichever rollouts take a step are imagined in one batch."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vla_stack.envs.vector import EnvStep
from vla_stack.schema import RobotSpec
from vla_stack.world_model.imagined_env import Backend, Frames


class ImaginedRows:
    """A :class:`vla_stack.envs.VectorEnv` over a backend that makes frames.

    The reward is the success probability; an episode is terminated by success, truncated by time or by a guard, and a
    success after a guard has fired is none.

    Args:
        backend: What makes the frames.
        num_envs: Rows.
    """

    def __init__(self, backend: Backend, num_envs: int) -> None:
        self.num_envs, self._backend = num_envs, backend
        self.robot: RobotSpec | None = backend.robot
        self.stages = backend.stages
        self._steps = [0] * num_envs
        self._tripped: list[list[str]] = [[] for _ in range(num_envs)]
        self._pictures: list[list[NDArray[np.uint8]]] = [[] for _ in range(num_envs)]
        self._rows = [SimpleNamespace(task="") for _ in range(num_envs)]

    def reset(self, rows: Sequence[int], seeds: Sequence[int]) -> list[EnvStep]:
        begun = []
        for row, seed in zip(rows, seeds, strict=True):
            frames, self._rows[row].task = self._backend.begin(row, seed, {})
            self._steps[row], self._tripped[row] = 0, []
            begun.append(self._shown(row, frames, 0.0, False, False))
        return begun

    def step(self, rows: Sequence[int], actions: NDArray[np.float32]) -> list[EnvStep]:
        """One control step of some rows, imagined together; raises ``ValueError`` for actions that are not finite."""
        if not np.isfinite(actions).all():
            raise ValueError("actions are not finite")
        robot = self._backend.robot
        chunk = np.clip(np.asarray(actions, np.float32), robot.action_low, robot.action_high)[:, None]
        out = []
        for row, frames in zip(rows, self._backend.advance(rows, chunk), strict=True):
            self._steps[row] += 1
            self._tripped[row] += [guard for guard in frames.tripped if guard not in self._tripped[row]]
            trusted = not self._tripped[row]
            done = trusted and bool(frames.done[-1])
            terminated = done or trusted and bool(frames.ended[-1])
            truncated = not terminated and (not trusted or self._steps[row] >= self._backend.max_steps)
            out.append(self._shown(row, frames, float(frames.success[-1]), terminated, truncated, done))
        return out

    def render(self, row: int) -> NDArray[np.uint8]:
        """The cameras of the newest frame beside each other, four times as large."""
        return np.concatenate(self._pictures[row], 1).repeat(4, 0).repeat(4, 1)

    def row(self, row: int) -> Any:
        return self._rows[row]

    def close(self) -> None:
        self._backend.close()

    def _shown(
        self, row: int, frames: Frames, reward: float, terminated: bool, truncated: bool, done: bool = False
    ) -> EnvStep:
        self._pictures[row] = [p[-1] for p in frames.pictures.values()]
        observation = {"agent_pos": frames.states[-1], "pixels": {c: p[-1] for c, p in frames.pictures.items()}}
        info = {
            "is_success": done,
            "stage": len(self.stages) if done else 0,
            "task": self._rows[row].task,
            "cost": 0.0,
            "guards": tuple(self._tripped[row]),
        }
        return EnvStep(observation, reward, terminated, truncated, info)

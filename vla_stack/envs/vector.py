"""Environments as the engine sees them: rows of episodes that run side by side, each for itself.

A row begins and ends on its own, so there is no automatic reset and no step in vain. Environments of a CPU are stepped
one after the other (:class:`LocalEnvs`); a world model or a simulator on a GPU answers for all rows at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from vla_stack.schema import RobotSpec


class EnvStep(NamedTuple):
    """What one row shows after a reset or a step.

    Attributes:
        observation: ``{"pixels": {camera: uint8 [H, W, 3]}, "agent_pos": float32 [S]}``.
        reward: The environment's own; 0 after a reset.
        terminated: The task has ended, done or failed for good.
        truncated: The time limit has.
        info: ``is_success``, and ``stage``, ``task`` and ``cost`` where the environment tells them.
    """

    observation: dict[str, Any]
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]


class VectorEnv(Protocol):
    """Rows of one kind of environment.

    Attributes:
        num_envs: Rows, n.
        robot: The embodiment; None where the environment does not describe itself.
        stages: Names of the stages that ``info["stage"]`` counts.
    """

    num_envs: int
    robot: RobotSpec | None
    stages: tuple[str, ...]

    def reset(self, rows: Sequence[int], seeds: Sequence[int]) -> list[EnvStep]:
        """Begin new episodes in some rows; the same seed begins the same episode in any row."""
        ...

    def step(
        self, rows: Sequence[int], actions: NDArray[np.float32], ahead: Sequence[NDArray[np.float32]] = ()
    ) -> list[EnvStep]:
        """Carry out one command [A] in each of some rows.

        Args:
            rows: Which.
            actions: float32 [len(rows), A].
            ahead: What each row is meant to carry out next, float32 [m, A], as far as that is known; nothing for who
                answers a step at a time.
        """
        ...

    def render(self, row: int) -> NDArray[np.uint8] | None:
        """A picture uint8 [H, W, 3] for people, where the environment was made with ``render_mode="rgb_array"``."""
        ...

    def row(self, row: int) -> Any:
        """The row's own environment, for who reads its instruction, asks an expert or traces what happens."""
        ...

    def close(self) -> None: ...


class LocalEnvs:
    """Gymnasium environments of this process, stepped one after the other.

    Args:
        envs: Environments of one kind.
    """

    def __init__(self, envs: Sequence[gym.Env]) -> None:
        self._envs = list(envs)
        self.num_envs = len(self._envs)
        first: Any = self._envs[0].unwrapped
        self.robot: RobotSpec | None = getattr(first, "spec_robot", None)
        self.stages = tuple(getattr(first, "stages", ()))

    def reset(self, rows: Sequence[int], seeds: Sequence[int]) -> list[EnvStep]:
        begun = [self._envs[row].reset(seed=seed) for row, seed in zip(rows, seeds, strict=True)]
        return [EnvStep(observation, 0.0, False, False, info) for observation, info in begun]

    def step(
        self, rows: Sequence[int], actions: NDArray[np.float32], ahead: Sequence[NDArray[np.float32]] = ()
    ) -> list[EnvStep]:
        steps = (self._envs[row].step(action) for row, action in zip(rows, actions, strict=True))
        return [EnvStep(o, float(reward), bool(done), bool(cut), info) for o, reward, done, cut, info in steps]

    def render(self, row: int) -> Any:
        env = self._envs[row]
        return env.render() if "rgb_array" in env.metadata.get("render_modes", ()) else None

    def row(self, row: int) -> gym.Env:
        return self._envs[row]

    def close(self) -> None:
        for env in self._envs:
            env.close()

"""Imagination as the engine's rows: whichever rollouts take a step are imagined in one batch.

A *backend* makes the frames: a world model (:mod:`vla_stack.world_model.world_backend`), or the simulator itself
(:mod:`vla_stack.world_model.oracle`), with which everything here is tested: what remains between the two is the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from vla_stack.envs.vector import EnvStep
from vla_stack.schema import RobotSpec


@dataclass
class ImaginedFrame:
    """One frame of one rollout.

    Attributes:
        pictures: Camera -> uint8 [H, W, 3].
        state: float32 [S].
        success: Probability that the task is done.
        done: Whether that counts as done.
        ended: Whether the task can no longer succeed.
        tripped: Guards that fired.
    """

    pictures: dict[str, NDArray[np.uint8]]
    state: NDArray[np.float32]
    success: float = 0.0
    done: bool = False
    ended: bool = False
    tripped: list[str] = field(default_factory=list)


class Backend(Protocol):
    """What makes frames for a number of rollouts."""

    @property
    def robot(self) -> RobotSpec: ...
    @property
    def max_steps(self) -> int: ...
    @property
    def stages(self) -> tuple[str, ...]: ...

    def begin(self, row: int, seed: int | None, options: dict[str, Any]) -> tuple[ImaginedFrame, str]:
        """Start rollout ``row`` anew: its first frame, and the instruction; without a seed, the stream goes on."""

    def advance(
        self, rows: Sequence[int], actions: NDArray[np.float32], ahead: Sequence[NDArray[np.float32]]
    ) -> list[ImaginedFrame]:
        """Carry out one action in each of some rollouts; arguments as :meth:`vla_stack.envs.VectorEnv.step`'s."""

    def close(self) -> None: ...


@dataclass
class ImaginedRow:
    """A row's own environment.

    Attributes:
        backend: What makes its frames, for who asks a world model what several chunks would lead to.
        index: The backend's number of it.
        task: The instruction.
        frame: The newest one.
        steps: Of the episode.
        tripped: Guards that fired in it.
    """

    backend: Any
    index: int
    task: str = ""
    frame: ImaginedFrame | None = None
    steps: int = 0
    tripped: list[str] = field(default_factory=list)


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
        self._rows = [ImaginedRow(backend, row) for row in range(num_envs)]

    def reset(
        self, rows: Sequence[int], seeds: Sequence[int | None], options: dict[str, Any] | None = None
    ) -> list[EnvStep]:
        """Begin episodes; ``options`` as the backend takes them: ``start_index``, ``variant``, ``instruction``."""
        for row, seed in zip(rows, seeds, strict=True):
            frame, task = self._backend.begin(row, seed, options or {})
            self._rows[row] = ImaginedRow(self._backend, row, task, frame)
        return [self._shown(self._rows[row], 0.0, False, False) for row in rows]

    def step(
        self, rows: Sequence[int], actions: NDArray[np.float32], ahead: Sequence[NDArray[np.float32]] = ()
    ) -> list[EnvStep]:
        """One control step of some rows, imagined together; raises ``ValueError`` for actions that are not finite."""
        if not np.isfinite(actions).all():
            raise ValueError("actions are not finite")
        robot = self._backend.robot
        clipped = np.clip(np.asarray(actions, np.float32), robot.action_low, robot.action_high)
        known = [np.clip(a, robot.action_low, robot.action_high) if len(a) else a for a in ahead]
        out = []
        for index, frame in zip(rows, self._backend.advance(rows, clipped, known), strict=True):
            row = self._rows[index]
            row.frame, row.steps = frame, row.steps + 1
            row.tripped += [guard for guard in frame.tripped if guard not in row.tripped]
            trusted = not row.tripped
            done = trusted and frame.done
            terminated = done or trusted and frame.ended
            truncated = not terminated and (not trusted or row.steps >= self._backend.max_steps)
            out.append(self._shown(row, frame.success, terminated, truncated, done))
        return out

    def render(self, row: int) -> NDArray[np.uint8] | None:
        """The cameras of the newest frame beside each other, four times as large; None before the first."""
        frame = self._rows[row].frame
        return None if frame is None else np.concatenate([*frame.pictures.values()], 1).repeat(4, 0).repeat(4, 1)

    def row(self, row: int) -> ImaginedRow:
        return self._rows[row]

    def close(self) -> None:
        self._backend.close()

    def _shown(self, row: ImaginedRow, reward: float, terminated: bool, truncated: bool, done: bool = False) -> EnvStep:
        assert row.frame is not None
        observation = {"agent_pos": row.frame.state, "pixels": row.frame.pictures}
        info = {
            "is_success": done,
            "stage": len(self.stages) if done else 0,
            "task": row.task,
            "cost": 0.0,
            "guards": tuple(row.tripped),
        }
        return EnvStep(observation, reward, terminated, truncated, info)

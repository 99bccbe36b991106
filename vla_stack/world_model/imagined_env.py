"""Imagination as a gymnasium vector environment, a drop-in for the simulator's.

A *backend* makes the frames: a world model (:mod:`vla_stack.world_model.dreams`), or the simulator itself
(:mod:`vla_stack.world_model.oracle`), with which everything here is tested: what remains between the two is the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from vla_stack.schema import RobotSpec


@dataclass
class Frames:
    """n frames of one rollout, newest last.

    Attributes:
        pictures: Camera -> uint8 [n, H, W, 3].
        states: float32 [n, S].
        success: float32 [n], probability that the task is done.
        done: bool [n], whether that counts as done.
        ended: bool [n], whether the task can no longer succeed.
        tripped: Guards that fired.
    """

    pictures: dict[str, NDArray[np.uint8]]
    states: NDArray[np.float32]
    success: NDArray[np.float32]
    done: NDArray[np.bool_]
    ended: NDArray[np.bool_]
    tripped: list[str] = field(default_factory=list)


class Backend(Protocol):
    """What makes frames for a number of rollouts."""

    @property
    def robot(self) -> RobotSpec: ...
    @property
    def max_steps(self) -> int: ...
    @property
    def stages(self) -> tuple[str, ...]: ...

    def begin(self, row: int, seed: int | None, options: dict[str, Any]) -> tuple[Frames, str]:
        """Start rollout ``row`` anew: its first frame, and the instruction; without a seed, the stream goes on."""

    def advance(self, rows: Sequence[int], actions: NDArray[np.float32]) -> list[Frames]:
        """Carry out actions [len(rows), n, A] in some rollouts, n frames each."""

    def close(self) -> None: ...


class ImaginedVectorEnv(VectorEnv):
    """N rollouts in lock step, of which each has its own random stream, the backend's.

    Observations are those of the simulator's vector environment, ``{"pixels": {camera: uint8 [N, H, W, 3]},
    "agent_pos": float32 [N, S]}``. Actions are [N, A], one control step, or [N, n, A], a chunk: the observation is then
    of its last step, ``info["frames"]`` has all of its pictures, and an episode that ends within it stands still from
    there on. The reward is the success probability; an episode is terminated by success, truncated by time or by a
    guard, and restarted at the next step (``AutoresetMode.NEXT_STEP``, as gymnasium's own vector environments do), or
    stands still until the next ``reset``, at no cost (``AutoresetMode.DISABLED``).

    ``info``: ``is_success``, ``stage``, ``task``, ``cost`` as the simulator's; ``tripped`` (bool [N]) with ``guards``
    (names); ``steps`` (int [N]) of the episodes; ``frames`` and ``states`` of the chunk. A success after a guard has
    fired is none.

    Args:
        backend: What makes the frames.
        num_envs: N.
        autoreset: What a step does to an episode that is over.

    Raises:
        ValueError: ``autoreset`` is ``SAME_STEP``.
    """

    def __init__(self, backend: Backend, num_envs: int = 1, autoreset: AutoresetMode = AutoresetMode.NEXT_STEP) -> None:
        if autoreset == AutoresetMode.SAME_STEP:
            raise ValueError("an imagined environment restarts at the next step or not at all")
        self.backend, self.num_envs = backend, num_envs
        self.metadata = {"autoreset_mode": autoreset, "render_modes": ["rgb_array"]}
        robot = backend.robot
        pictures: dict[str, spaces.Space[Any]] = {
            c.name: spaces.Box(0, 255, (c.height, c.width, 3), np.uint8) for c in robot.cameras
        }
        state = spaces.Box(-10.0, 10.0, (len(robot.state),), np.float32)
        self.single_observation_space = spaces.Dict({"agent_pos": state, "pixels": spaces.Dict(pictures)})
        self.single_action_space = spaces.Box(robot.action_low, robot.action_high, dtype=np.float32)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._last: list[Frames | None] = [None] * num_envs
        self.tasks = [""] * num_envs
        self._steps = np.zeros(num_envs, np.int64)
        self._over: NDArray[np.bool_] = np.zeros(num_envs, bool)
        self._tripped: list[list[str]] = [[] for _ in range(num_envs)]

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin all episodes, or some.

        Args:
            seed: Of environment 0, the others follow; or one each. The same seed gives the same first frames and noise.
            options: ``start_index`` (row of a dataset) or what the simulator takes: ``variant``, ``instruction``; and
                gymnasium's ``reset_mask`` (bool [N]), the episodes to begin.
        """
        options = dict(options or {})
        mask = np.asarray(options.pop("reset_mask", np.ones(self.num_envs, bool)), bool)
        seeds = [seed + i for i in range(self.num_envs)] if isinstance(seed, int) else seed or [None] * self.num_envs
        for row in np.flatnonzero(mask):
            self._begin(int(row), seeds[row], options)
        return self._observation(), self._info(np.zeros(self.num_envs, bool), None)

    def step(
        self, actions: NDArray[np.float32]
    ) -> tuple[dict[str, Any], NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        """Advance by a control step or a chunk; raises ``ValueError`` for actions that are not finite."""
        actions = np.asarray(actions, np.float32)
        chunk = actions if actions.ndim == 3 else actions[:, None]
        if chunk.shape[::2] != (self.num_envs, len(self.backend.robot.action)) or not np.isfinite(chunk).all():
            raise ValueError(
                f"actions {actions.shape} must be [{self.num_envs}, A] or [{self.num_envs}, n, A] and finite"
            )
        chunk = np.clip(chunk, self.backend.robot.action_low, self.backend.robot.action_high)
        idle = self._over.copy()  # these are restarted by this step, or stand still, whatever the action
        rows = [i for i in range(self.num_envs) if not idle[i]]
        restart = self.metadata["autoreset_mode"] == AutoresetMode.NEXT_STEP
        films: list[Frames | None] = [None] * self.num_envs
        for row, frames in zip(rows, self.backend.advance(rows, chunk[rows]) if rows else [], strict=True):
            films[row] = frames
        won, terminated, truncated = (np.zeros(self.num_envs, bool) for _ in range(3))
        for row in range(self.num_envs):
            if idle[row]:
                if restart:
                    self._begin(row, None, {})
                continue
            won[row], terminated[row], truncated[row] = self._take(row, films[row])  # type: ignore[arg-type]
        self._over = terminated | truncated | (idle & (not restart))
        reward = np.where(idle, 0.0, [self.frames(row).success[-1] for row in range(self.num_envs)])
        return self._observation(), reward, terminated, truncated, self._info(won, films)

    def close_extras(self, **kwargs: Any) -> None:
        self.backend.close()

    def _begin(self, row: int, seed: int | None, options: dict[str, Any]) -> None:
        self._last[row], self.tasks[row] = self.backend.begin(row, seed, options)
        self._steps[row], self._over[row], self._tripped[row] = 0, False, []

    def _take(self, row: int, frames: Frames) -> tuple[bool, bool, bool]:
        """Keep a film up to where its episode ends: success, terminated, truncated."""
        self._tripped[row] += [g for g in frames.tripped if g not in self._tripped[row]]
        for k in range(len(frames.done)):
            self._steps[row] += 1
            self._last[row] = _frame(frames, k)
            if not self._tripped[row] and (frames.done[k] or frames.ended[k]):
                return bool(frames.done[k]), True, False
            if self._steps[row] >= self.backend.max_steps:
                return False, False, True
        return False, False, bool(self._tripped[row])

    def frames(self, row: int) -> Frames:
        """The newest frame of a rollout."""
        frames = self._last[row]
        if frames is None:
            raise gym.error.ResetNeeded("call reset before step and render")
        return frames

    def _observation(self) -> dict[str, Any]:
        frames = [self.frames(row) for row in range(self.num_envs)]
        pixels = {c.name: np.stack([f.pictures[c.name][-1] for f in frames]) for c in self.backend.robot.cameras}
        return {"agent_pos": np.stack([f.states[-1] for f in frames]), "pixels": pixels}

    def _info(self, won: NDArray[np.bool_], films: list[Frames | None] | None) -> dict[str, Any]:
        return {
            "is_success": won,
            "stage": np.where(won, len(self.backend.stages), 0),
            "task": list(self.tasks),
            "cost": np.zeros(self.num_envs),
            "tripped": np.array([bool(t) for t in self._tripped]),
            "guards": [tuple(t) for t in self._tripped],
            "steps": self._steps.copy(),
            "frames": [None if f is None else f.pictures for f in films or [None] * self.num_envs],
            "states": [None if f is None else f.states for f in films or [None] * self.num_envs],
        }


def _frame(frames: Frames, k: int) -> Frames:
    one = slice(k, k + 1)
    pictures = {c: p[one] for c, p in frames.pictures.items()}
    return Frames(
        pictures, frames.states[one], frames.success[one], frames.done[one], frames.ended[one], frames.tripped
    )


class ImaginedEnv(gym.Env[dict[str, Any], NDArray[np.float32]]):
    """One rollout as a plain environment, with what an evaluation reads of the simulator's.

    Args:
        backend: What makes the frames; its rollout 0 is used.
        render_mode: ``rgb_array`` makes :meth:`render` return the cameras beside each other.
    """

    metadata = {"render_modes": ["rgb_array"]}

    def __init__(self, backend: Backend, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self._vector = ImaginedVectorEnv(backend, 1)
        self.observation_space = self._vector.single_observation_space
        self.action_space = self._vector.single_action_space
        self.spec_robot, self.stages = backend.robot, backend.stages

    @property
    def task(self) -> str:
        """The instruction."""
        return self._vector.tasks[0]

    task_description = task

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        super().reset(seed=seed)
        obs, info = self._vector.reset(seed=[seed], options=options)
        return _row(obs), _row_info(info)

    def step(self, action: NDArray[np.float32]) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """One control step."""
        obs, reward, terminated, truncated, info = self._vector.step(np.asarray(action)[None])
        return _row(obs), float(reward[0]), bool(terminated[0]), bool(truncated[0]), _row_info(info)

    def render(self) -> NDArray[np.uint8] | None:  # type: ignore[override]
        """The last frame, four times as large."""
        if self.render_mode is None:
            return None
        pictures = [p[-1] for p in self._vector.frames(0).pictures.values()]
        return np.concatenate(pictures, 1).repeat(4, 0).repeat(4, 1)

    def close(self) -> None:
        self._vector.close()


def _row(obs: dict[str, Any]) -> dict[str, Any]:
    return {"agent_pos": obs["agent_pos"][0], "pixels": {c: p[0] for c, p in obs["pixels"].items()}}


def _row_info(info: dict[str, Any]) -> dict[str, Any]:
    row = {k: v[0] for k, v in info.items()}
    return row | {"is_success": bool(row["is_success"]), "stage": int(row["stage"]), "cost": float(row["cost"])}

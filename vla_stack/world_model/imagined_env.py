"""Imagination as a gymnasium environment, a drop-in for the simulator's."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from vla_stack.world_model.imagined_rows import Backend, ImaginedRows


class ImaginedEnv(gym.Env[dict[str, Any], NDArray[np.float32]]):
    """One rollout as a plain environment, with what an evaluation reads of the simulator's.

    Args:
        backend: What makes the frames; its rollout 0 is used.
        render_mode: ``rgb_array`` makes :meth:`render` return the cameras beside each other.
    """

    metadata = {"render_modes": ["rgb_array"]}

    def __init__(self, backend: Backend, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self._rows = ImaginedRows(backend, 1)
        robot = backend.robot
        pictures: dict[str, spaces.Space[Any]] = {
            c.name: spaces.Box(0, 255, (c.height, c.width, 3), np.uint8) for c in robot.cameras
        }
        state = spaces.Box(-10.0, 10.0, (len(robot.state),), np.float32)
        self.observation_space = spaces.Dict({"agent_pos": state, "pixels": spaces.Dict(pictures)})
        self.action_space = spaces.Box(robot.action_low, robot.action_high, dtype=np.float32)
        self.spec_robot, self.stages = robot, backend.stages

    @property
    def task(self) -> str:
        """The instruction."""
        return self._rows.row(0).task

    task_description = task

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin an episode.

        Args:
            seed: The same seed gives the same first frame and noise; None goes on with the stream.
            options: ``start_index`` (row of a dataset) or what the simulator takes: ``variant``, ``instruction``.
        """
        super().reset(seed=seed)
        begun = self._rows.reset([0], [seed], options)[0]
        return begun.observation, begun.info

    def step(self, action: NDArray[np.float32]) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """One control step; raises ``ValueError`` for actions that are not finite."""
        after = self._rows.step([0], np.asarray(action)[None])[0]
        return after.observation, after.reward, after.terminated, after.truncated, after.info

    def render(self) -> NDArray[np.uint8] | None:  # type: ignore[override]
        """The last frame, four times as large."""
        return None if self.render_mode is None else self._rows.render(0)

    def close(self) -> None:
        self._rows.close()

"""An imagined robot that is steered as agents of reinforcement learning steer the simulated one."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from sim.arm import DELTA_RATE
from vla_stack.envs.making import IMAGINED
from vla_stack.envs.vector import LocalEnvs
from vla_stack.errors import UserError
from vla_stack.world_model.imagined_env import ImaginedEnv
from vla_stack.world_model.model import shared
from vla_stack.world_model.tool import ARMS, check_commands_poses
from vla_stack.world_model.world_backend import WorldBackend, max_steps_of, simulated


class SteeredEnv(ImaginedEnv):
    """One rollout whose actions are those of the simulator in ``ee_delta``, [5] in [-1, 1].

    Args:
        name: ``imagined:`` and the directory of a world model, or of the run that trained it.
        cameras: That an agent looks at.
        image_size: Of its pictures.

    Raises:
        UserError: There is no world model, it is of no task of ``sim``, or shows the agent other pictures.
    """

    def __init__(self, name: str, cameras: tuple[str, ...], image_size: int) -> None:
        model = shared(name.removeprefix(IMAGINED))
        check_commands_poses(model.robot, "steering in imagination")
        shown = {c.name: c.height for c in model.robot.cameras}
        if any(shown.get(camera) != image_size for camera in cameras):
            raise UserError(
                f"{name} shows {', '.join(f'{c} in {size} pixels' for c, size in shown.items())}",
                f"the policy of method.features looks at {', '.join(cameras)} in {image_size}",
            )
        self.max_steps = max_steps_of(model)
        super().__init__(WorldBackend(model, simulated(model), 1, self.max_steps))
        absolute = model.robot
        size = absolute.cameras[0].height
        self.spec_robot = ARMS[absolute.name].spec("ee_delta", model.cameras, size, absolute.rate_hz, tool_target=True)
        self.action_space = gym.spaces.Box(self.spec_robot.action_low, self.spec_robot.action_high, dtype=np.float32)
        state = gym.spaces.Box(-10.0, 10.0, (len(self.spec_robot.state),), np.float32)
        self.observation_space = gym.spaces.Dict({**self.observation_space.spaces, "agent_pos": state})  # type: ignore[attr-defined]
        self._range = absolute.action_low.astype(np.float64), absolute.action_high.astype(np.float64)
        self._step = DELTA_RATE / absolute.rate_hz

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        obs, info = super().reset(seed=seed, options=options)
        self.tool = obs["agent_pos"][:5].astype(np.float64)
        self.tool_command = np.append(self.tool[:4], 1.0)  # what the tool is told, [5]; it begins open
        return self._with_target(obs), info

    def step(self, action: NDArray[np.float32]) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        moved = np.clip(np.asarray(action, np.float64), -1.0, 1.0) * self._step
        self.tool_command = np.clip(self.tool_command + moved, *self._range)
        obs, reward, terminated, truncated, info = super().step(self.tool_command.astype(np.float32))
        self.tool = obs["agent_pos"][:5].astype(np.float64)
        return self._with_target(obs), reward, terminated, truncated, info

    def _with_target(self, obs: dict[str, Any]) -> dict[str, Any]:
        lead = (self.tool_command - self.tool).astype(np.float32)
        return obs | {"agent_pos": np.concatenate([obs["agent_pos"], lead])}


def make(name: str, num_envs: int, max_episode_steps: int = 0) -> LocalEnvs:
    """Rows of ``steered:<world model>``, for :func:`vla_stack.envs.make`: moves of the tool's target, all cameras."""
    robot = shared(name).robot
    rows = [SteeredEnv(name, tuple(c.name for c in robot.cameras), robot.cameras[0].height) for _ in range(num_envs)]
    limited = [gym.wrappers.TimeLimit(row, max_episode_steps or row.max_steps) for row in rows]
    return LocalEnvs(limited)

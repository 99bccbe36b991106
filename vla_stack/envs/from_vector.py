"""Environments of other packages that are observed as one vector, in the form of ours."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from vla_stack.errors import UserError
from vla_stack.schema import Dim, RobotSpec

RATE_HZ = 10.0  # of an environment that does not say how often it is drawn


class FromVector(gym.Env[dict[str, Any], NDArray[np.float32]]):
    """An environment of boxes whose observation is ``{"agent_pos": float32 [S]}``; its robot has names by number.

    Args:
        env: The environment, with its time limit.
        env_id: Its id.
        goalless: It has no notion of success: ``is_success`` is then always false, so that its returns can be compared.

    Raises:
        UserError: Its actions are no vector within bounds, or its observations no vector.
    """

    def __init__(self, env: gym.Env, env_id: str, goalless: bool = False) -> None:
        self.env, self._goalless, self.task = env, goalless, ""
        space, seen = env.action_space, env.observation_space
        if not isinstance(space, gym.spaces.Box) or len(space.shape) != 1:
            raise UserError(f"{env_id} has actions of type {type(space).__name__}, not a vector of numbers")
        if not space.is_bounded():
            raise UserError(f"{env_id} has actions without bounds", "wrap it in gymnasium's ClipAction")
        if not isinstance(seen, gym.spaces.Box):
            what = ", ".join(seen.spaces) if isinstance(seen, gym.spaces.Dict) else type(seen).__name__
            raise UserError(f"{env_id} is observed as {what}, not as a vector", "wrap it in FlattenObservation")
        size = int(np.prod(seen.shape))
        self.action_space = space
        self.observation_space = gym.spaces.Dict({"agent_pos": gym.spaces.Box(-np.inf, np.inf, (size,), np.float32)})
        bounds = zip(space.low.tolist(), space.high.tolist(), strict=True)
        self.spec_robot = RobotSpec(
            name=f"gym/{env_id}",
            state=tuple(Dim(f"state_{i}", "1") for i in range(size)),
            action=tuple(Dim(f"action_{i}", "1", low, high) for i, (low, high) in enumerate(bounds)),
            cameras=(),
            rate_hz=float(env.metadata.get("render_fps") or RATE_HZ),
            action_kind="delta",  # a torque, most of the time: nothing is commanded by zero
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        raw, info = self.env.reset(seed=seed, options=options)
        return self._observe(raw), info

    def step(self, action: NDArray[np.float32]) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        raw, reward, terminated, truncated, info = self.env.step(action)
        info = {"is_success": False, **info} if self._goalless else info
        return self._observe(raw), float(reward), bool(terminated), bool(truncated), info

    def render(self) -> Any:
        return self.env.render()

    def close(self) -> None:
        self.env.close()

    def _observe(self, raw: Any) -> dict[str, Any]:
        return {"agent_pos": np.asarray(raw, np.float32).reshape(-1)}

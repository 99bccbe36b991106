"""Environments as reinforcement learning sees them: a vector in, an action in [-1, 1] out, one reward, success ends it.

Our tasks and the benchmarks' are observed by their state (no cameras), or by the features of a frozen policy; any other
gymnasium environment with boxes is taken as it is. Success may be what the judges of a world model say it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from vla_stack.errors import UserError

Vector = NDArray[np.float32]
IMAGINED = "imagined:"  # followed by a world model's directory; world_model/dreams.py, which takes seconds to import


@dataclass(frozen=True)
class EnvRecipe:
    """Which environment, and what it pays.

    Attributes:
        id: ``sim/<task>-v0``, ``metaworld/<task>``, a gymnasium id, or ``imagined:`` and the run of a world model; that
            needs ``features``, as it has no poses of objects.
        limit: Control steps of an episode; 0 takes the environment's own.
        control_hz: Control steps a second of a task of ours or of a benchmark; 0 takes its own.
        reward: ``step`` pays -1 a step until success, ``success`` 1 at success, ``own`` the environment's reward.
        features: Directory of a flow policy; observations are its frozen features and the robot's state, from its
            cameras. Empty observes the state with the poses of the objects, and no cameras.
        judge: Directory of a world model whose judges say what success is, from its cameras, in place of the task.
        options: Further keyword arguments of the environment.
    """

    id: str = "sim/pick-v0"
    limit: int = 0
    control_hz: float = 0.0
    reward: Literal["step", "success", "own"] = "step"
    features: str = ""
    judge: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def tail(self) -> Literal[0, -1]:
        """What an endless failure goes on earning a step."""
        return -1 if self.reward == "step" else 0

    @property
    def extra(self) -> dict[str, Any]:
        """Keyword arguments of the environment beyond those that follow from a policy's robot."""
        limit = {"max_episode_steps": self.limit} if self.limit else {}
        return self.options | limit | ({"goalless": True} if self.reward == "own" else {})

    @property
    def practised(self) -> str:
        """Id of the environment that is learnt in, for :func:`vla_stack.envs.make`."""
        if self.imagined:
            return f"steered:{self.id.removeprefix(IMAGINED)}"
        return f"judged:{self.judge}@{self.id}" if self.judge else self.id

    @property
    def imagined(self) -> bool:
        """Whether a world model is the environment."""
        return self.id.startswith(IMAGINED)

    def real(self) -> EnvRecipe:
        """What is evaluated on, and where experts act: the task itself, where a world model judges or imagines it.

        Raises:
            UserError: There is no such world model, or it is of no task of ``sim``.
        """
        if not self.imagined:
            return replace(self, judge="")
        from vla_stack.world_model.dreams import shared, task_of  # on demand: it imports torch

        model = shared(self.id.removeprefix(IMAGINED))
        return replace(self, id=task_of(model).id, control_hz=model.robot.rate_hz, judge="")


class StateEnv:
    """One environment.

    Args:
        recipe: Which.

    Raises:
        UserError: There is no such environment, it has no boxes, or the judges of the recipe do not fit it.
    """

    def __init__(self, recipe: EnvRecipe) -> None:
        self.recipe = recipe
        self._features: Any = _features(recipe.features)
        self.native, self.benchmark = recipe.id.startswith("sim/"), False
        self.env = self._make()
        space = self.env.action_space
        if not isinstance(space, gym.spaces.Box) or len(space.shape) != 1:
            raise UserError(f"{recipe.id} has actions of type {type(space).__name__}, not a vector of numbers")
        if not space.is_bounded():
            raise UserError(f"{recipe.id} has actions without bounds", "wrap it in gymnasium's ClipAction")
        seen = self.env.observation_space
        if isinstance(seen, gym.spaces.Dict) and "agent_pos" not in seen.spaces and self._features is None:
            keys = ", ".join(seen.spaces)
            raise UserError(f"{recipe.id} is observed as {keys}, not as a vector", "wrap it in FlattenObservation")
        self._middle, self._half = (space.high + space.low) / 2, (space.high - space.low) / 2
        self.scale: tuple[Vector, Vector] | None = None  # mean and standard deviation that observations are shown in
        self.limit = recipe.limit or self._own_limit()
        self.steps = 0
        self.action_dim = int(space.shape[0])
        self.obs_dim = len(self.reset(0))

    def reset(self, seed: int) -> Vector:
        """First observation of the episode that ``seed`` stands for."""
        raw, _ = self.env.reset(seed=seed)
        self.steps, self.success = 0, False
        return self._observe(raw)

    def step(self, action: Vector) -> tuple[Vector, float, bool, bool]:
        """Observation, reward, terminated, truncated; never both of the latter."""
        command = (self._middle + self._half * np.clip(action, -1.0, 1.0)).astype(np.float32)
        raw, reward, terminated, truncated, info = self.env.step(command)
        self.steps += 1
        if self.recipe.reward != "own":
            if "is_success" not in info:
                raise UserError(f"{self.recipe.id} does not tell success ('is_success')", "set method.reward=own")
            self.success = bool(info["is_success"])
            reward = float(self.success) - (self.recipe.reward == "step")
            # What ended otherwise has failed for good: that is cut off, so that a failure never looks like relief.
            truncated, terminated = truncated or (terminated and not self.success), self.success
        truncated = (truncated or self.steps >= self.limit) and not terminated
        return self._observe(raw), float(reward), bool(terminated), bool(truncated)

    def expert(self, noise: float, seed: int) -> Callable[[], Vector]:
        """A scripted expert for the episode that has just begun: executed actions in [-1, 1], noise included."""
        if self.native:
            import sim

            script: Any = sim.make_expert(self.env, noise, seed)
        elif self.benchmark:
            from sim import external

            script = external.make_expert(self.env, noise, seed)
        else:
            raise UserError(f"there is no scripted expert for {self.recipe.id}", "give data.root=DIR, episodes of it")

        def act() -> Vector:
            command = script.perturb(script.act())
            return np.clip((command - self._middle) / self._half, -1.0, 1.0).astype(np.float32)

        return act

    def close(self) -> None:
        self.env.close()

    def _make(self) -> gym.Env:
        r = self.recipe
        options: dict[str, Any] = {"control_mode": "ee_delta"} | ({"control_hz": r.control_hz} if r.control_hz else {})
        options |= {"cameras": ()} if self._features is None else self._features.options
        if r.imagined:
            return self._dreamt(options)
        if r.judge:
            if r.reward == "own":
                raise UserError(
                    "'method.judge' says what success is, method.reward=own pays none", "set method.reward=success"
                )
            from vla_stack.world_model.success import Judged, showing  # on demand: it imports torch

            options = showing(r.judge, options)
        env = self._bare(options)
        return Judged(env, r.judge) if r.judge else env

    def _bare(self, options: dict[str, Any]) -> gym.Env:
        r = self.recipe
        try:
            if self.native:
                import sim  # noqa: F401  registers the tasks

                options |= {"privileged": self._features is None, "tool_target": True}
                return gym.make(r.id, disable_env_checker=True, **options | r.options).unwrapped
            if "/" in r.id:
                from sim import external

                if external.is_external(r.id):
                    self.benchmark = True
                    if r.id.startswith("metaworld/"):
                        options["full_state"] = self._features is None
                    return external.make(r.id, **options | r.options)
            if r.judge:
                raise UserError(f"'method.judge' looks at a robot, {r.id} is none", "use a task of sim or metaworld")
            return gym.make(r.id, disable_env_checker=True, **r.options)
        except gym.error.Error as e:
            raise UserError(f"task '{r.id}': {e}", "for example sim/pick-v0 or metaworld/peg-insert-side-v3") from e

    def _dreamt(self, options: dict[str, Any]) -> gym.Env:
        r = self.recipe
        if not r.features:
            raise UserError(
                f"{r.id} shows pictures, no poses of objects", "set method.features=POLICY, which looks at them"
            )
        if r.judge or r.reward == "own" or r.options or r.control_hz:
            raise UserError(
                f"{r.id} has a rate and judges of its own",
                "leave out method.judge, task.options and method.reward=own",
            )
        from vla_stack.world_model.steered import SteeredEnv  # on demand: it imports torch

        return SteeredEnv(r.id, options["cameras"], options.get("image_size", 0))

    def _own_limit(self) -> int:
        if self.recipe.imagined:
            return self.env.unwrapped.max_steps  # type: ignore[attr-defined]
        if self.native:
            import sim

            rate_hz = self.env.unwrapped.spec_robot.rate_hz  # type: ignore[attr-defined]
            return next(t.limit(rate_hz) for t in sim.TASKS.values() if t.id == self.recipe.id)
        if self.benchmark:
            return self.env.unwrapped.default_steps  # type: ignore[attr-defined]
        return self.env.spec.max_episode_steps or 1000 if self.env.spec else 1000

    def _observe(self, raw: Any) -> Vector:
        task = getattr(self.env.unwrapped, "task", "")
        seen = measure(raw, task, self._features)
        return seen if self.scale is None else normalised(seen, *self.scale)


def measure(raw: Any, task: str, features: Callable[[Any, str], Vector] | None) -> Vector:
    """What is observed, float32 [o], of an environment's raw observation; not normalised."""
    if features is not None:
        return features(raw, task)
    return np.asarray(raw["agent_pos"] if isinstance(raw, dict) else np.asarray(raw).reshape(-1), np.float32)


def _features(path: str) -> Callable[[Any, str], Vector] | None:
    if not path:
        return None
    from vla_stack.methods.off_policy.frozen_features import (
        frozen_features,  # on demand: policies take seconds to import
    )

    return frozen_features(path)


def normalised(obs: Vector, mean: Vector, std: Vector) -> Vector:
    """Observations [..., o] in standard deviations, at most 5 of them."""
    return np.clip((obs - mean) / std, -5.0, 5.0).astype(np.float32)

"""Success as the judges of a world model see it: a reward where the task itself has none to give."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vla_stack.envs.making import construct, is_benchmark, is_task
from vla_stack.envs.vector import LocalEnvs
from vla_stack.errors import UserError
from vla_stack.world_model.model import shared


class Judged(gym.Wrapper):
    """A task whose success is what the judges say of its pictures, frame after frame.

    The task's own success neither pays nor ends an episode; what ends it otherwise, a failure or a limit, still does.

    Args:
        env: The task, made with the options of :func:`showing`.
        name: Directory of a world model, or of the run that trained it.

    Raises:
        UserError: There is no world model, or its judges do not know the instructions or the rate of the task.
    """

    def __init__(self, env: gym.Env, name: str) -> None:
        super().__init__(env)
        self._model = shared(name)
        task: Any = env.unwrapped
        tasks, rate = self._model.config.tasks, self._model.robot.rate_hz
        if unknown := sorted(set(getattr(task, "task_variants", (task.task,))) - set(tasks)):
            raise UserError(f"the judges of {name} do not know '{unknown[0]}'", f"they know '{"', '".join(tasks)}'")
        if not np.isclose(task.spec_robot.rate_hz, rate):
            raise UserError(
                f"the judges of {name} learnt at {rate:g} Hz, the task runs at {task.spec_robot.rate_hz:g} Hz",
                f"make it with control_hz={rate:g}",
            )

    def reset(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        raw, info = self.env.reset(**kwargs)
        self._task = torch.tensor([self._model.config.tasks.index(info["task"])])
        self._states: list[Tensor] | None = None
        self._judge(raw)  # they remember what they saw first
        return raw, info | {"is_success": False}

    def step(self, action: NDArray[np.float32]) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """The reward is 1 at success, 0 otherwise."""
        raw, _, terminated, truncated, info = self.env.step(action)
        success = self._judge(raw)
        failed = terminated and not info["is_success"]
        return raw, float(success), success or failed, truncated, info | {"is_success": success}

    @torch.inference_mode()
    def _judge(self, raw: dict[str, Any]) -> bool:
        pictures = torch.from_numpy(np.stack([raw["pixels"][c] for c in self._model.cameras]))
        p, self._states = self._model.heads.success(pictures[None, None], self._task, self._states)
        return bool(p[0, 0] > self._model.config.limits.success)


def make(name: str, num_envs: int, **options: Any) -> LocalEnvs:
    """Rows of ``judged:<world model>@<environment>``, for :func:`vla_stack.envs.make`.

    Raises:
        UserError: As :class:`Judged`, or the environment has no cameras that the judges could look through.
    """
    judges, _, env_id = name.rpartition("@")
    if not is_task(env_id) and not is_benchmark(env_id):
        raise UserError(f"the judges of {judges} look at a robot, {env_id} is none", "use a task of sim or metaworld")
    shown = showing(judges, options)
    return LocalEnvs([Judged(construct(env_id, **shown), judges) for _ in range(num_envs)])


def showing(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of an environment that shows the judges' cameras beside its own.

    Raises:
        UserError: There is no world model, or the two want pictures of different sizes.
    """
    robot = shared(name).robot
    size, own = robot.cameras[0].height, tuple(options.get("cameras", ()))
    if own and options.get("image_size", size) != size:
        raise UserError(
            f"the judges of {name} see pictures of {size} pixels, the policy such of {options['image_size']}",
            "train one of them on pictures of the other's size",
        )
    return options | {"cameras": tuple(dict.fromkeys((*own, *(c.name for c in robot.cameras)))), "image_size": size}

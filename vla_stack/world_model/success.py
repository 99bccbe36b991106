"""Success as the judges of a world model see it: a reward where the task itself has none to give."""

from __future__ import annotations

from collections import deque
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vla_stack.envs.making import construct, is_task
from vla_stack.envs.vector import LocalEnvs
from vla_stack.errors import UserError
from vla_stack.world_model import guards
from vla_stack.world_model.model import WorldModel, shared


class SuccessDetector:
    """Says of an episode's frames, one after another, whether it has succeeded.

    Judges call many things a success that they have never seen the like of; so a success counts only where the guards
    hold (:func:`vla_stack.world_model.guards.doubts`) over the last frames, as many as a chunk has.

    Args:
        model: Whose judges and guards.
        task: The instruction, one of those that the judges know.
    """

    def __init__(self, model: WorldModel, task: str) -> None:
        self._model = model
        self._states: list[Tensor] | None = None
        self._device = model.bank.device
        self._task = torch.tensor([model.config.tasks.index(task)], device=self._device)
        self._recent: deque[tuple[Tensor, Tensor, Tensor]] = deque(maxlen=model.horizon)
        self._before: deque[Tensor] = deque(maxlen=model.horizon + 1)

    @torch.inference_mode()
    def see(
        self,
        pictures: dict[str, NDArray[np.uint8]],
        pose: NDArray[np.floating],
        command: NDArray[np.floating] | None = None,
    ) -> tuple[bool, tuple[str, ...]]:
        """Whether it has, in the next frame; and the guards that spoke against a success that the judges see.

        Args:
            pictures: Camera -> uint8 [H, W, 3], the model's cameras among them.
            pose: Measured pose of the tool [5], m and rad in the robot's base frame.
            command: Commanded pose [5] that led here; None at the first frame, which is no success.
        """
        seen = torch.from_numpy(np.stack([pictures[c] for c in self._model.cameras])).to(self._device)
        p, self._states = self._model.heads.success(seen[None, None], self._task, self._states)
        self._before.append(torch.as_tensor(pose, dtype=torch.float32, device=self._device))
        if command is None:
            return False, ()
        told = torch.as_tensor(command, dtype=torch.float32, device=self._device)
        self._recent.append((seen, self._before[-1], told))
        if not p[0, 0] > self._model.config.limits.success:
            return False, ()
        against = tuple(guards.doubts(self._model, *map(torch.stack, zip(*self._recent, strict=True)), self._before[0]))
        return not against, against


class Judged(gym.Wrapper):
    """A task whose success is what a :class:`SuccessDetector` says of its pictures, frame after frame.

    The task's own success neither pays nor ends an episode; what ends it otherwise, a failure or a limit, still does.

    Args:
        env: A task of ``sim``, made with the options of :func:`showing`.
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
        task: Any = self.env.unwrapped
        self._detector = SuccessDetector(self._model, info["task"])
        self._detector.see(raw["pixels"], task.tool)  # the judges remember what they saw first
        return raw, info | {"is_success": False, "guards": ()}

    def step(self, action: NDArray[np.float32]) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """The reward is 1 at success, 0 otherwise; ``guards`` are those that spoke against one."""
        raw, _, terminated, truncated, info = self.env.step(action)
        task: Any = self.env.unwrapped
        success, against = self._detector.see(raw["pixels"], task.tool, task.tool_command)
        failed = terminated and not info["is_success"]
        info |= {"is_success": success, "guards": against}
        return raw, float(success), success or failed, truncated, info


def make(name: str, num_envs: int, **options: Any) -> LocalEnvs:
    """Rows of ``judged:<world model>@<environment>``, for :func:`vla_stack.envs.make`.

    Raises:
        UserError: As :class:`Judged`, or the environment has no cameras that the judges could look through.
    """
    judges, _, env_id = name.rpartition("@")
    if not is_task(env_id):
        raise UserError(f"the judges of {judges} look at a robot's tool, {env_id} has none", "use a task of sim")
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

"""A frozen flow policy as the eyes of actors and critics: what it makes of an observation, and the robot's state."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vla_stack.errors import UserError
from vla_stack.policies.chunk_policy import load_policy
from vla_stack.policies.contract import FlowPolicy
from vla_stack.schema import Observation


class FrozenFeatures:
    """``FlowPolicy.features`` of a trained policy, native or LeRobot's, without gradients.

    Args:
        path: Policy directory.

    Raises:
        UserError: There is no policy, or none with features.
    """

    def __init__(self, path: str) -> None:
        self.policy = load_policy(path)
        if not isinstance(self.policy.policy, FlowPolicy):
            raise UserError(
                f"'method.features': {path} is no flow policy", "give a vla, moh, smolvla, pi0 or pi05 policy"
            )
        cameras = self.policy.spec.robot.cameras
        self.options: dict[str, Any] = {"cameras": tuple(c.name for c in cameras)}  # of the environment
        if cameras:
            self.options["image_size"] = cameras[0].height

    @torch.inference_mode()
    def __call__(self, raw: dict[str, Any], instruction: str) -> NDArray[np.float32]:
        """Features and state, float32 [d + s], of an environment's observation."""
        robot = self.policy.spec.robot
        images = {c.name: np.asarray(raw["pixels"][c.name], np.uint8) for c in robot.cameras}
        state = np.asarray(raw["agent_pos"], np.float32)
        observation = Observation(state[: len(robot.state)], images, instruction)
        observation.check(robot)
        policy = self.policy.policy
        seen = policy.features(policy.encode(self.policy.preprocess([observation])))[0]
        return np.concatenate([seen.float().numpy(force=True), state])


@cache
def frozen_features(path: str) -> FrozenFeatures:
    """One copy in memory for all environments of a process."""
    return FrozenFeatures(path)

"""A gripper that is open or closed and nothing between."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from vla_stack.errors import UserError
from vla_stack.lerobot_core import (
    EnvTransition,
    PipelineFeatureType,
    PolicyFeature,
    ProcessorStep,
    ProcessorStepRegistry,
    TransitionKey,
)
from vla_stack.policies.configuration_vla import VlaConfig
from vla_stack.schema import ACTION


@ProcessorStepRegistry.register("binary_gripper_processor")
@dataclass
class BinaryGripperStep(ProcessorStep):
    """Moves each gripper command to the nearer of its two extremes: of demonstrations before they are normalised, of
    predictions after they are commands again.

    Attributes:
        dims: Action dimensions that are grippers.
        low: Lowest command of each.
        high: Highest command of each.
    """

    dims: list[int] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)

    def __call__(self, transition: EnvTransition) -> EnvTransition:
        if (action := transition.get(TransitionKey.ACTION)) is None:
            return transition
        low, high = (torch.tensor(x, dtype=action.dtype, device=action.device) for x in (self.low, self.high))
        action = action.clone()
        action[..., self.dims] = torch.where(action[..., self.dims] > (low + high) / 2, high, low)
        return {**transition, TransitionKey.ACTION: action}

    def get_config(self) -> dict[str, Any]:
        return {"dims": self.dims, "low": self.low, "high": self.high}

    def transform_features(
        self, features: dict[PipelineFeatureType, dict[str, PolicyFeature]]
    ) -> dict[PipelineFeatureType, dict[str, PolicyFeature]]:
        return features


def gripper_steps(config: VlaConfig, stats: dict[str, dict[str, Any]] | None) -> list[ProcessorStep]:
    """The step, where the policy's gripper is binary; extremes are those of the data, else 0 and 1.

    Raises:
        UserError: No action dimension is named a gripper, one is learnt relative to the state, or there are several
            embodiments.
    """
    if config.gripper == "continuous":
        return []
    if config.embodiments:
        raise UserError("gripper=binary is for one embodiment", "set gripper=continuous")
    names = config.action_feature_names or []
    dims = [i for i, name in enumerate(names) if "gripper" in name.lower()]
    if not dims:
        raise UserError(f"gripper=binary, and no action is named a gripper: {names}", "set gripper=continuous")
    if config.use_relative_actions and "gripper" not in config.relative_exclude_joints:
        raise UserError("gripper=binary needs absolute gripper commands", "add 'gripper' to relative_exclude_joints")
    of = (stats or {}).get(ACTION, {})
    low, high = (
        [float(of[key][i]) if key in of else default for i in dims] for key, default in (("min", 0.0), ("max", 1.0))
    )
    return [BinaryGripperStep(dims, low, high)]

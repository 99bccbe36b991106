"""Processors of policies on states: observations in standard deviations, actions in [-1, 1] of the robot's range."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla_stack.errors import UserError
from vla_stack.lerobot_core import (
    AddBatchDimensionProcessorStep,
    DeviceProcessorStep,
    EnvTransition,
    NormalizerProcessorStep,
    PipelineFeatureType,
    PolicyAction,
    PolicyFeature,
    PolicyProcessorPipeline,
    ProcessorStep,
    ProcessorStepRegistry,
    RelativeActionsProcessorStep,
    RenameObservationsProcessorStep,
    TransitionKey,
    make_policy_processor_pipelines,
)
from vla_stack.policies.configuration_state import StateConfig, StateFlowConfig, StateGaussianConfig
from vla_stack.policies.processor_embodiment import EmbodimentInputStep
from vla_stack.policies.processor_gripper import BinaryGripperStep
from vla_stack.policies.processor_vla import ActionOriginStep
from vla_stack.schema import ACTION, OBS_STATE, RobotSpec

ACTOR_STATE = "observation.actor_state"  # the normalised state, where an encoder reads the other one
CLIP = 5.0  # standard deviations
LEAST_STD = 0.01  # of an entry that hardly moves

Features = dict[PipelineFeatureType, dict[str, PolicyFeature]]
Pipelines = tuple[
    PolicyProcessorPipeline[dict[str, Any], dict[str, Any]], PolicyProcessorPipeline[PolicyAction, PolicyAction]
]


@ProcessorStepRegistry.register("state_scale_processor")
class StateScaleStep(ProcessorStep):
    """Observations in standard deviations, at most ``CLIP`` of them: clip((s - mean) / std).

    Args:
        encoder_dim: First entries of the state that stay as they are for an encoder; the normalised state is then added
            as ``ACTOR_STATE``. 0: there is no encoder, and the normalised state takes the state's place.
        mean: Of each entry, float32 [s].
        std: Likewise.
    """

    def __init__(self, encoder_dim: int = 0, mean: Any = (), std: Any = ()) -> None:
        self.encoder_dim = encoder_dim
        self.mean, self.std = (torch.as_tensor(np.asarray(x, np.float32)) for x in (mean, std))

    def __call__(self, transition: EnvTransition) -> EnvTransition:
        observation = dict(transition[TransitionKey.OBSERVATION])
        state: Tensor = observation[OBS_STATE]
        mean, std = self.mean.to(state.device), self.std.to(state.device)
        scaled = ((state - mean) / std).clamp(-CLIP, CLIP)
        if self.encoder_dim:
            observation[OBS_STATE], observation[ACTOR_STATE] = state[..., : self.encoder_dim], scaled
        else:
            observation[OBS_STATE] = scaled
        return {**transition, TransitionKey.OBSERVATION: observation}

    def get_config(self) -> dict[str, Any]:
        return {"encoder_dim": self.encoder_dim}

    def state_dict(self) -> dict[str, Tensor]:
        return {"mean": self.mean, "std": self.std}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.mean, self.std = state["mean"], state["std"]

    def transform_features(self, features: Features) -> Features:
        return features


@ProcessorStepRegistry.register("action_range_processor")
@dataclass
class ActionRangeStep(ProcessorStep):
    """Commands from actions in [-1, 1], or the other way round.

    Attributes:
        low: Lowest command of each dimension.
        high: Highest.
        to_command: What it makes: commands, within their range; else actions.
    """

    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    to_command: bool = True

    def __call__(self, transition: EnvTransition) -> EnvTransition:
        if (action := transition.get(TransitionKey.ACTION)) is None:
            return transition
        low, high = (torch.tensor(x, dtype=action.dtype, device=action.device) for x in (self.low, self.high))
        middle, half = (high + low) / 2, (high - low) / 2
        if self.to_command:
            made = middle + half * action.clamp(-1.0, 1.0)
        else:  # where a dimension has one command alone, the action is 0
            made = torch.where(half > 0, (action - middle) / half, 0.0).clamp(-1.0, 1.0)
        return {**transition, TransitionKey.ACTION: made}

    def get_config(self) -> dict[str, Any]:
        return {"low": self.low, "high": self.high, "to_command": self.to_command}

    def transform_features(self, features: Features) -> Features:
        return features


def state_processors(
    config: StateConfig, mean: Any, std: Any, low: Any, high: Any, encoder: PolicyProcessorPipeline | None = None
) -> Pipelines:
    """Pre- and post-processor of a policy.

    Args:
        config: Its configuration.
        mean: Of the state's entries, [s].
        std: Likewise.
        low: Lowest command, [a].
        high: Highest.
        encoder: The preprocessor of the encoder, where there is one; its steps for observations become part of this.
    """
    low, high = ([float(x) for x in bound] for bound in (low, high))
    scale = StateScaleStep(config.encoder_state_dim if config.encoder is not None else 0, mean, std)
    seen = [] if encoder is None else observation_steps(encoder)
    return make_policy_processor_pipelines(
        input_steps=[
            RenameObservationsProcessorStep(rename_map={}),
            AddBatchDimensionProcessorStep(),
            scale,
            ActionRangeStep(low, high, to_command=False),
            *seen,
            DeviceProcessorStep(device=config.device),
        ],
        output_steps=[ActionRangeStep(low, high), DeviceProcessorStep(device="cpu")],
    )


def observation_steps(encoder: PolicyProcessorPipeline) -> list[ProcessorStep]:
    """The steps of a preprocessor that make observations; none that renames, batches, or touches actions.

    Raises:
        UserError: One step does both, that of a policy that drives several robots.
    """
    skipped = (
        *(RenameObservationsProcessorStep, AddBatchDimensionProcessorStep, DeviceProcessorStep),
        *(RelativeActionsProcessorStep, ActionOriginStep, BinaryGripperStep),
    )
    steps = []
    for step in encoder.steps:
        if isinstance(step, EmbodimentInputStep):
            raise UserError("a policy that drives several robots cannot be the encoder", "give one of this robot alone")
        if isinstance(step, NormalizerProcessorStep):
            stats = {key: value for key, value in (step.stats or {}).items() if key != ACTION}
            step = NormalizerProcessorStep(features=step.features, norm_map=step.norm_map, stats=stats)
        if not isinstance(step, skipped):
            steps.append(step)
    return steps


def make_state_gaussian_pre_post_processors(
    config: StateGaussianConfig, dataset_stats: dict[str, dict[str, Any]] | None = None
) -> Pipelines:
    """Pre- and post-processor for the statistics of a dataset; see :func:`state_processors` for others."""
    return _of_stats(config, dataset_stats)


def make_state_flow_pre_post_processors(
    config: StateFlowConfig, dataset_stats: dict[str, dict[str, Any]] | None = None
) -> Pipelines:
    """Pre- and post-processor for the statistics of a dataset; see :func:`state_processors` for others."""
    return _of_stats(config, dataset_stats)


def _of_stats(config: StateConfig, stats: dict[str, dict[str, Any]] | None) -> Pipelines:
    """Processors by statistics of the state, and by the robot's range where it is known, else the data's."""
    if stats is None or config.encoder is not None:
        raise UserError(f"the processors of a new '{config.type}' need statistics, and no encoder")
    low, high = stats[ACTION]["min"], stats[ACTION]["max"]
    if config.robot is not None:
        robot = RobotSpec.from_json(config.robot)
        if np.isfinite([robot.action_low, robot.action_high]).all():
            low, high = robot.action_low, robot.action_high
    state = stats[OBS_STATE]
    return state_processors(config, state["mean"], np.maximum(state["std"], LEAST_STD), low, high)

"""Processors of the native VLA: what happens between recorded or live data and the network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from vla_stack.lerobot_core import (
    AbsoluteActionsProcessorStep,
    EnvTransition,
    PolicyAction,
    PolicyProcessorPipeline,
    ProcessorStep,
    ProcessorStepRegistry,
    RelativeActionsProcessorStep,
    TransitionKey,
    make_default_policy_processor_steps,
    make_policy_processor_pipelines,
)
from vla_stack.policies.configuration_vla import VlaConfig
from vla_stack.policies.processor_embodiment import embodiment_steps
from vla_stack.policies.processor_gripper import gripper_steps
from vla_stack.policies.processor_text import Features, text_step
from vla_stack.schema import OBS_STATE


@ProcessorStepRegistry.register("action_origin_processor")
@dataclass
class ActionOriginStep(ProcessorStep):
    """Gives a batch without actions (at inference) the command 0, float [b, 1, a].

    Passed through the relative and normalising steps, it tells the policy where the command 0 lies in its own
    coordinates: the origin against which ``select_action`` compares the states of two calls.

    Attributes:
        action_dim: Entries of one action.
    """

    action_dim: int = 0

    def __call__(self, transition: EnvTransition) -> EnvTransition:
        if transition.get(TransitionKey.ACTION) is not None:
            return transition
        state = transition[TransitionKey.OBSERVATION][OBS_STATE]
        return {**transition, TransitionKey.ACTION: torch.zeros(len(state), 1, self.action_dim)}

    def get_config(self) -> dict[str, Any]:
        return {"action_dim": self.action_dim}

    def transform_features(self, features: Features) -> Features:
        return features


def make_vla_pre_post_processors(
    config: VlaConfig, dataset_stats: dict[str, dict[str, Any]] | None = None, dataset_meta: Any = None
) -> tuple[
    PolicyProcessorPipeline[dict[str, Any], dict[str, Any]], PolicyProcessorPipeline[PolicyAction, PolicyAction]
]:
    """Pre- and post-processor of a policy.

    Args:
        config: The policy's configuration.
        dataset_stats: Statistics by feature; those of ``action`` must be of actions relative to the chunk's start
            where ``config.use_relative_actions`` is set. For a policy that drives several robots, one such dict for
            each, by the embodiment's name.
        dataset_meta: LeRobot's metadata of the training data, or anything with such ``tasks``: what sub-words are
            learnt from.
    """
    steps = make_default_policy_processor_steps(config, None if config.embodiments else dataset_stats)
    inputs: list[ProcessorStep]
    outputs: list[ProcessorStep]
    if config.embodiments:
        to_network, to_command = embodiment_steps(config, dataset_stats)
        inputs, outputs = [to_network], [to_command]
    else:
        relative = RelativeActionsProcessorStep(
            enabled=config.use_relative_actions,
            exclude_joints=config.relative_exclude_joints,
            action_names=config.action_feature_names,
        )
        absolute = AbsoluteActionsProcessorStep(enabled=config.use_relative_actions, relative_step=relative)
        inputs, outputs = [relative, steps.normalize], [steps.unnormalize, absolute]
    # Behind the others: a state in the prompt is the normalised one.
    inputs.append(text_step(config, () if dataset_meta is None else list(dataset_meta.tasks.index)))
    gripper = gripper_steps(config, dataset_stats)
    assert config.action_feature is not None
    return make_policy_processor_pipelines(
        input_steps=[
            steps.rename_observations,
            steps.add_batch_dim,
            *gripper,
            ActionOriginStep(config.action_feature.shape[0]),
            steps.to_device,
            *inputs,
        ],
        output_steps=[*outputs, *gripper, steps.to_cpu],
    )

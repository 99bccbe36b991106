"""Processors of the native VLA: what happens between recorded or live data and the network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from lerobot.configs import FeatureType, PipelineFeatureType, PolicyFeature
from lerobot.lerobot_types import EnvTransition, PolicyAction, TransitionKey
from lerobot.processor import (
    AbsoluteActionsProcessorStep,
    PolicyProcessorPipeline,
    ProcessorStep,
    ProcessorStepRegistry,
    RelativeActionsProcessorStep,
    make_default_policy_processor_steps,
    make_policy_processor_pipelines,
)
from lerobot.utils.constants import OBS_LANGUAGE_ATTENTION_MASK, OBS_LANGUAGE_TOKENS

from vla_stack.errors import UserError
from vla_stack.policies.backbone_text import BackboneTokenizerStep, read_tokenizer
from vla_stack.policies.configuration_vla import VlaConfig
from vla_stack.policies.processor_embodiment import embodiment_steps
from vla_stack.policies.processor_gripper import gripper_steps
from vla_stack.policies.text import PAD, hash_words
from vla_stack.schema import OBS_STATE

Features = dict[PipelineFeatureType, dict[str, PolicyFeature]]


@ProcessorStepRegistry.register("hash_tokenizer_processor")
@dataclass
class HashTokenizerStep(ProcessorStep):
    """Adds ``observation.language.tokens`` int64 [b, n] and their mask, from the instruction ``task``.

    Attributes:
        buckets: Size of the hash's range.
        length: Words of the longest instruction.
    """

    buckets: int = 2048
    length: int = 16

    def __call__(self, transition: EnvTransition) -> EnvTransition:
        task = (transition.get(TransitionKey.COMPLEMENTARY_DATA) or {}).get("task")
        if task is None:
            raise UserError("the batch has no 'task'", "give each observation its instruction")
        ids = [hash_words(t, self.buckets, self.length) for t in ([task] if isinstance(task, str) else task)]
        tokens = torch.tensor(ids, dtype=torch.int64)
        observation = dict(transition.get(TransitionKey.OBSERVATION) or {})
        observation[OBS_LANGUAGE_TOKENS], observation[OBS_LANGUAGE_ATTENTION_MASK] = tokens, tokens != PAD
        return {**transition, TransitionKey.OBSERVATION: observation}

    def get_config(self) -> dict[str, Any]:
        return {"buckets": self.buckets, "length": self.length}

    def transform_features(self, features: Features) -> Features:
        language = PolicyFeature(type=FeatureType.LANGUAGE, shape=(self.length,))
        observation = features[PipelineFeatureType.OBSERVATION]
        observation[OBS_LANGUAGE_TOKENS] = observation[OBS_LANGUAGE_ATTENTION_MASK] = language
        return features


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
    config: VlaConfig, dataset_stats: dict[str, dict[str, Any]] | None = None
) -> tuple[
    PolicyProcessorPipeline[dict[str, Any], dict[str, Any]], PolicyProcessorPipeline[PolicyAction, PolicyAction]
]:
    """Pre- and post-processor of a policy.

    Args:
        config: The policy's configuration.
        dataset_stats: Statistics by feature; those of ``action`` must be of actions relative to the chunk's start
            where ``config.use_relative_actions`` is set. For a policy that drives several robots, one such dict for
            each, by the embodiment's name.
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
    words: list[ProcessorStep] = []
    if config.backbone:  # behind the others: a state in the prompt is the normalised one
        tokenizer = read_tokenizer(config.backbone, config.pretrained_path)
        inputs.append(BackboneTokenizerStep(config.max_tokens, config.state_input == "prompt", tokenizer))
    else:
        words = [HashTokenizerStep(config.vocabulary, config.max_words)]
    gripper = gripper_steps(config, dataset_stats)
    assert config.action_feature is not None
    return make_policy_processor_pipelines(
        input_steps=[
            steps.rename_observations,
            steps.add_batch_dim,
            *words,
            *gripper,
            ActionOriginStep(config.action_feature.shape[0]),
            steps.to_device,
            *inputs,
        ],
        output_steps=[*outputs, *gripper, steps.to_cpu],
    )

"""The policy that a run trains: new, from published weights, or from a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from safetensors import safe_open

from vla_stack.errors import UserError
from vla_stack.lerobot_core import (
    FeatureType,
    PolicyFeature,
    PreTrainedConfig,
    PreTrainedPolicy,
    make_pre_post_processors,
)
from vla_stack.lerobot_units import dimension_names
from vla_stack.policies.configuration_moh import base_config
from vla_stack.policies.configuration_vla import VlaConfig
from vla_stack.policies.dataset_facts import describe
from vla_stack.policies.directory import WEIGHTS, check_manifest, resolve_source
from vla_stack.policies.reading import fetching, read_policy, read_processors
from vla_stack.policies.registry import pads, policy_class
from vla_stack.schema import ACTION, OBS_STATE
from vla_stack.training.checkpoint import PRETRAINED, trainable
from vla_stack.training.lerobot_metadata import LeRobotDatasetMetadata, dataset_to_policy_features
from vla_stack.training.lora import ADAPTERS_FILE, add_lora, load_adapters
from vla_stack.training.recipe import LoraRecipe, PolicyRecipe


def new_policy(config: PreTrainedConfig, meta: LeRobotDatasetMetadata, lora: LoraRecipe) -> PreTrainedPolicy:
    """A policy for the features of a dataset; with weights where ``config.pretrained_path`` names some.

    Args:
        config: Its configuration. Input features that are set stay, so that a recipe can choose cameras.
        meta: LeRobot's metadata of the dataset.
        lora: Adapters to train instead of the weights.

    Raises:
        UserError: The dataset lacks a camera that the weights need, or the weights cannot be read.
    """
    features = dataset_to_policy_features(meta.features)
    if config.pretrained_path and not pads(base_config(config).type):
        check_sizes(config, features, str(meta.root))
    config.output_features = {key: f for key, f in features.items() if f.type is FeatureType.ACTION}
    inputs = {key: f for key, f in features.items() if key not in config.output_features}
    config.input_features = config.input_features or inputs
    if hasattr(config, "action_feature_names"):
        config.action_feature_names = dimension_names(meta.features[ACTION])
    cameras = [key for key, f in config.input_features.items() if f.type is FeatureType.VISUAL]
    if cameras and not set(cameras) & set(inputs):
        remedy = f"it has {', '.join(meta.camera_keys)}; train from scratch, or name the cameras alike"
        raise UserError(f"{meta.root} has none of the policy's cameras ({', '.join(cameras)})", remedy)
    known: dict[str, Any] = {"dataset_stats": meta.stats}
    if isinstance(native := base_config(config), VlaConfig):
        describe(native, meta)
    else:
        known["dataset_meta"] = meta
    if config.pretrained_path:
        if Path(config.pretrained_path).is_dir():
            check_manifest(Path(config.pretrained_path))
        policy = read_policy(config.pretrained_path, config, **known)
    else:
        with fetching(config.type):
            policy = policy_class(config.type)(config, **known)
    return to_train(policy.to(config.device), lora)


def check_sizes(config: PreTrainedConfig, features: dict[str, PolicyFeature], root: str) -> None:
    """Raise a :class:`UserError` where weights are for a state or action of another size than a dataset's."""
    expected = {**(config.input_features or {}), **(config.output_features or {})}
    for key in (OBS_STATE, ACTION):
        have, want = (f[key].shape[0] if key in f else 0 for f in (features, expected))
        if key in expected and have != want:
            raise UserError(
                f"{root} has {key}[{have}], the policy in {config.pretrained_path} is for {key}[{want}]",
                "start from weights of this robot, or from none",
            )


def new_processors(
    config: PreTrainedConfig, stats: dict[str, dict[str, Any]], metas: Sequence[LeRobotDatasetMetadata]
) -> tuple[Any, Any]:
    """Pre- and post-processor of a policy that is new to its data.

    Args:
        config: Its configuration.
        stats: Statistics by feature.
        metas: LeRobot's metadata of the datasets; the instructions of all are what sub-words are learnt from.

    Raises:
        UserError: A tokenizer cannot be had.
    """
    meta = copy(metas[0])
    meta.tasks = pd.concat([m.tasks for m in metas])
    with fetching(config.type):
        return make_pre_post_processors(config, dataset_stats=stats, dataset_meta=meta)


def restore(checkpoint: Path, config: PreTrainedConfig, recipe: PolicyRecipe) -> tuple[PreTrainedPolicy, Any, Any]:
    """Policy and processors of a checkpoint.

    Raises:
        UserError: The checkpoint was trained otherwise than the recipe says, or cannot be read.
    """
    directory = checkpoint / PRETRAINED
    processors = read_processors(directory, config, str(config.device))
    if (directory / ADAPTERS_FILE).exists() != bool(recipe.lora.rank):
        raise UserError(f"{directory} was trained with other 'policy.lora'", "resume with the run's own recipe")
    if recipe.lora.rank:
        if recipe.pretrained:
            policy = read_policy(recipe.pretrained, config)
        else:
            base_config(config).pretrained_path = Path(resolve_source(recipe.weights))
            policy = policy_class(config.type)(config)
        policy = to_train(policy.to(config.device), recipe.lora)
        load_adapters(policy, directory)
        return policy, *processors
    policy = read_policy(directory, config)
    rounded = [name for name, p in trainable(policy).items() if p.dtype != torch.float32]
    to_train(policy, recipe.lora)
    with safe_open(directory / WEIGHTS, framework="pt") as file, torch.no_grad():
        for name in rounded:
            policy.get_parameter(name).copy_(file.get_tensor(name))
    return policy, *processors


def to_train(policy: PreTrainedPolicy, lora: LoraRecipe) -> PreTrainedPolicy:
    """A policy as it is trained: with adapters where the recipe says so, and what changes in float32."""
    if lora.rank:
        add_lora(policy, lora)
    return in_float32(policy)


def in_float32(policy: PreTrainedPolicy) -> PreTrainedPolicy:
    """What is trained in float32, whatever the rest is: an update of a ten-thousandth is lost in bfloat16."""
    for parameter in trainable(policy).values():
        parameter.data = parameter.data.float()
    return policy

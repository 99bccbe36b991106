"""Several robots behind one policy: what a recipe's sources make of its configuration, statistics and weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from vla_stack.data.stats import RELATIVE_ACTION, load_stats
from vla_stack.errors import UserError
from vla_stack.lerobot_core import (
    FeatureType,
    PolicyFeature,
    PreTrainedConfig,
    PreTrainedPolicy,
    make_pre_post_processors,
)
from vla_stack.policies.configuration_moh import base_config
from vla_stack.policies.configuration_vla import VlaConfig
from vla_stack.policies.embodiment import Embodiment
from vla_stack.policies.processor_embodiment import EmbodimentInputStep
from vla_stack.policies.reading import read_policy
from vla_stack.policies.registry import policy_class
from vla_stack.schema import ACTION, OBS_STATE, camera_name, image_key
from vla_stack.training.lerobot_metadata import LeRobotDatasetMetadata
from vla_stack.training.policies import new_processors, to_train
from vla_stack.training.recipe import LoraRecipe
from vla_stack.training.sources import Source, Stats, check_same, pooled


def is_plain(config: PreTrainedConfig, sources: Sequence[Source]) -> bool:
    """Whether a policy is of one robot whose cameras keep their names: then it needs to know nothing of embodiments."""
    names = {s.embodiment.name for s in sources}
    renamed = any(slot != camera for s in sources for slot, camera in s.embodiment.cameras.items())
    return len(names) == 1 and not renamed and not getattr(config, "embodiments", None)


def add_embodiments(config: VlaConfig, sources: Sequence[Source], grow: bool = True) -> list[Embodiment]:
    """Enter the robots of a recipe, and features that hold all of them, into a configuration.

    A configuration that has embodiments already (of a checkpoint) keeps them, in their order, and its features.

    Args:
        config: The policy's configuration.
        sources: The recipe's datasets.
        grow: Whether a checkpoint may get further embodiments; not when a run is resumed.

    Returns:
        The embodiments that the configuration did not have.

    Raises:
        UserError: An embodiment of the checkpoint is another robot in the recipe, or a new one does not fit it.
    """
    known = {d["name"]: Embodiment.from_json(d) for d in config.embodiments}
    new: dict[str, Embodiment] = {}
    for source in sources:
        mine = source.embodiment
        if mine.name in known:
            check_same(known[mine.name], mine, f"the policy and {source.key}")
        elif known and not grow:
            raise UserError(f"{source.key}: the run has no embodiment '{mine.name}'", f"it has {', '.join(known)}")
        else:
            new[mine.name] = mine
    if known:
        for embodiment in new.values():
            check_fits(config, embodiment)
    else:
        set_features(config, list(new.values()))
    config.embodiments = [*config.embodiments, *(e.to_json() for e in new.values())]
    return list(new.values())


def set_features(config: VlaConfig, embodiments: Sequence[Embodiment]) -> None:
    """Camera slots and padded sizes that hold all embodiments."""
    slots: dict[str, PolicyFeature] = {}
    for embodiment in embodiments:
        for slot, camera in zip(embodiment.cameras, embodiment.robot.cameras, strict=True):
            slots.setdefault(image_key(slot), PolicyFeature(FeatureType.VISUAL, (3, camera.height, camera.width)))
    states = max([len(e.robot.state) for e in embodiments] + [config.max_state_dim])
    actions = max([len(e.robot.action) for e in embodiments] + [config.max_action_dim])
    config.input_features = {**slots, OBS_STATE: PolicyFeature(FeatureType.STATE, (states,))}
    config.output_features = {ACTION: PolicyFeature(FeatureType.ACTION, (actions,))}
    config.max_state_dim, config.max_action_dim = states, actions
    config.robot = config.action_feature_names = None


def check_fits(config: VlaConfig, embodiment: Embodiment) -> None:
    """Raise a :class:`UserError` where a robot is larger than the policy, or has other cameras."""
    robot, name = embodiment.robot, embodiment.name
    for what, size, room in (
        ("state", len(robot.state), config.max_state_dim),
        ("action", len(robot.action), config.max_action_dim),
    ):
        if size > room:
            remedy = f"pretrain with policy.options.max_{what}_dim={size} or more"
            raise UserError(f"embodiment '{name}' has {size} {what} entries, the policy has room for {room}", remedy)
    slots = [camera_name(key) for key in config.camera_keys]
    if odd := [slot for slot in embodiment.cameras if slot not in slots]:
        raise UserError(
            f"embodiment '{name}' has a camera in slot '{odd[0]}', the policy has {', '.join(slots)}",
            "map its cameras to these with `cameras: {slot: camera}`",
        )


def embodiment_stats(sources: Sequence[Source], horizon: int) -> dict[str, Stats]:
    """Statistics of state and action by embodiment, over all its datasets, each weighted by its frames."""
    out = {}
    for name in dict.fromkeys(s.embodiment.name for s in sources):
        own = [s for s in sources if s.embodiment.name == name]
        parts = []
        for source in own:
            relative = np.array(source.embodiment.relative) if any(source.embodiment.relative) else None
            stats = load_stats(source.dataset, horizon, relative, source.counted)
            parts.append({OBS_STATE: stats[OBS_STATE], ACTION: stats[ACTION if relative is None else RELATIVE_ACTION]})
        out[name] = pooled(parts, [source.frames for source in own])
    return out


def mixed_policy(
    config: PreTrainedConfig, sources: Sequence[Source], lora: LoraRecipe
) -> tuple[PreTrainedPolicy, Any, Any]:
    """A policy of several robots and its processors; with weights where ``config.pretrained_path`` names some.

    A checkpoint's embodiments keep their statistics, which its weights know; robots that it has not seen are added.

    Args:
        config: The policy's configuration; features and embodiments are filled in.
        sources: The recipe's datasets.
        lora: Low-rank adapters to train instead of all weights.

    Raises:
        UserError: The policy type, or the checkpoint, is for one robot; or a robot does not fit the checkpoint.
    """
    base = base_config(config)
    if not isinstance(base, VlaConfig):
        names = ", ".join(dict.fromkeys(s.embodiment.name for s in sources))
        raise UserError(
            f"policy '{config.type}' drives one robot, by its cameras' own names; data.sources has {names}",
            "take policy.type=vla, or datasets of one robot without camera slots",
        )
    start, saved = config.pretrained_path, len(base.embodiments)
    if start and not saved:
        raise UserError(
            f"the policy in {start} drives one robot whose cameras keep their names",
            "start from one that was trained on data.sources, or leave policy.pretrained empty",
        )
    policy = read_policy(start, config) if start else None
    new = add_embodiments(base, sources)
    config.input_features, config.output_features = base.input_features, base.output_features
    stats = embodiment_stats(sources, len(config.action_delta_indices or [0]))
    if policy is None:
        policy = policy_class(config.type)(config)
        metas = [LeRobotDatasetMetadata(f"local/{s.dataset.root.name}", root=s.dataset.root) for s in sources]
        pre, post = new_processors(config, stats, metas)
    else:
        if lora.rank and new:
            names = ", ".join(e.name for e in new)
            raise UserError(f"'policy.lora' keeps all weights, {names} would need new ones", "set policy.lora.rank=0")
        policy = grown(policy, len(base.embodiments))
        robots = {"embodiments": base.embodiments}
        overrides = {"device_processor": {"device": str(config.device)}, "embodiment_input_processor": robots}
        pre, post = make_pre_post_processors(config, str(start), preprocessor_overrides=overrides)
        step = next(step for step in pre.steps if isinstance(step, EmbodimentInputStep))
        step.set_stats({e.name: stats[e.name] for e in new}, base.normalization_mapping)
    return to_train(policy.to(config.device), lora), pre, post


def grown(policy: PreTrainedPolicy, count: int) -> PreTrainedPolicy:
    """The policy with tokens for ``count`` embodiments; new ones start as the mean of those that are there."""
    prefix = next(m for m in policy.modules() if isinstance(getattr(m, "embodiment", None), nn.Embedding))
    weight = prefix.embodiment.weight.data
    rows = weight.mean(0, keepdim=True).expand(count - len(weight), -1)
    prefix.embodiment = nn.Embedding.from_pretrained(torch.cat((weight, rows)), freeze=False)
    return policy

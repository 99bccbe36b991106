"""From a recipe to the things that a loop turns: policy, processors, loader, loss."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from vla_stack.data.features import read_robot_spec
from vla_stack.data.stats import RELATIVE_ACTION, load_stats
from vla_stack.errors import UserError, check_options, first_line
from vla_stack.lerobot_core import (
    FeatureType,
    NormalizationMode,
    PolicyFeature,
    PreTrainedConfig,
    PreTrainedPolicy,
    make_policy_config,
)
from vla_stack.policies.chunk_policy import ROBOT
from vla_stack.policies.configuration_moh import base_config
from vla_stack.policies.configuration_vla import VlaConfig  # its import registers the policy type `vla`
from vla_stack.policies.dataset_facts import relative_mask
from vla_stack.policies.directory import resolve_source
from vla_stack.policies.reading import read_config, read_processors
from vla_stack.policies.registry import is_known, known_types, pads
from vla_stack.schema import ACTION, IMAGE_TOKENS, OBS_STATE, RobotSpec, camera_name, image_key
from vla_stack.training.augmentation import NONE, Augmentation, is_picture
from vla_stack.training.cached_views import cached_views
from vla_stack.training.checkpoint import PRETRAINED
from vla_stack.training.embodiments import add_embodiments, is_plain, mixed_policy
from vla_stack.training.lerobot_metadata import LeRobotDatasetMetadata, dataset_to_policy_features
from vla_stack.training.loaders import make_loader
from vla_stack.training.lora import save_merged
from vla_stack.training.policies import new_policy, new_processors, restore
from vla_stack.training.recipe import PolicyRecipe, Recipe
from vla_stack.training.sources import Source, Stats, open_sources, pooled, settle_relative
from vla_stack.training.text_pairs import co_trained, with_pairs
from vla_stack.training.validation import HeldOut, hold_out

PROCESSED = (  # options that processors read; weights mean what they were trained on
    *("normalization_mapping", "use_relative_actions", "relative_exclude_joints", "gripper"),
    *("state_input", "max_tokens", "tokenizer_max_length", "text", "text_encoder"),
    *("vocabulary", "bpe_dropout", "max_words"),
)
Batch = dict[str, Any]
Loss = Callable[[PreTrainedPolicy, Batch, torch.Generator], tuple[Tensor, dict[str, Any]]]
Fits = Callable[[PreTrainedConfig, PolicyRecipe], None]  # raises a UserError for a policy that a method is not for


class Loader(Protocol):
    """Endless batches of numpy arrays whose position is JSON."""

    def __iter__(self) -> Iterator[dict[str, Any]]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass
class Parts:
    """What the loop needs; a test may put its own policy and loader here."""

    policy: PreTrainedPolicy
    preprocess: Callable[[Batch], Batch]
    postprocess: Any
    loader: Loader
    loss: Loss
    robot: RobotSpec | None = None
    lora: bool = False
    augmentation: Augmentation = NONE
    held_out: HeldOut | None = None

    @property
    def float_images(self) -> bool:
        """Whether the policy's processors want float images; the native VLA takes them as recorded."""
        return not isinstance(base_config(self.policy.config), VlaConfig)

    def save_pretrained(self, directory: Path) -> None:
        """Write the LeRobot policy directory: config, weights, processors."""
        save_merged(self.policy, directory) if self.lora else self.policy.save_pretrained(directory)
        for processor in (self.preprocess, self.postprocess):
            processor.save_pretrained(directory)  # type: ignore[union-attr]
        if self.robot is not None and not hasattr(self.policy.config, "robot"):
            (directory / ROBOT).write_text(json.dumps(self.robot.to_json(), indent=1))


class Objective(nn.Module):
    """A method's loss as a module, so that data parallelism sees every call into the policy, whatever the method."""

    def __init__(self, policy: PreTrainedPolicy, loss: Loss) -> None:
        super().__init__()
        self.policy = policy
        self.loss = loss

    def forward(self, batch: Batch, generator: torch.Generator) -> tuple[Tensor, dict[str, Any]]:
        return self.loss(self.policy, batch, generator)


def build(
    recipe: Recipe,
    loss: Loss,
    device: torch.device,
    rank: int = 0,
    checkpoint: Path | None = None,
    fits: Fits | None = None,
) -> Parts:
    """Make everything that a recipe names.

    Args:
        recipe: The run.
        loss: What its method minimises.
        device: Where the policy lives.
        rank: Process index; each rank reads its own order of the data.
        checkpoint: Continue from this checkpoint's policy directory.
        fits: Refuses a policy that the loss is not for.

    Raises:
        UserError: Unknown policy type or option, or one that the method is not for; dataset or policy directory that
            cannot be opened.
    """
    config = make_config(recipe.policy, device, checkpoint)
    if fits is not None:
        fits(config, recipe.policy)
    sources, held_out = open_sources(recipe.data, config), None
    if recipe.data.validation:
        sources, held_out = hold_out(sources, recipe.data.validation, checkpoint and checkpoint.parents[1])
    if checkpoint is None:
        options = recipe.policy.options.get("base") or recipe.policy.options
        known = bool(recipe.policy.weights) or "use_relative_actions" in options
        settle_relative(base_config(config), sources, known)
    torch.manual_seed(recipe.seed)
    if checkpoint is not None:
        adapts = bool(recipe.policy.lora.rank)  # nothing else needs the weights that a run started from
        policy, pre, post = restore(checkpoint, config, located(recipe.policy) if adapts else recipe.policy)
        if not is_plain(config, sources):
            add_embodiments(base_config(config), sources, grow=False)
    elif not is_plain(config, sources):
        policy, pre, post = mixed_policy(config, sources, recipe.policy.lora)
    else:
        roots = [source.dataset.root for source in sources]
        metas = [LeRobotDatasetMetadata(f"local/{root.name}", root=root) for root in roots]
        if any(s.recipe.cameras is not None for s in sources) and not config.input_features:
            config.input_features = input_features(metas[0], tuple(sources[0].embodiment.cameras))
        # Weights mean actions in units of their own statistics. Demonstrations of the same robot, perhaps from a corner
        # of its range, must not rescale what it has learnt.
        start = started_from(config)
        keep = start if start and knows_robot(start, config, roots[0]) and same_processing(start, config) else None
        policy = new_policy(config, metas[0], recipe.policy.lora)
        if keep is not None:
            pre, post = read_processors(keep, config, device.type)
        else:
            pre, post = new_processors(config, dataset_stats(sources, metas, config), metas)
    inputs = base_config(config).input_features or {}
    cameras = [camera_name(key) for key, ft in inputs.items() if ft.type is FeatureType.VISUAL]
    if odd := set(recipe.data.augmentation.camera_shift) - set(cameras):
        message = f"data.augmentation.camera_shift: the policy has no camera '{sorted(odd)[0]}'"
        raise UserError(message, f"it has {', '.join(cameras)}")
    described = (sources[0].dataset.root / "meta" / "robot.json").is_file()
    robot = read_robot_spec(sources[0].dataset.root) if described else None
    lora = bool(recipe.policy.lora.rank)
    tokens = cached_views(recipe, sources, policy, pre, device) if recipe.data.cached_views else ()
    demonstrations = make_loader(recipe, sources, config, rank, tokens)
    validation = HeldOut(recipe, held_out, config, loss) if held_out else None
    parts = Parts(policy, pre, post, demonstrations, loss, robot, lora, recipe.data.augmentation, validation)
    if not (pairs := recipe.data.text_pairs).root:
        return parts
    loader = with_pairs(pairs, demonstrations, config, pre, seed=recipe.seed * 1000 + rank)
    return replace(parts, loader=loader, loss=co_trained(loss, pairs.weight))


def located(recipe: PolicyRecipe) -> PolicyRecipe:
    """A policy's recipe with the directory of ``pretrained``, whatever name of it a person gave.

    Raises:
        UserError: Nothing of that name holds a policy, and it is none of the hub's.
    """
    return replace(recipe, pretrained=str(resolve_source(recipe.pretrained))) if recipe.pretrained else recipe


def started_from(config: PreTrainedConfig) -> Path | None:
    """Where the weights are that a policy starts from, of a new mixture of horizons those of its base."""
    return config.pretrained_path or base_config(config).pretrained_path


def knows_robot(source: Path, config: PreTrainedConfig, root: Path) -> bool:
    """Whether weights were trained on the robot of a dataset: same state, actions and rate, whatever the cameras; says
    where the rate alone is another."""
    described = root / "meta" / "robot.json"
    known = getattr(base_config(config), "robot", None)
    if not Path(source).is_dir():  # the processors of a hub's repository are not read
        return False
    if known is None and (file := Path(source) / ROBOT).is_file():
        known = json.loads(file.read_text())
    if known is None or not described.is_file():
        return False
    before, now = (replace(spec, cameras=()) for spec in (RobotSpec.from_json(known), read_robot_spec(root)))
    if before.fingerprint() == now.fingerprint():
        return True
    if replace(before, rate_hz=now.rate_hz).fingerprint() == now.fingerprint():
        steps = horizon(config)
        print(
            f"{root} is at {now.rate_hz:g} Hz, the weights were trained at {before.rate_hz:g} Hz: a chunk of {steps} "
            f"actions now takes {steps / now.rate_hz:.2g} s instead of {steps / before.rate_hz:.2g} s, which training "
            "has to make up for; they get new processors, with the statistics of these demonstrations",
            flush=True,
        )
    return False


def same_processing(source: Path, config: PreTrainedConfig) -> bool:
    """Whether a recipe's options leave processors as the weights are used to; says where they do not."""
    saved = read_config(str(source), config.device or "cpu")
    for name in PROCESSED:
        before, now = (getattr(base_config(c), name, None) for c in (saved, config))
        if before != now:
            print(
                f"policy.options.{name} is {now}, the weights were trained with {before}: "
                "they get new processors, with the statistics of these demonstrations",
                flush=True,
            )
            return False
    return True


def make_config(recipe: PolicyRecipe, device: torch.device, checkpoint: Path | None = None) -> PreTrainedConfig:
    """The policy's configuration: new, or of ``recipe.pretrained``, or of a checkpoint; with the recipe's options.

    Raises:
        UserError: Unknown type, unknown option (the nearest is named), or a directory that holds no policy.
    """
    source = str(checkpoint / PRETRAINED) if checkpoint else located(recipe).pretrained
    config = read_config(source, device.type) if source else new_config(recipe.type, device.type)
    left_open = recipe.type == PolicyRecipe.type and bool(recipe.pretrained)
    if source and recipe.type != config.type and not left_open:
        raise UserError(f"{source} holds a policy of type '{config.type}'", f"set policy.type={config.type}")
    options = without_base_weights(recipe.options) if checkpoint else recipe.options
    config = with_options(config, {**options, "device": device.type, "push_to_hub": False})
    config.pretrained_path = Path(source) if source else None
    if not checkpoint and pads(base_config(config).type):
        config.input_features = {}  # it fits any: take the dataset's
    if len(config.observation_delta_indices or [0]) > 1:
        raise UserError(f"policy '{config.type}' wants a history of observations", "set policy.options.n_obs_steps=1")
    return config


def with_options(config: PreTrainedConfig, options: dict[str, Any]) -> PreTrainedConfig:
    """A configuration with some fields replaced; a mapping given for a nested policy replaces some of that one's.

    With a ``pretrained_path`` the nested configuration is that of the weights; another ``type`` starts from that type's
    defaults.

    Raises:
        UserError: Unknown type or option; the nearest is named.
    """
    check_options(f"policy '{config.type}'", options, [f.name for f in fields(config) if f.init])
    values = {}
    for key, value in options.items():
        nested = getattr(config, key)
        if isinstance(nested, PreTrainedConfig) and isinstance(value, dict):
            value = nested_config(nested, value, config.device or "cpu")
        if key == "normalization_mapping":
            if unknown := set(value.values()) - set(NormalizationMode):
                known = ", ".join(mode.value for mode in NormalizationMode)
                raise UserError(f"policy.options.{key}: there is no {sorted(unknown)[0]}", f"there are {known}")
            value = {kind: NormalizationMode(mode) for kind, mode in value.items()}
        values[key] = value
    try:
        return replace(config, **values)  # runs the configuration's own checks again
    except (ValueError, TypeError) as e:
        given = ", ".join(f"{key}={value}" for key, value in options.items() if key not in ("device", "push_to_hub"))
        raise UserError(f"policy '{config.type}' refuses {given}: {first_line(e)}") from None


def nested_config(config: PreTrainedConfig, options: dict[str, Any], device: str) -> PreTrainedConfig:
    """See :func:`with_options`."""
    source, kind = options.get("pretrained_path"), options.get("type", config.type)
    if source:
        source = resolve_source(source)
        start = read_config(source, device)
        if options.get("type", start.type) != start.type:
            raise UserError(f"{source} holds a policy of type '{start.type}', not '{kind}'", f"set type={start.type}")
        options = {**options, "pretrained_path": Path(source)}
    else:
        start = config if kind == config.type else new_config(kind, device)
    return with_options(start, {k: v for k, v in options.items() if k != "type"})


def new_config(kind: str, device: str) -> PreTrainedConfig:
    """The default configuration of a policy type; UserError lists the types where there is none of that name."""
    if not is_known(kind):
        raise UserError(f"there is no policy type '{kind}'", f"the types are {', '.join(known_types())}")
    return make_policy_config(kind, device=device)


def without_base_weights(options: dict[str, Any]) -> dict[str, Any]:
    """Options for a checkpoint, whose weights are all there: those that a nested policy started from are not needed."""
    base = options.get("base")
    return {**options, "base": {k: v for k, v in base.items() if k != "pretrained_path"}} if base else options


def horizon(config: PreTrainedConfig) -> int:
    """Actions per chunk, whatever the policy calls it."""
    return len(config.action_delta_indices or [0])


def input_features(meta: LeRobotDatasetMetadata, cameras: tuple[str, ...]) -> dict[str, PolicyFeature]:
    """What a policy observes when it is to see some of the dataset's cameras only, in the order given.

    Raises:
        UserError: The dataset has no such camera.
    """
    features = dataset_to_policy_features(meta.features)
    keys = [image_key(camera) for camera in cameras]
    if missing := [key for key in keys if key not in features]:
        raise UserError(f"{meta.root} has no camera '{missing[0]}'", f"it has {', '.join(meta.camera_keys)}")
    return {key: features[key] for key in (*keys, OBS_STATE)}


def dataset_stats(sources: list[Source], metas: list[LeRobotDatasetMetadata], config: PreTrainedConfig) -> Stats:
    """Normalisation statistics of the policy's features over all datasets, each weighted by its frames.

    Those of state and action are exact and over chunks; the action's are of relative actions where the policy learns
    them. The others (images) are those that the dataset carries.
    """
    features = {**(config.input_features or {}), **(config.output_features or {})}
    relative = relative_mask(config, features[ACTION].shape[0]) if getattr(config, "use_relative_actions", 0) else None
    parts = []
    for source, meta in zip(sources, metas, strict=True):
        stats = {**(meta.stats or {}), **load_stats(source.dataset, horizon(config), relative, source.counted)}
        if relative is not None:
            stats[ACTION] = stats[RELATIVE_ACTION]
        parts.append({key: stats[key] for key in features if key in stats})
    return parts[0] if len(parts) == 1 else pooled(parts, [source.frames for source in sources])


def to_device(batch: dict[str, Any], device: torch.device) -> Batch:
    """Tensors on ``device`` from numpy arrays; lists stay. Images travel as uint8 [B,H,W,3], bfloat16 as int16."""
    out = {
        key: torch.from_numpy(value).to(device, non_blocking=True) if isinstance(value, np.ndarray) else value
        for key, value in batch.items()
    }
    if IMAGE_TOKENS in out:
        out[IMAGE_TOKENS] = out[IMAGE_TOKENS].view(torch.bfloat16)
    return out


def with_float_images(batch: Batch) -> Batch:
    """Images as float32 [B,3,H,W] in [0,1], as LeRobot's policies expect.

    The permuted view keeps its strides through the conversion, so they arrive channels-last at no cost.
    """
    return {k: v.permute(0, 3, 1, 2).to(torch.float32).div_(255.0) if is_picture(k, v) else v for k, v in batch.items()}


def preprocessed(batch: Batch, preprocess: Callable[[Batch], Batch]) -> Batch:
    """Run a policy's processor and put back the columns that it does not know (it drops them: labels, weights)."""
    out = preprocess(batch)
    return {**{k: v for k, v in batch.items() if k not in out}, **out}

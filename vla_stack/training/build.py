"""From a recipe to the things that a loop turns: policy, processors, loader, loss."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import json
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from lerobot.configs import PolicyFeature, PreTrainedConfig
from lerobot.datasets.dataset_metadata import LeRobotDatasetMetadata
from lerobot.policies.factory import make_policy_config, make_pre_post_processors
from lerobot.policies.pretrained import PreTrainedPolicy
from lerobot.utils.feature_utils import dataset_to_policy_features
from numpy.typing import NDArray
from torch import Tensor, nn

import vla_stack.methods
from vla_stack.data import ChunkLoader, Dataset, load_stats, open_dataset, read_robot_spec
from vla_stack.data.stats import RELATIVE_ACTION
from vla_stack.errors import UserError
from vla_stack.policies.chunk_policy import ROBOT
from vla_stack.policies.configuration_vla import VlaConfig  # its import registers the policy type `vla`
from vla_stack.policies.dataset_facts import relative_mask
from vla_stack.schema import ACTION, OBS_IMAGES, OBS_STATE, RobotSpec
from vla_stack.training.checkpoint import PRETRAINED
from vla_stack.training.mixture import Mixture
from vla_stack.training.policies import new_policy, restore
from vla_stack.training.recipe import DataRecipe, PolicyRecipe, Recipe

Batch = dict[str, Any]
Stats = dict[str, dict[str, Any]]
Loss = Callable[[PreTrainedPolicy, Batch, torch.Generator], tuple[Tensor, dict[str, Any]]]


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

    @property
    def float_images(self) -> bool:
        """Whether the policy's processors want float images; the native VLA takes them as recorded."""
        return not isinstance(self.policy.config, VlaConfig)

    def save_pretrained(self, directory: Path) -> None:
        """Write the LeRobot policy directory: config, weights, processors."""
        self.policy.save_pretrained(directory)
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


def build(recipe: Recipe, device: torch.device, rank: int = 0, checkpoint: Path | None = None) -> Parts:
    """Make everything that a recipe names.

    Args:
        recipe: The run.
        device: Where the policy lives.
        rank: Process index; each rank reads its own order of the data.
        checkpoint: Continue from this checkpoint's policy directory.

    Raises:
        UserError: Unknown method, policy type or option; dataset or policy directory that cannot be opened.
    """
    loss = find_loss(recipe.method, recipe.method_options)
    config = make_config(recipe.policy, device, checkpoint)
    datasets = [open_dataset(root) for root in recipe.data.root]
    for other in datasets[1:]:
        if differing := [k for k in (OBS_STATE, ACTION) if other.features.get(k) != datasets[0].features.get(k)]:
            raise UserError(f"{other.root} and {datasets[0].root} differ in '{differing[0]}'", "mix data of one robot")
    torch.manual_seed(recipe.seed)
    if checkpoint is not None:
        policy, pre, post = restore(checkpoint, config)
    else:
        metas = [LeRobotDatasetMetadata(f"local/{d.root.name}", root=d.root) for d in datasets]
        if recipe.data.cameras is not None and not config.input_features:
            config.input_features = input_features(metas[0], recipe.data.cameras)
        policy = new_policy(config, metas[0])
        pre, post = make_pre_post_processors(config, dataset_stats=dataset_stats(datasets, metas, config))
    described = (datasets[0].root / "meta" / "robot.json").is_file()
    robot = read_robot_spec(datasets[0].root) if described else None
    return Parts(policy, pre, post, make_loader(recipe, datasets, config, rank), loss, robot)


def make_config(recipe: PolicyRecipe, device: torch.device, checkpoint: Path | None = None) -> PreTrainedConfig:
    """The policy's configuration: new, or of ``recipe.pretrained``, or of a checkpoint; with the recipe's options.

    Raises:
        UserError: Unknown type, unknown option (the nearest is named), or a directory that holds no policy.
    """
    source = str(checkpoint / PRETRAINED) if checkpoint else recipe.pretrained
    try:
        if source:
            config = PreTrainedConfig.from_pretrained(source, cli_overrides=[f"--device={device.type}"])
        else:
            config = make_policy_config(recipe.type, device=device.type)
    except (OSError, ValueError) as e:
        if source:
            raise UserError(f"cannot read the policy in {source}: {str(e).splitlines()[0]}") from None
        known = ", ".join(sorted(PreTrainedConfig.get_known_choices()))
        raise UserError(f"there is no policy type '{recipe.type}'", f"the types are {known}") from None
    check_options(f"policy '{config.type}'", recipe.options, [f.name for f in fields(config) if f.init])
    # `replace` runs the configuration's own checks again.
    config = replace(config, **recipe.options, device=device.type, push_to_hub=False)
    config.pretrained_path = Path(source) if source else None
    if len(config.observation_delta_indices or [0]) > 1:
        raise UserError(f"policy '{config.type}' wants a history of observations", "set policy.options.n_obs_steps=1")
    return config


def horizon(config: PreTrainedConfig) -> int:
    """Actions per chunk, whatever the policy calls it."""
    return len(config.action_delta_indices or [0])


def input_features(meta: LeRobotDatasetMetadata, cameras: tuple[str, ...]) -> dict[str, PolicyFeature]:
    """What a policy observes when it is to see some of the dataset's cameras only, in the order given.

    Raises:
        UserError: The dataset has no such camera.
    """
    features = dataset_to_policy_features(meta.features)
    keys = [f"{OBS_IMAGES}.{camera}" for camera in cameras]
    if missing := [key for key in keys if key not in features]:
        raise UserError(f"{meta.root} has no camera '{missing[0]}'", f"it has {', '.join(meta.camera_keys)}")
    return {key: features[key] for key in (*keys, OBS_STATE)}


def dataset_stats(datasets: list[Dataset], metas: list[LeRobotDatasetMetadata], config: PreTrainedConfig) -> Stats:
    """Normalisation statistics of the policy's features over all datasets, each weighted by its frames.

    Those of state and action are exact and over chunks; the action's are of relative actions where the policy learns
    them. The others (images) are those that the dataset carries.
    """
    features = {**(config.input_features or {}), **(config.output_features or {})}
    relative = relative_mask(config, features[ACTION].shape[0]) if hasattr(config, "use_relative_actions") else None
    parts = []
    for dataset, meta in zip(datasets, metas, strict=True):
        stats = {**(meta.stats or {}), **load_stats(dataset, horizon(config), relative=relative)}
        if relative is not None:
            stats[ACTION] = stats[RELATIVE_ACTION]
        parts.append({key: stats[key] for key in features if key in stats})
    return parts[0] if len(parts) == 1 else pooled(parts, [dataset.num_frames for dataset in datasets])


def pooled(parts: list[Stats], frames: list[int]) -> Stats:
    """Statistics of a union of datasets: moments exactly, quantiles as their weighted mean (LeRobot's rule)."""
    weights = np.array(frames) / sum(frames)

    def mean(values: list[np.ndarray]) -> np.ndarray:
        return np.tensordot(weights, np.stack(values), 1)

    out: Stats = {}
    for key, first in parts[0].items():
        of = {name: [np.asarray(part[key][name]) for part in parts] for name in first if name != "count"}
        centre = mean(of["mean"])
        out[key] = {name: mean(values) for name, values in of.items() if name.startswith("q")}
        out[key] |= {"mean": centre, "min": np.min(of["min"], axis=0), "max": np.max(of["max"], axis=0)}
        variance = [s**2 + (m - centre) ** 2 for s, m in zip(of["std"], of["mean"], strict=True)]
        out[key]["std"] = np.sqrt(mean(variance))
    return out


def opening_weights(dataset: Dataset, data: DataRecipe) -> NDArray[np.float64] | None:
    """Sampling weight of each frame, float [N]; None where all are equal."""
    if data.opening_weight == 1.0 or data.opening_frames == 0:
        return None
    return np.where(dataset.columns["frame_index"] < data.opening_frames, data.opening_weight, 1.0)


def make_loader(recipe: Recipe, datasets: list[Dataset], config: PreTrainedConfig, rank: int) -> Loader:
    """Batches of the cameras that the policy sees."""
    cameras = [k.removeprefix(f"{OBS_IMAGES}.") for k in config.input_features or {} if k.startswith(OBS_IMAGES)]
    *seeds, mixing = map(int, np.random.SeedSequence([recipe.seed, rank]).generate_state(len(datasets) + 1))
    loaders = [
        ChunkLoader(
            dataset,
            horizon=horizon(config),
            batch_size=recipe.batch_size,
            seed=seed,
            episodes=recipe.data.episodes,
            cameras=cameras,
            weights=opening_weights(dataset, recipe.data),
        )
        for dataset, seed in zip(datasets, seeds, strict=True)
    ]
    return loaders[0] if len(loaders) == 1 else Mixture(loaders, recipe.batch_size, mixing)


def find_loss(method: str, options: dict[str, Any]) -> Loss:
    """The function ``loss`` of ``vla_stack.methods.<method>``, with its options set.

    Raises:
        UserError: There is no such method, or it has no such option.
    """
    known = sorted(m.name for m in pkgutil.iter_modules(vla_stack.methods.__path__))
    if method not in known:
        raise UserError(f"there is no method '{method}'", f"the methods are {', '.join(known)}")
    loss = importlib.import_module(f"vla_stack.methods.{method}").loss
    check_options(f"method '{method}'", options, list(inspect.signature(loss).parameters)[3:])
    return functools.partial(loss, **options)


def check_options(owner: str, options: dict[str, Any], known: list[str]) -> None:
    """Raise a :class:`UserError` that names the nearest known option for the first unknown one."""
    for key in options:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
            remedy = f"the nearest option is '{near[0]}'" if near else "it has none"
            raise UserError(f"{owner} has no option '{key}'", remedy)


def to_device(batch: dict[str, Any], device: torch.device, float_images: bool) -> Batch:
    """Tensors on ``device``. Images travel as uint8 [B,H,W,3].

    Args:
        batch: numpy arrays and lists.
        device: Where the policy lives.
        float_images: Make them float32 [B,3,H,W] in [0,1] there, as LeRobot's policies expect; the permuted view keeps
            its strides through the conversion, so they arrive channels-last at no cost.
    """
    out: Batch = {}
    for key, value in batch.items():
        tensor = torch.from_numpy(value).to(device, non_blocking=True) if isinstance(value, np.ndarray) else value
        if float_images and key.startswith(OBS_IMAGES) and tensor.dtype == torch.uint8:
            tensor = tensor.permute(0, 3, 1, 2).to(torch.float32).div_(255.0)
        out[key] = tensor
    return out


def preprocessed(batch: Batch, preprocess: Callable[[Batch], Batch]) -> Batch:
    """Run a policy's processor and put back the columns that it does not know (it drops them: labels, weights)."""
    out = preprocess(batch)
    return {**{k: v for k, v in batch.items() if k not in out}, **out}

"""From the data part of a recipe to open datasets and the robots that they were recorded on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vla_stack.data.dataset import CHUNK, Dataset, open_dataset
from vla_stack.data.features import read_robot_spec
from vla_stack.data.layout import ROBOT
from vla_stack.data.trainable import trainable
from vla_stack.errors import UserError
from vla_stack.evaluation.recorded import nameless_robot
from vla_stack.lerobot_core import PreTrainedConfig
from vla_stack.policies.embodiment import Embodiment, relative_dims
from vla_stack.schema import ACTION, Camera
from vla_stack.training.recipe import DataRecipe, SourceRecipe

Stats = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Source:
    """One dataset of a recipe, opened.

    Attributes:
        key: Where the recipe names it, for messages.
        name: What logs call it.
        recipe: Its part of the recipe.
        dataset: The dataset.
        embodiment: Its robot, with the cameras that the policy is to see in the order of their slots.
        trainable: Which of its frames are trained on, bool [N]; None for all.
    """

    key: str
    name: str
    recipe: SourceRecipe
    dataset: Dataset
    embodiment: Embodiment
    trainable: NDArray[np.bool_] | None = None

    @property
    def counted(self) -> NDArray[np.bool_] | None:
        """Frames that statistics are of: those of the chosen episodes that are trained on, bool [N]; None for all."""
        if self.recipe.episodes is None:
            return self.trainable
        chosen = np.isin(self.dataset.columns["episode_index"], self.recipe.episodes)
        return chosen if self.trainable is None else chosen & self.trainable

    @property
    def frames(self) -> int:
        """How many they are."""
        return self.dataset.num_frames if self.counted is None else int(self.counted.sum())


def open_sources(data: DataRecipe, config: PreTrainedConfig) -> list[Source]:
    """Open every dataset of a recipe.

    Args:
        data: The data part of a recipe.
        config: The policy's configuration: which actions it learns relative to the state, where it does.

    Raises:
        UserError: A dataset cannot be opened, lacks a camera, or its robot has no name; or two sources go by one
            embodiment and differ, or two of ``data.root`` are of different robots.
    """
    cameras = None if data.cameras is None else {c: c for c in data.cameras}
    recipes = data.sources or tuple(SourceRecipe(root, cameras=cameras, episodes=data.episodes) for root in data.root)
    names = unique([recipe.root.rstrip("/").rsplit("/", 1)[-1] for recipe in recipes])
    sources = []
    for i, (recipe, name) in enumerate(zip(recipes, names, strict=True)):
        key = f"data.sources[{i}]" if data.sources else f"data.root[{i}]"
        dataset = open_dataset(recipe.root)
        if ACTION not in dataset.columns:
            raise UserError(f"{key}: {dataset.root} has no column '{ACTION}'", "name a dataset that a robot acted in")
        if not data.branched:
            dataset.columns.pop(CHUNK, None)
        embodiment = embodiment_of(dataset, recipe, key, named=bool(data.sources))
        exclude = recipe.relative_exclude_joints
        if getattr(config, "use_relative_actions", False):
            exclude = getattr(config, "relative_exclude_joints", ()) if exclude is None else exclude
            embodiment = replace(embodiment, relative=relative_dims(embodiment.robot, exclude))
        sources.append(Source(key, name, recipe, dataset, embodiment, trainable(dataset, data.interventions)))
    for n, source in enumerate(sources):
        for other in sources[:n]:
            if not data.sources and other.embodiment.name != source.embodiment.name:
                raise UserError(
                    f"{other.key} and {source.key} are of different robots, '{other.embodiment.name}' and "
                    f"'{source.embodiment.name}'",
                    "list them in data.sources, which makes one policy of several robots, or train one for each",
                )
            if other.embodiment.name == source.embodiment.name:
                check_same(other.embodiment, source.embodiment, f"{other.key} and {source.key}")
    return sources


def embodiment_of(dataset: Dataset, recipe: SourceRecipe, key: str, named: bool) -> Embodiment:
    """The robot of a dataset, as a recipe shows it to the policy; nothing of it relative yet.

    Raises:
        UserError: The dataset has no such camera, or nobody names its robot though the recipe names several sources.
    """
    known = (dataset.root / ROBOT).is_file()
    if known:
        robot = read_robot_spec(dataset.root)
    elif named and not recipe.embodiment:
        raise UserError(f"{key}: {dataset.root} does not name its robot (no {ROBOT})", f"set {key}.embodiment")
    else:
        robot = nameless_robot(dataset, recipe.embodiment)
    cameras = {c: c for c in dataset.cameras} if recipe.cameras is None else recipe.cameras
    if missing := [c for c in cameras.values() if c not in dataset.cameras]:
        raise UserError(
            f"{key}: {dataset.root} has no camera '{missing[0]}'", f"it has {', '.join(dataset.cameras) or 'none'}"
        )
    robot = replace(robot, cameras=tuple(Camera(c, *dataset.image_size(c)) for c in cameras.values()))
    return Embodiment(recipe.embodiment or robot.name, robot, cameras, (False,) * len(robot.action))


def check_same(a: Embodiment, b: Embodiment, where: str) -> None:
    """Raise a :class:`UserError` where one name stands for two robots."""
    pairs = {
        "action": ([(d.name, d.unit) for d in e.robot.action] + [e.robot.action_kind] for e in (a, b)),
        "state": ([(d.name, d.unit) for d in e.robot.state] for e in (a, b)),
        "rate": (e.robot.rate_hz for e in (a, b)),
        "cameras": ((e.cameras, [(c.height, c.width) for c in e.robot.cameras]) for e in (a, b)),
        "relative actions": (e.relative for e in (a, b)),
    }
    for what, (one, other) in pairs.items():
        if one != other:
            raise UserError(
                f"{where} are both embodiment '{a.name}' and differ in {what}: {one} and {other}",
                "list them in data.sources and give one another `embodiment:` name, so that they can be told apart",
            )


def pooled(parts: list[Stats], frames: list[int]) -> Stats:
    """Statistics of a union of datasets: moments exactly, quantiles as their weighted mean (LeRobot's rule)."""
    weights = np.array(frames) / sum(frames)

    def mean(values: list[np.ndarray]) -> np.ndarray:
        return np.tensordot(weights, np.stack(values), 1)

    out: Stats = {}
    for key, first in parts[0].items():
        if not all(key in part for part in parts):
            continue  # of a camera, say, whose statistics somebody left out
        shared = [name for name in first if name != "count" and all(name in part[key] for part in parts)]
        of = {name: [np.asarray(part[key][name]) for part in parts] for name in shared}
        centre = mean(of["mean"])
        out[key] = {name: mean(values) for name, values in of.items() if name.startswith("q")}
        out[key] |= {"mean": centre, "min": np.min(of["min"], axis=0), "max": np.max(of["max"], axis=0)}
        variance = [s**2 + (m - centre) ** 2 for s, m in zip(of["std"], of["mean"], strict=True)]
        out[key]["std"] = np.sqrt(mean(variance))
    return out


def settle_relative(config: PreTrainedConfig, sources: Sequence[Source], known: bool) -> None:
    """Switch relative actions off where actions are none that could be made relative, and refuse to guess.

    Args:
        config: The policy's configuration.
        sources: The recipe's datasets.
        known: Whether the recipe itself says that actions are to be relative, or its weights do.

    Raises:
        UserError: A dataset without ``meta/robot.json`` does not say whether its actions are absolute, and their names
            do not say it either: deltas made relative to a pose would be noise of the pose's size.
    """
    if not getattr(config, "use_relative_actions", False):
        return
    for source in sources:
        robot = source.embodiment.robot
        described = (source.dataset.root / ROBOT).is_file() or source.recipe.relative_exclude_joints is not None
        anchors = [d.name for d in robot.state[: len(robot.action)]]
        if not (known or described) and any(source.embodiment.relative) and anchors != [d.name for d in robot.action]:
            option = "policy.options.use_relative_actions"
            raise UserError(
                f"{source.key}: {source.dataset.root} does not say whether its actions are absolute (no {ROBOT}), and "
                "they go by other names than the state does",
                f"set {option}=true if they are targets for the first entries of the state, in its units; otherwise "
                f"(deltas, another frame) {option}=false",
            )
    if not any(any(source.embodiment.relative) for source in sources):
        config.use_relative_actions = False  # type: ignore[attr-defined]


def unique(names: Sequence[str]) -> list[str]:
    """Names, numbered where they repeat."""
    count = Counter(names)
    return [name if count[name] == 1 else f"{name}-{i}" for i, name in enumerate(names)]

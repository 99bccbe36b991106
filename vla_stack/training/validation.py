"""Loss on episodes that are held out of training: whether a policy still learns what is true of others, too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from vla_stack.data.dataset import Dataset
from vla_stack.errors import UserError
from vla_stack.lerobot_core import PreTrainedConfig
from vla_stack.training.loaders import make_loader
from vla_stack.training.recipe import Recipe
from vla_stack.training.recipe_tree import read_tree
from vla_stack.training.run_dir import RECIPE
from vla_stack.training.sources import Source

if TYPE_CHECKING:
    from vla_stack.training.build import Loss

BATCHES = 32  # at most: a check is to cost little beside the steps between two


def split(episodes: Sequence[int], share: float) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Episodes to train on and episodes to hold out, of each at least one, in ascending order.

    It is a function of the episodes alone: all seeds and all recipes for a dataset hold out the same, and so does a run
    that is resumed.

    Args:
        episodes: Indices.
        share: Of them to hold out, in (0, 1).

    Raises:
        ValueError: There are fewer than two.
    """
    if len(episodes) < 2:
        raise ValueError(f"{len(episodes)} episodes cannot be split")
    count = min(max(1, round(share * len(episodes))), len(episodes) - 1)
    order = np.random.default_rng(0).permutation(np.sort(episodes)).tolist()
    return tuple(sorted(order[count:])), tuple(sorted(order[:count]))


def hold_out(sources: Sequence[Source], share: float) -> tuple[list[Source], list[Source]]:
    """The same datasets twice: with the episodes that are trained on, and with those that are held out.

    Raises:
        UserError: A dataset has too few episodes.
    """
    parts: tuple[list[Source], list[Source]] = ([], [])
    for source in sources:
        chosen = source.recipe.episodes
        episodes = range(source.dataset.num_episodes) if chosen is None else chosen
        if len(episodes) < 2:
            message = f"{source.key}: {source.dataset.root} has one episode to train on, and 'data.validation' is set"
            raise UserError(message, "record more, or set data.validation=0")
        for part, some in zip(parts, split(episodes, share), strict=True):
            part.append(replace(source, recipe=replace(source.recipe, episodes=some)))
    return parts


def held_out_by(run_dir: Path, dataset: Dataset) -> tuple[int, ...] | None:
    """Episodes of a dataset that a run held out; None where it held none of this dataset out, or is no run.

    Only the recipe's ``data`` is read. A dataset that has grown since is split otherwise than it was.
    """
    if not (run_dir / RECIPE).is_file():
        return None
    data = (read_tree(run_dir / RECIPE) or {}).get("data") or {}
    roots = [data["root"]] if isinstance(data.get("root"), str) else data.get("root") or []
    sources = data.get("sources") or [{"root": root, "episodes": data.get("episodes")} for root in roots]
    for source in sources if data.get("validation") else []:
        if Path(source["root"]).resolve() == dataset.root.resolve():
            return split(source.get("episodes") or range(dataset.num_episodes), data["validation"])[1]
    return None


class HeldOut:
    """Batches of held-out episodes, the same ones in the same order at every check; drawn as if all frames were alike.

    Args:
        recipe: The run.
        sources: Its datasets, with the episodes that are held out.
        config: The policy's configuration, with features and embodiments filled in.
        loss: What the method minimises, without what other data adds to it.
    """

    def __init__(self, recipe: Recipe, sources: Sequence[Source], config: PreTrainedConfig, loss: Loss) -> None:
        plain = replace(recipe, data=replace(recipe.data, weights="uniform", opening_weight=1.0))
        self.loss = loss
        self._loader = make_loader(plain, sources, config, rank=0)
        self._start = self._loader.state_dict()
        frames = sum(source.frames for source in sources)
        self._batches = min(BATCHES, -(-frames // recipe.method.batch_size))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self._loader.load_state_dict(self._start)
        for _, batch in zip(range(self._batches), self._loader, strict=False):
            batch.pop("index", None)  # by which the tokenizer tells training batches, whose words it splits at random
            yield batch


@contextmanager
def without_dropout(policy: nn.Module) -> Iterator[None]:
    """Within the context nothing is dropped and no statistics are gathered; the policy stays in training mode, without
    which some of LeRobot's policies have no loss."""
    found = [m for m in policy.modules() if isinstance(m, nn.Dropout | nn.modules.batchnorm._BatchNorm) and m.training]
    for module in found:
        module.eval()
    try:
        yield
    finally:
        for module in found:
            module.train()

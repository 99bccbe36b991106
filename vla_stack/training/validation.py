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
from vla_stack.data.layout import read_json, write_json
from vla_stack.errors import UserError
from vla_stack.lerobot_core import PreTrainedConfig
from vla_stack.training.loaders import make_loader
from vla_stack.training.recipe import Recipe
from vla_stack.training.run_dir import HELD_OUT
from vla_stack.training.sources import Source

if TYPE_CHECKING:
    from vla_stack.training.build import Loss

BATCHES = 32  # at most: a check is to cost little beside the steps between two


def split(episodes: Sequence[int], share: float) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Episodes to train on and episodes to hold out, of each at least one, in ascending order.

    It is a function of the episodes alone: all seeds and all recipes for a dataset hold out the same.

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
    """Episodes of a dataset that a run noted as held out, whatever the dataset has got since; None where it noted none
    of this dataset, or is no run.
    """
    for source in read_json(run_dir / HELD_OUT) if (run_dir / HELD_OUT).is_file() else []:
        here = Path(source["root"]).resolve() == dataset.root.resolve()
        if here and max(source["held_out"]) < dataset.num_episodes:
            return tuple(source["held_out"])
    return None


def check_held_out(run_dir: Path, held_out: HeldOut | None) -> None:
    """A run that is resumed holds out what it held out before, else it would be trained on it.

    Raises:
        UserError: The datasets have other episodes than they had.
    """
    if held_out is None or not (run_dir / HELD_OUT).is_file():
        return
    for before, now in zip(read_json(run_dir / HELD_OUT), held_out.episodes, strict=False):
        if before["held_out"] != now["held_out"]:
            raise UserError(
                f"{run_dir} held out the episodes {before['held_out']} of {before['root']}, of {now['root']} as it is "
                f"now data.validation holds out {now['held_out']}",
                "resume with the data.validation and the data.episodes (or a source's) that it was started with",
            )


def note_held_out(run_dir: Path, held_out: HeldOut | None) -> None:
    """Write down what a run holds out: its datasets may grow, and then they are split otherwise."""
    if held_out is None:
        (run_dir / HELD_OUT).unlink(missing_ok=True)
    else:
        write_json(run_dir / HELD_OUT, held_out.episodes)


class HeldOut:
    """Batches of held-out episodes, the same ones in the same order at every check; drawn as if all frames were alike.

    Args:
        recipe: The run.
        sources: Its datasets, with the episodes that are held out.
        config: The policy's configuration, with features and embodiments filled in.
        loss: What the method minimises, without what other data adds to it.

    Attributes:
        episodes: Of each dataset, its root and the indices that are held out.
    """

    def __init__(self, recipe: Recipe, sources: Sequence[Source], config: PreTrainedConfig, loss: Loss) -> None:
        plain = replace(recipe, data=replace(recipe.data, weights="uniform", opening_weight=1.0))
        self.loss = loss
        self.episodes = [{"root": s.recipe.root, "held_out": list(s.recipe.episodes or ())} for s in sources]
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

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


def hold_out(sources: Sequence[Source], share: float, run_dir: Path | None = None) -> tuple[list[Source], list[Source]]:
    """The same datasets twice: with the episodes that are trained on, and with those that are held out.

    Only episodes that have a frame to train on are held out: a loss on others says nothing. A dataset that several
    sources name is split once, so that none of them trains on what another one holds out; one of whose episodes none
    are held out is not among the latter.

    Args:
        sources: The datasets.
        share: Of their episodes to hold out, in (0, 1).
        run_dir: Of a run that is resumed.

    Raises:
        UserError: A dataset has too few episodes.
    """
    roots = [source.dataset.root.resolve() for source in sources]
    usable = [_usable(source) for source in sources]
    held: dict[Path, set[int]] = {}
    for root in dict.fromkeys(roots):
        mine = [n for n, other in enumerate(roots) if other == root]
        episodes = sorted(set().union(*(usable[n] for n in mine)))
        if len(episodes) < 2:
            raise _too_few(sources[mine[0]], f"has {'one' if episodes else 'no'} episode to train on")
        held[root] = set(split(episodes, share)[1])
    held_out = [sorted(held[root] & episodes) for root, episodes in zip(roots, usable, strict=True)]
    if run_dir is not None and _noted(run_dir) == (before := [_by_itself(source, share) for source in sources]):
        held_out = before
    parts: tuple[list[Source], list[Source]] = ([], [])
    for source, some, own in zip(sources, held_out, usable, strict=True):
        if not own.difference(some):
            raise _too_few(source, "has all of its episodes to train on held out")
        rest = [episode for episode in sorted(_chosen(source)) if episode not in some]
        parts[0].append(replace(source, recipe=replace(source.recipe, episodes=tuple(rest))))
        if some:
            parts[1].append(replace(source, recipe=replace(source.recipe, episodes=tuple(some))))
    return parts


def _too_few(source: Source, what: str) -> UserError:
    message = f"{source.key}: {source.dataset.root} {what}, and 'data.validation' is set"
    return UserError(message, "record more, or set data.validation=0")


def _chosen(source: Source) -> set[int]:
    """Episodes that the recipe names."""
    chosen = source.recipe.episodes
    return set(range(source.dataset.num_episodes) if chosen is None else chosen)


def _usable(source: Source) -> set[int]:
    """Those of them that have a frame to train on."""
    if source.counted is None:
        return _chosen(source)
    return set(np.unique(source.dataset.columns["episode_index"][source.counted]).tolist())


def _by_itself(source: Source, share: float) -> list[int]:
    """What runs held out before episodes without a frame to train on and shared datasets were told apart; those are
    resumed as they began."""
    chosen = sorted(_chosen(source))
    return list(split(chosen, share)[1]) if len(chosen) > 1 else []


def _noted(run_dir: Path) -> list[list[int]]:
    """Of each dataset what a run noted as held out; none where it noted nothing."""
    file = run_dir / HELD_OUT
    return [source["held_out"] for source in read_json(file)] if file.is_file() else []


def held_out_by(run_dir: Path, dataset: Dataset) -> tuple[int, ...] | None:
    """Episodes of a dataset that a run noted as held out, whatever the dataset has got since; None where it noted none
    of this dataset, or is no run.
    """
    found: set[int] = set()
    for source in read_json(run_dir / HELD_OUT) if (run_dir / HELD_OUT).is_file() else []:
        if Path(source["root"]).resolve() == dataset.root.resolve():
            found.update(source["held_out"])
    return tuple(sorted(found)) if found and max(found) < dataset.num_episodes else None


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
        plain = replace(recipe, data=replace(recipe.data, weights="uniform", opening_weight=1.0, progress=""))
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
    drops = nn.modules.dropout._DropoutNd | nn.MultiheadAttention  # the latter drops attention by itself
    found = [m for m in policy.modules() if isinstance(m, drops | nn.modules.batchnorm._BatchNorm) and m.training]
    for module in found:
        module.training = False
    try:
        yield
    finally:
        for module in found:
            module.training = True

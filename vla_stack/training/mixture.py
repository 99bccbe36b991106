"""Several datasets as one stream: every batch mixes them in given proportions, whatever their robots and cameras."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vla_stack.data.dataset import Dataset
from vla_stack.data.loader import RESUME_ALIKE, ChunkLoader, check_kind
from vla_stack.errors import UserError
from vla_stack.policies.embodiment import OBS_EMBODIMENT
from vla_stack.schema import ACTION, ACTION_IS_PAD, IMAGE_TOKENS, OBS_STATE, PAST_AGE, TASK, image_key, past_key

SOURCE = "source"  # int64 [b], number of the dataset that a row is of
SOURCES = "sources"  # (number, name) of those datasets that a batch has rows of


@dataclass(frozen=True)
class Layout:
    """What all rows of a mixture look like.

    Attributes:
        slots: Camera slot -> height, width.
        state_dim: Entries of the state; shorter ones are padded with zeros.
        action_dim: Likewise of the action.
        columns: Further columns, which all datasets have.
    """

    slots: Mapping[str, tuple[int, int]]
    state_dim: int
    action_dim: int
    columns: tuple[str, ...]


@dataclass(frozen=True)
class Part:
    """One dataset of a mixture.

    Attributes:
        name: What logs call it.
        loader: Its batches.
        weight: Share of the rows, relative to the other parts'.
        cameras: Camera slot -> column of the dataset.
        embodiment: Number of its robot among the policy's embodiments; None for a policy of one robot.
    """

    name: str
    loader: ChunkLoader
    weight: float
    cameras: Mapping[str, str]
    embodiment: int | None = None


class Mixture:
    """Batches whose rows come from several datasets, from each with a probability proportional to its weight.

    Each loader yields whole batches; rows that a mixed batch does not take wait for the next one. A loader's position
    is kept as its state before its current batch and the number of that batch's rows already taken. A mixed batch has
    the columns of ``layout``, pictures of slots that a row's dataset lacks black, and: ``observation.embodiment`` int64
    [b] where there are embodiments, ``source`` int64 [b] and ``sources``, a tuple of (number, name).

    Args:
        parts: The datasets; their loaders have equal batch sizes and horizons.
        layout: What rows look like.
        batch_size: Rows of a mixed batch.
        seed: Seed of the proportions.
    """

    def __init__(self, parts: Sequence[Part], layout: Layout, batch_size: int, seed: int) -> None:
        weights = np.array([part.weight for part in parts], np.float64)
        self._weights = weights / weights.sum()
        self._parts, self._layout = parts, layout
        self._sources = [_Source(part.loader) for part in parts]
        self._batch_size, self._seed, self._drawn = batch_size, seed, 0
        self._rows: NDArray[np.int64] = np.zeros(len(parts), np.int64)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            rng = np.random.default_rng([self._seed, self._drawn])
            counts = rng.multinomial(self._batch_size, self._weights)
            self._drawn += 1
            self._rows += counts
            pieces = [
                aligned(piece, self._parts[i], i, self._layout)
                for i, n in enumerate(counts)
                if n
                for piece in self._sources[i].take(int(n))
            ]
            batch = {key: _join([piece[key] for piece in pieces]) for key in pieces[0]}
            yield {**batch, SOURCES: tuple((i, self._parts[i].name) for i in np.flatnonzero(counts).tolist())}

    @property
    def samples(self) -> dict[str, int]:
        """Rows drawn so far from each dataset."""
        return {part.name: int(n) for part, n in zip(self._parts, self._rows, strict=True)}

    def state_dict(self) -> dict[str, Any]:
        return {
            "drawn": self._drawn,
            "rows": self._rows.tolist(),
            "sources": [s.state_dict() for s in self._sources],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_kind(state, self.state_dict())
        if (count := len(state["sources"])) != len(self._sources):
            message = f"the run was started with {count} datasets, 'data' names {len(self._sources)}"
            raise UserError(message, RESUME_ALIKE)
        self._drawn, self._rows = state["drawn"], np.array(state["rows"], np.int64)
        for source, saved in zip(self._sources, state["sources"], strict=True):
            source.load_state_dict(saved)


class _Source:
    """One loader, read row by row."""

    def __init__(self, loader: ChunkLoader) -> None:
        self._loader = loader
        self._before = loader.state_dict()
        self._batch: dict[str, Any] = {}
        self._taken = 0

    def take(self, n: int) -> list[dict[str, Any]]:
        """Pieces of batches, ``n`` rows in all."""
        pieces = []
        while n:
            if self._taken == len(self._batch.get(TASK, ())):
                self._before = self._loader.state_dict()
                self._batch, self._taken = next(iter(self._loader)), 0
            rows = slice(self._taken, self._taken + n)
            pieces.append({key: value[rows] for key, value in self._batch.items()})
            got = len(pieces[-1][TASK])
            self._taken, n = self._taken + got, n - got
        return pieces

    def state_dict(self) -> dict[str, Any]:
        return {"loader": self._before, "taken": self._taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loader.load_state_dict(state["loader"])
        self._before, self._batch, self._taken = state["loader"], {}, 0
        if state["taken"]:
            self._batch, self._taken = next(iter(self._loader)), state["taken"]


def aligned(batch: dict[str, Any], part: Part, number: int, layout: Layout) -> dict[str, Any]:
    """Rows of one dataset in the layout of the mixture."""
    rows = len(batch[TASK])
    out: dict[str, Any] = {key: batch[key] for key in (*layout.columns, TASK, ACTION_IS_PAD)}
    if layout.state_dim:
        out[OBS_STATE] = padded(batch[OBS_STATE], layout.state_dim)
    out[ACTION] = padded(batch[ACTION], layout.action_dim)
    for slot, (height, width) in layout.slots.items():
        column = part.cameras.get(slot)
        out[image_key(slot)] = np.zeros((rows, height, width, 3), np.uint8) if column is None else batch[column]
        if (age := batch.get(PAST_AGE)) is not None:
            black = np.zeros((*age.shape, height, width, 3), np.uint8)
            out[past_key(image_key(slot))] = black if column is None else batch[past_key(column)]
            out[PAST_AGE] = age
    if IMAGE_TOKENS in batch:
        out[IMAGE_TOKENS] = batch[IMAGE_TOKENS]
    if part.embodiment is not None:
        out[OBS_EMBODIMENT] = np.full(rows, part.embodiment)
    out[SOURCE] = np.full(rows, number)
    return out


def padded(values: NDArray[np.float32], size: int) -> NDArray[np.float32]:
    """Zeros appended to the last axis."""
    return np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, size - values.shape[-1])])


def common_columns(datasets: Sequence[Dataset]) -> tuple[str, ...]:
    """Columns besides state and action that all datasets have with equal types and shapes."""
    first, *others = ({n: (c.dtype, c.shape[1:]) for n, c in d.columns.items()} for d in datasets)
    return tuple(
        name
        for name, kind in first.items()
        if name not in (OBS_STATE, ACTION) and all(other.get(name) == kind for other in others)
    )


def _join(parts: list[Any]) -> Any:
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    return [item for part in parts for item in part]

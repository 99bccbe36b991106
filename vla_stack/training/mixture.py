"""Several datasets as one stream: every batch mixes them in proportion to their size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from vla_stack.data import ChunkLoader


class Mixture:
    """Batches whose rows come from several loaders, from each with a probability proportional to its length.

    Each loader yields whole batches; rows that a mixed batch does not take wait for the next one. A loader's position
    is kept as its state before its current batch and the number of that batch's rows already taken.

    Args:
        loaders: Loaders with equal columns and batch size.
        batch_size: Rows of a mixed batch.
        seed: Seed of the proportions.
    """

    def __init__(self, loaders: Sequence[ChunkLoader], batch_size: int, seed: int) -> None:
        lengths = np.array([len(loader) for loader in loaders], np.float64)
        self._weights = lengths / lengths.sum()
        self._sources = [_Source(loader) for loader in loaders]
        self._batch_size, self._seed, self._drawn = batch_size, seed, 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            rng = np.random.default_rng([self._seed, self._drawn])
            counts = rng.multinomial(self._batch_size, self._weights)
            self._drawn += 1
            parts = [part for s, n in zip(self._sources, counts, strict=True) if n for part in s.take(int(n))]
            yield {key: _join([part[key] for part in parts]) for key in parts[0]}

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self._drawn, "sources": [s.state_dict() for s in self._sources]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._drawn = state["drawn"]
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
            if self._taken == len(self._batch.get("task", ())):
                self._before = self._loader.state_dict()
                self._batch, self._taken = next(iter(self._loader)), 0
            rows = slice(self._taken, self._taken + n)
            pieces.append({key: value[rows] for key, value in self._batch.items()})
            got = len(pieces[-1]["task"])
            self._taken, n = self._taken + got, n - got
        return pieces

    def state_dict(self) -> dict[str, Any]:
        return {"loader": self._before, "taken": self._taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loader.load_state_dict(state["loader"])
        self._before, self._batch, self._taken = state["loader"], {}, 0
        if state["taken"]:
            self._batch, self._taken = next(iter(self._loader)), state["taken"]


def _join(parts: list[Any]) -> Any:
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    return [item for part in parts for item in part]

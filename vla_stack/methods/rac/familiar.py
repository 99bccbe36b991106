"""How familiar a state is: its distance to the demonstrations' states, against what is usual among these."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vla_stack.methods.rac.scene import BRING, TAKE

PERCENTILE = 95.0  # of the demonstrations' own distances to each other, episode by episode
START = 0.3  # the share of a sub-task's frames that is its start region
NEIGHBOURS = 3
# Entries of Scene.features that matter, by kind: to take an object up it is all one where on the table its goal is.
ENTRIES = {TAKE: (0, 1, 2, 5, 6), BRING: (0, 1, 2, 3, 4, 5, 6)}


class FamiliarStates:
    """Nearest neighbours among the states of iteration 0, by the kind of the sub-task.

    Args:
        features: float [N, F] of all demonstrated frames, metres.
        subtask: int [N], the current sub-task of each.
        episode: int [N].
    """

    def __init__(self, features: NDArray, subtask: NDArray, episode: NDArray) -> None:
        starts, kind = _starts(subtask, episode), np.asarray(subtask) % 2
        self._all = {s: _Region(features[m], episode[m], e) for s, e in ENTRIES.items() if (m := kind == s).any()}
        begun = {s: (kind == s) & starts for s in ENTRIES}
        self._start = {s: _Region(features[m], episode[m], ENTRIES[s]) for s, m in begun.items() if m.any()}

    def score(self, features: NDArray, subtask: int) -> float:
        """Distance to the sub-task's demonstrated states over the threshold; up to 1 is familiar."""
        kind = subtask % 2
        return self._all[kind].score(features) if kind in self._all else 0.0

    def start_score(self, features: NDArray, subtask: int) -> float:
        """The same for the sub-task's start region."""
        kind = subtask % 2
        return self._start[kind].score(features) if kind in self._start else 0.0

    def sample_start(self, features: NDArray, subtask: int, rng: np.random.Generator) -> NDArray[np.float64]:
        """A demonstrated state of the sub-task's start region, float [F]: the nearest of eight that are drawn."""
        states, entries = self._start[subtask % 2].full, list(ENTRIES[subtask % 2])
        drawn = states[rng.integers(len(states), size=8)]
        return drawn[np.argmin(np.linalg.norm((drawn - features)[:, entries], axis=1))].astype(np.float64)


class _Region:
    def __init__(self, states: NDArray, episode: NDArray, entries: Sequence[int]) -> None:
        self.full, self._entries = np.asarray(states, np.float32), list(entries)
        self._states = self.full[:, self._entries]
        distances: list[float] = []
        for e in np.unique(episode):
            others = self._states[episode != e]
            if len(others) >= NEIGHBOURS:
                distances += [_distance(x, others) for x in self._states[episode == e]]
        self.threshold = float(np.percentile(distances, PERCENTILE)) if distances else np.inf

    def score(self, features: NDArray) -> float:
        return _distance(np.asarray(features, np.float32)[self._entries], self._states) / self.threshold


def _distance(x: NDArray, states: NDArray) -> float:
    """Mean distance to the nearest neighbours, m."""
    d = np.linalg.norm(states - x, axis=1)
    k = min(NEIGHBOURS, len(d)) - 1
    return float(np.partition(d, k)[: k + 1].mean())


def _starts(subtask: NDArray, episode: NDArray) -> NDArray[np.bool_]:
    """Frames in the first ``START`` of their sub-task in their episode, bool [N]."""
    out = np.zeros(len(subtask), bool)
    pairs: Sequence[tuple[int, int]] = sorted(set(zip(episode.tolist(), subtask.tolist(), strict=True)))
    for e, s in pairs:
        frames = np.flatnonzero((episode == e) & (subtask == s))
        out[frames[: max(1, round(START * len(frames)))]] = True
    return out

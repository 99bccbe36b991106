"""Whether a robot is where demonstrations have been: the distance to the nearest demonstrated states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

NEIGHBOURS = 5
MAX_STATES = 2000  # a few milliseconds for a whole rewind


@dataclass(frozen=True)
class Familiar:
    """Demonstrated states and how near counts as there.

    Attributes:
        states: float [N, D], in units of ``scale``.
        scale: float [D], spread of each dimension.
        radius: Largest mean distance to the nearest :data:`NEIGHBOURS`.
    """

    states: NDArray[np.float64]
    scale: NDArray[np.float64]
    radius: float

    @classmethod
    def of(cls, episodes: Sequence[NDArray[np.floating]], seed: int = 0) -> Familiar:
        """From demonstrations' states [T, D] each; the radius is the 95th percentile of the distances of each
        episode's states to those of all others. At least two episodes."""
        if len(episodes) < 2:
            raise ValueError("familiar states need at least two episodes")
        everything = np.concatenate(episodes).astype(np.float64)
        scale = np.maximum(everything.std(axis=0), 1e-3)
        whose = np.repeat(np.arange(len(episodes)), [len(e) for e in episodes])
        if len(everything) > MAX_STATES:
            kept = np.sort(np.random.default_rng(seed).choice(len(everything), MAX_STATES, replace=False))
            everything, whose = everything[kept], whose[kept]
        states = everything / scale
        apart = [_distance(states[whose == e], states[whose != e]) for e in np.unique(whose)]
        return cls(states, scale, float(np.quantile(np.concatenate(apart), 0.95)))

    def to_message(self) -> dict[str, Any]:
        """Plain values."""
        return {"states": self.states.tobytes(), "scale": self.scale.tobytes(), "radius": self.radius}

    @classmethod
    def from_message(cls, m: dict[str, Any]) -> Familiar:
        """Inverse of :meth:`to_message`."""
        scale = np.frombuffer(m["scale"])
        return cls(np.frombuffer(m["states"]).reshape(-1, len(scale)), scale, m["radius"])

    def distance(self, states: NDArray[np.floating]) -> NDArray[np.float64]:
        """Of states [n, D], as multiples of the radius [n]; up to 1 is familiar."""
        return _distance(np.asarray(states, np.float64) / self.scale, self.states) / max(self.radius, 1e-12)

    def near(self, states: NDArray[np.floating]) -> NDArray[np.bool_]:
        """Whether each of states [n, D] is familiar, bool [n]."""
        return self.distance(states) <= 1.0


def _distance(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    square = (a**2).sum(1)[:, None] - 2 * a @ b.T + (b**2).sum(1)[None]
    k = min(NEIGHBOURS, b.shape[0])
    nearest = np.partition(np.maximum(square, 0.0), k - 1, axis=1)[:, :k]
    return np.asarray(np.sqrt(nearest).mean(axis=1))

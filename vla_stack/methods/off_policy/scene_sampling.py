"""Which scene to practise next: more often the ones whose outcome is uncertain."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FORGET = 0.9  # what an episode's outcome still counts after the scene's next one


class SceneSampler:
    """Draws of N scenes by the variance of their success, p (1 - p).

    A scene that always succeeds or always fails teaches little; one of either kind is still drawn now and then, since p
    is estimated with a uniform prior and old outcomes fade.

    Args:
        scenes: N.
        seed: Of the draws.
    """

    def __init__(self, scenes: int, seed: int) -> None:
        self._seed = seed
        self.counts: NDArray[np.float64] = np.zeros((scenes, 2))  # faded failures and successes

    @property
    def probabilities(self) -> NDArray[np.float64]:
        """How often each scene is drawn, [N]."""
        p = (self.counts[:, 1] + 1.0) / (self.counts.sum(1) + 2.0)
        variance = p * (1.0 - p)
        return variance / variance.sum()

    def draw(self, episode: int) -> int:
        """Scene of an episode, by its number."""
        return int(np.random.default_rng((self._seed, episode)).choice(len(self.counts), p=self.probabilities))

    def record(self, scene: int, success: bool) -> None:
        self.counts[scene] *= FORGET
        self.counts[scene, int(success)] += 1.0

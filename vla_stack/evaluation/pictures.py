"""Changes of what cameras show, apart from what they show: light, shade, dirt, noise, a knock against the camera.

A simulator's world stays as it is, so a policy that fails where only its pictures changed failed at seeing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from vla_stack.rollout.engine import ChunkPolicy
from vla_stack.schema import Chunks, Continuation, Observation

SHADOW, PATCH, SHIFT, NOISE = 0.5, 12, 3, 15.0  # factor, pixels, pixels, standard deviation of 255
Picture = NDArray[np.uint8]  # [h, w, 3]
Change = Callable[[Picture, np.random.Generator], Picture]


def light(*factors: float) -> Change:
    """Every channel times a factor."""
    return lambda picture, _: np.clip(picture * np.array(factors), 0, 255).astype(np.uint8)


def shadow(picture: Picture, _: np.random.Generator) -> Picture:
    """The left half with half the light."""
    out = picture.copy()
    half = out[:, : out.shape[1] // 2]
    half[:] = (half * SHADOW).astype(np.uint8)
    return out


def patch(picture: Picture, rng: np.random.Generator) -> Picture:
    """A grey square somewhere, at another place in each picture."""
    out = picture.copy()
    y, x = (int(rng.integers(n - PATCH + 1)) for n in out.shape[:2])
    out[y : y + PATCH, x : x + PATCH] = 128
    return out


def moved(picture: Picture, _: np.random.Generator) -> Picture:
    """The picture moved right and down, its border repeated."""
    return np.pad(picture, ((SHIFT, 0), (SHIFT, 0), (0, 0)), "edge")[: picture.shape[0], : picture.shape[1]]


def noisy(picture: Picture, rng: np.random.Generator) -> Picture:
    """Normal noise on every channel of every pixel, as of a small sensor in little light."""
    return np.clip(picture + rng.normal(0.0, NOISE, picture.shape), 0, 255).astype(np.uint8)


CHANGES: dict[str, Change] = {
    "darker": light(0.6, 0.6, 0.6),
    "brighter": light(1.4, 1.4, 1.4),
    "warmer": light(1.15, 1.0, 0.85),
    "shadow": shadow,
    "patch": patch,
    "shifted": moved,
    "sensor-noise": noisy,
}


class Changed:
    """A policy that is shown changed pictures; what changes at random follows from the seed of its noise.

    Args:
        policy: The policy.
        change: Of each of its pictures.
    """

    def __init__(self, policy: ChunkPolicy, change: Change) -> None:
        self.policy, self.spec, self._change = policy, policy.spec, change

    def infer(
        self,
        observations: Sequence[Observation],
        seeds: Sequence[int],
        continuations: Sequence[Continuation | None] = (),
    ) -> Chunks:
        """The chunks of the policy for what it sees, and for what it saw earlier where it is told."""
        seen = [self._shown(o, np.random.default_rng(seed)) for o, seed in zip(observations, seeds, strict=True)]
        return self.policy.infer(seen, seeds, continuations)

    def _shown(self, observation: Observation, rng: np.random.Generator) -> Observation:
        images = {camera: self._change(picture, rng) for camera, picture in observation.images.items()}
        return replace(observation, images=images, past=tuple(self._shown(o, rng) for o in observation.past))

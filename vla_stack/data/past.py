"""Earlier observations for training, sampled as they will be recalled (:mod:`vla_stack.history`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int
from numpy.typing import NDArray

from vla_stack.history import FIRST

FORGOTTEN = 0.1  # share of samples that remember nothing of before a random step, as after a lost session


def sampled(frame_index: Int[NDArray, " b"], ages: Sequence[int], rng: np.random.Generator) -> Int[NDArray, "b p"]:
    """How many frames before each sample the observations lie that it recalls; 0 where there is none.

    The distance between two decisions is sampled anew for each: from half a stride, as under a policy that is asked
    early, to two, as under delay.

    Args:
        frame_index: Frame of each sample in its episode.
        ages: ``PolicySpec.history``.
        rng: Source of distances and of what is forgotten.
    """
    b = len(frame_index)
    stride = ages[1] if len(ages) > 1 else 1
    apart = rng.integers(max(1, stride // 2), 2 * stride, b, endpoint=True)
    since = np.where(rng.random(b) < FORGOTTEN, (rng.random(b) * (frame_index + 1)).astype(np.int64), 0)
    # The first decision that is remembered: the episode's first frame, or one of those before this sample.
    first = np.where(since > 0, (frame_index - since) // apart * apart, frame_index)
    back = np.zeros((b, len(ages)), np.int64)
    for slot, age in enumerate(ages):
        ago = first if age == FIRST else -(-age // apart) * apart
        known = (ago < first) | (age == FIRST)
        back[:, slot] = np.where(known & ~(back[:, :slot] == ago[:, None]).any(1), ago, 0)
    return back

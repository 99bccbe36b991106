"""Which earlier observations of an episode a policy is shown beside the present one.

A policy with a history remembers what it was asked about: the first observation of the episode, and of the decisions
since then the newest that are at least 1, 2, 4, 8 ... strides old, so that a few of them reach far back and the recent
past is dense. Training samples the same rule (:func:`vla_stack.data.past.sampled`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from vla_stack.schema import Observation

FIRST = 0  # in place of an age: the first observation of the episode


def history_ages(count: int, stride: int) -> tuple[int, ...]:
    """Least ages in control steps of ``count`` earlier observations: :data:`FIRST`, and 1, 2, 4 ... strides."""
    return (FIRST, *(stride * 2**i for i in range(count - 1)))[:count]


def recalled(steps: Sequence[int], now: int, ages: Sequence[int]) -> list[int | None]:
    """For each age the index in ``steps`` of what is recalled at control step ``now``, or None.

    Args:
        steps: Control steps of what is remembered, ascending.
        now: The present one; what is not older is not recalled.
        ages: As :func:`history_ages` gives them. What an earlier age recalls, a later one does not recall again.
    """
    chosen: list[int | None] = []
    for age in ages:
        old = [i for i, step in enumerate(steps) if step < now and now - step >= age]
        index = None if not old else old[0] if age == FIRST else old[-1]
        chosen.append(None if index in chosen else index)
    return chosen


class History:
    """What one robot's episode has been so far, as far as its policy wants to know.

    Whoever steps a policy has one for each row and episode: the engine's agent, and a session of the server. Decisions
    closer together than half a stride are remembered once, so its size is bounded.

    Args:
        ages: ``PolicySpec.history``; empty: nothing is remembered.
    """

    def __init__(self, ages: Sequence[int]) -> None:
        self._ages = tuple(ages)
        self._apart = max(1, self._ages[1] // 2) if len(self._ages) > 1 else 1
        self._kept: list[Observation] = []

    def beside(self, observation: Observation) -> Observation:
        """The observation with what is recalled as its ``past``; from now on it is remembered itself."""
        if not self._ages:
            return observation
        now, steps = observation.step, [kept.step for kept in self._kept]
        chosen = [i for i in recalled(steps, now, self._ages) if i is not None]
        past = tuple(self._kept[i] for i in chosen)
        if not steps or now - steps[-1] >= self._apart:
            # Pictures may lie in memory that a robot writes again.
            images = {camera: np.array(image) for camera, image in observation.images.items()}
            self._kept.append(replace(observation, images=images))
            self._forget(now)
        return replace(observation, past=past)

    def _forget(self, now: int) -> None:
        """Drop what no later decision can recall: all but the first and those up to the largest age."""
        old = [i for i, kept in enumerate(self._kept) if now - kept.step >= self._ages[-1]]
        del self._kept[1 : old[-1] if old else 1]

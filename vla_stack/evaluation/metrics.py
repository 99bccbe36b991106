"""Figures with intervals: success, differences between policies on the same seeds, smoothness, time.

numpy only, so that a robot computer can summarise its own episodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vla_stack.rollout.records import IDLE, EvalResult
from vla_stack.schema import RobotSpec
from vla_stack.statistics import wilson

__all__ = ["Difference", "boundary_discontinuity", "frequency_averaged_score", "paired_difference", "wilson"]


@dataclass(frozen=True)
class Difference:
    """Mean of ``b - a`` over pairs with its bootstrap interval."""

    mean: float
    low: float
    high: float
    pairs: int

    @property
    def is_clear(self) -> bool:
        """The interval excludes zero."""
        return self.low > 0 or self.high < 0


def paired_difference(
    a: ArrayLike, b: ArrayLike, seed: int = 0, confidence: float = 0.95, resamples: int = 10_000
) -> Difference:
    """Paired percentile bootstrap of the mean difference (Efron and Tibshirani 1993, ch. 13).

    Pairing over seeds removes the difficulty of the scene from the comparison: both arms saw the same scenes, so the
    interval is that of the difference, not of two independent rates.

    Args:
        a: [N] outcomes of the baseline, one a seed.
        b: [N] outcomes of the other arm on the same seeds, in the same order.
        seed: Seed of the resampling.
        confidence: Coverage of the interval.
        resamples: Bootstrap samples.

    Raises:
        ValueError: The arms differ in length or are empty.
    """
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if x.shape != y.shape or x.ndim != 1 or x.size == 0:
        raise ValueError(f"paired outcomes need two equal, non-empty vectors, got shapes {x.shape} and {y.shape}")
    difference = y - x
    rng = np.random.default_rng(seed)
    # Resampling N pairs with replacement is a multinomial draw of how often each pair is taken.
    counts = rng.multinomial(x.size, np.full(x.size, 1.0 / x.size), size=resamples)
    means = counts @ difference / x.size
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Difference(float(difference.mean()), float(low), float(high), x.size)


def paired_results(a: EvalResult, b: EvalResult) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Outcomes of two results on the seeds that they share, in the same order."""
    left, right = ({e.seed: e.success for e in r.episodes} for r in (a, b))
    shared = sorted(left.keys() & right.keys())
    return np.array([left[s] for s in shared], bool), np.array([right[s] for s in shared], bool)


def frequency_averaged_score(results: Sequence[EvalResult]) -> float:
    """Mean normalised return over decision frequencies (Patel and Siegelmann 2024, Sequence RL, arXiv:2410.08979).

    How often a policy decides follows from how many actions of each chunk are executed. The return of an episode is 1
    where it succeeds, else 0, so it is normalised as it is.

    Args:
        results: One setting at several numbers of executed steps.
    """
    return float(np.mean([r.success_rate for r in results]))


def boundary_discontinuity(result: EvalResult, robot: RobotSpec) -> float:
    """How much rougher the motion is where one chunk hands over to the next than within a chunk.

    The second difference ``|a_k - 2 a_{k-1} + a_{k-2}|`` of the commands, its mean over handovers divided by its
    mean within chunks. 1 is a seamless handover. Grippers are switched, so they do not count; other dimensions are
    weighed by their largest legal step, where the robot declares one, to add metres to radians.

    Args:
        result: Episodes with their actions (not read from disk).
        robot: Meaning of the action's dimensions.

    Returns:
        The ratio; NaN where no chunk handed over to another or motion within chunks was exactly uniform.
    """
    moving = ~robot.gripper_mask
    scale = np.array([d.max_rate * robot.dt if np.isfinite(d.max_rate) else 1.0 for d in robot.action])[moving]
    at_boundary, within = [], []
    for episode in result.episodes:
        if len(episode.actions) < 3:
            continue
        jerk = np.linalg.norm(np.diff(episode.actions[:, moving] / scale, n=2, axis=0), axis=1)
        chunk = episode.chunks
        executed = (chunk[2:] != IDLE) & (chunk[1:-1] != IDLE) & (chunk[:-2] != IDLE)
        # a_k and a_{k-1} of different chunks: the jump enters the second differences of tick k and of tick k+1.
        swap = executed & ((chunk[2:] != chunk[1:-1]) | (chunk[1:-1] != chunk[:-2]))
        at_boundary.append(jerk[swap])
        within.append(jerk[executed & ~swap])
    if not at_boundary:
        return float("nan")
    boundary, inside = np.concatenate(at_boundary), np.concatenate(within)
    if boundary.size == 0 or inside.size == 0 or inside.mean() == 0:
        return float("nan")
    return float(boundary.mean() / inside.mean())

"""Figures of an evaluation beside success: outcomes on the same seeds, decision frequencies, smoothness.

numpy only, so that a robot computer can summarise its own episodes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vla_stack.rollout.records import IDLE, EvalResult
from vla_stack.schema import RobotSpec


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

"""Whether a world model orders policies as the world does. numpy alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vla_stack.statistics import Estimate, drawn_interval

OVER = "policies and starts"


def mmrv(real: ArrayLike, model: ArrayLike) -> float:
    """Mean maximum rank violation (Li et al. 2024, "SIMPLER", arXiv:2405.05941) of success rates of N policies.

    The mean over policies i of the largest real difference |R_i - R_j| to a policy j that the model orders otherwise.
    """
    r, s = (np.asarray(v, float) for v in (real, model))
    difference = np.abs(r[:, None] - r)
    otherwise = (s[:, None] > s) != (r[:, None] > r)
    return float((difference * otherwise).max(1).mean())


def pearson(x: ArrayLike, y: ArrayLike) -> float:
    """Correlation; NaN where one of the two does not vary."""
    a, b = (np.asarray(v, float) for v in (x, y))
    a, b = a - a.mean(), b - b.mean()
    scale = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / scale if scale > 1e-12 else float("nan")


def spearman(x: ArrayLike, y: ArrayLike) -> float:
    """Correlation of ranks; equal values share their mean rank."""
    return pearson(ranks(x), ranks(y))


def ranks(x: ArrayLike) -> NDArray[np.float64]:
    """Ranks from 0; equal values share their mean rank."""
    v = np.asarray(x, float)
    return (v[:, None] > v).sum(1) + ((v[:, None] == v).sum(1) - 1) / 2


def bias(real: ArrayLike, model: ArrayLike) -> float:
    """Mean of model minus real; negative: the model is the stricter one."""
    return float(np.mean(np.asarray(model, float) - np.asarray(real, float)))


def over_policies(
    statistic: Callable[..., float], *outcomes: NDArray[np.float64], draws: int = 2000, seed: int = 0
) -> Estimate:
    """A statistic of policies' rates, with its bootstrap interval over policies and paired starts.

    Another choice of policies would have given another correlation: an interval over starts alone says how well these
    few are ordered, and not whether the model orders policies.

    Args:
        statistic: Of as many lists of rates [N] as there are outcomes.
        outcomes: Of N policies over E starts, [N, E] each; NaN where an episode is not counted.
        draws: Bootstrap resamples of policies, and of the starts, which are the same for all of them.
        seed: Of the resampling.
    """
    n, starts = outcomes[0].shape
    rng = np.random.default_rng(seed)
    several = []
    for _ in range(draws):
        who, which = rng.integers(n, size=n), rng.integers(starts, size=starts)
        several.append(statistic(*(rates(o[who][:, which]) for o in outcomes)))
    return drawn_interval(statistic(*map(rates, outcomes)), several, OVER, n)


def rates(outcomes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Means [N] of outcomes [N, E], of those that are counted; NaN where none is."""
    counted = ~np.isnan(outcomes)
    with np.errstate(invalid="ignore"):
        return np.where(counted, outcomes, 0).sum(-1) / counted.sum(-1)

"""Whether a world model orders policies as the world does. numpy alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vla_stack.statistics import drawn_interval

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


STATISTICS = {"pearson": pearson, "spearman": spearman, "mmrv": mmrv, "bias": bias}


def compare(real: Sequence[ArrayLike], model: Sequence[ArrayLike], draws: int = 2000, seed: int = 0) -> dict[str, Any]:
    """All statistics over policies, with bootstrap intervals over policies and paired starts.

    Another choice of policies would have given another correlation: an interval over starts alone says how well these
    few are ordered, and not whether the model orders policies.

    Args:
        real: Successes of each policy over E starts, [N][E].
        model: The same starts in the model; NaN where an episode is not counted.
        draws: Bootstrap resamples of policies, and of the starts, which are the same for all of them.
        seed: Of the resampling.

    Returns:
        Statistic -> ``{"value", "interval": [low, high]}``; further ``real`` and ``model``, the rates, and
        ``pearson_inner``, without the best and the worst policy. A policy none of whose episodes is counted in the
        model is left out.
    """
    r, m = (np.asarray(v, float) for v in (real, model))
    rng = np.random.default_rng(seed)
    picks = rng.integers(r.shape[1], size=(draws, r.shape[1]))

    def rates(outcomes: NDArray[np.float64]) -> NDArray[np.float64]:
        counted = ~np.isnan(outcomes)
        with np.errstate(invalid="ignore"):  # a policy of which nothing is counted has no rate
            return np.where(counted, outcomes, 0).sum(-1) / counted.sum(-1)

    ranked = ~np.isnan(m).all(1)
    r, m = r[ranked], m[ranked]
    out: dict[str, Any] = {"real": rates(r).tolist(), "model": rates(m).tolist()}
    policies = rng.integers(len(r), size=(draws, len(r)))
    resampled = [(rates(r[i][:, p]), rates(m[i][:, p])) for i, p in zip(policies, picks, strict=True)]
    for name, statistic in STATISTICS.items():
        values = np.array([statistic(a, b) for a, b in resampled])
        e = drawn_interval(statistic(out["real"], out["model"]), values, OVER, len(r))
        out[name] = {"value": e.value, "interval": list(e.interval) if np.isfinite(e.interval).all() else [-1.0, 1.0]}
    inner = np.argsort(out["real"])[1:-1]
    out["pearson_inner"] = pearson(np.array(out["real"])[inner], np.array(out["model"])[inner])
    return out

"""Intervals for the numbers that this project prints. numpy only: robots print them too."""

from __future__ import annotations

import math
from statistics import NormalDist


def wilson(successes: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson score interval of a success rate (Wilson 1927, JASA 22:209-212).

    Args:
        successes: Number of successes, 0 <= successes <= n.
        n: Number of trials; with none the interval is all of [0, 1].
        confidence: Coverage, two-sided.

    Returns:
        (low, high), both in [0, 1].
    """
    if not 0 <= successes <= n:
        raise ValueError(f"{successes} successes in {n} trials")
    if n == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    p = successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)

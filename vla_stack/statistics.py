"""Intervals for the numbers that this project prints: what varied is what they are over. numpy only: robots print them.

A rate of one policy is a claim about starts: :func:`success_interval`. What two policies do on the same starts:
:func:`paired_interval`. A claim about a recipe is one about the policies that it gives, so it is over training seeds:
:func:`seeds_interval`, with the starts that all of them had as a second source where the outcomes are known one by one.
Any other sample of independent values: :func:`mean_interval`. Several claims at once: :func:`holm`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

STARTS, SEEDS, BOTH = "starts", "training seeds", "training seeds and starts"


@dataclass(frozen=True)
class Estimate:
    """A figure with its interval, which contains it.

    Attributes:
        value: The figure.
        low, high: The interval.
        over: What was sampled, and would be anew: ``starts``, ``training seeds``, ...
        n: How many of them; the fewest where there are two kinds.
    """

    value: float
    low: float
    high: float
    over: str
    n: int

    @property
    def interval(self) -> tuple[float, float]:
        return self.low, self.high

    @property
    def is_clear(self) -> bool:
        """The interval excludes zero."""
        return self.low > 0 or self.high < 0


def success_interval(successes: int, n: int, confidence: float = 0.95) -> Estimate:
    """Success rate of one policy over starts: :func:`wilson`, and exact where all or none succeed.

    Raises:
        ValueError: More successes than starts.
    """
    low, high = (clopper_pearson if successes in (0, n) else wilson)(successes, n, confidence)
    return Estimate(successes / n if n else 0.0, low, high, STARTS, n)


def wilson(successes: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson score interval of a success rate (Wilson 1927, JASA 22:209-212).

    Args:
        successes: Number of successes, 0 <= successes <= n.
        n: Number of trials; with none the interval is all of [0, 1].
        confidence: Coverage, two-sided.

    Returns:
        (low, high), both in [0, 1].
    """
    _counts(successes, n)
    if n == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    p = successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def clopper_pearson(successes: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Exact interval of a success rate (Clopper and Pearson 1934, Biometrika 26:404): at least ``confidence``."""
    _counts(successes, n)
    tail = (1 - confidence) / 2
    low = 0.0 if successes == 0 else _inverse_beta(tail, successes, n - successes + 1)
    high = 1.0 if successes == n else _inverse_beta(1 - tail, successes + 1, n - successes)
    return low, high


def paired_interval(a: ArrayLike, b: ArrayLike, confidence: float = 0.95) -> Estimate:
    """Success of ``b`` minus that of ``a`` on the same starts (Bonett and Price 2012, J. Educ. Behav. Stat. 37:479).

    One start is added to those that each alone won, so that starts which all end alike still leave something open.

    Args:
        a, b: [N] outcomes, 0 or 1, of the same starts in the same order.
        confidence: Coverage, two-sided.

    Raises:
        ValueError: They differ in length, are empty, or are no outcomes.
    """
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if x.shape != y.shape or x.ndim != 1 or x.size == 0:
        raise ValueError(f"paired outcomes need two equal, non-empty vectors, got shapes {x.shape} and {y.shape}")
    if not np.isin([x, y], (0, 1)).all():
        raise ValueError("paired outcomes are 0 or 1")
    n, z = x.size, NormalDist().inv_cdf(0.5 + confidence / 2)
    won, lost = (((y > x).sum() + 1) / (n + 2), ((y < x).sum() + 1) / (n + 2))
    half = z * math.sqrt((won + lost - (won - lost) ** 2) / (n + 2))
    low, high = max(-1.0, won - lost - half), min(1.0, won - lost + half)
    return Estimate(float((y - x).mean()), float(low), float(high), STARTS, n)


def mean_interval(values: ArrayLike, over: str, confidence: float = 0.95) -> Estimate:
    """Mean of independent values, one each of what was sampled: Student's t, which a handful of seeds needs.

    Args:
        values: [N]. One value alone says nothing of how it varies: the interval is then all numbers.
        over: What was sampled.
        confidence: Coverage, two-sided.

    Raises:
        ValueError: There are no values.
    """
    x = np.asarray(values, np.float64)
    if x.ndim != 1 or x.size == 0:
        raise ValueError(f"a mean needs a non-empty vector, got shape {x.shape}")
    if x.size == 1:
        return Estimate(float(x[0]), -math.inf, math.inf, over, 1)
    half = t_quantile(0.5 + confidence / 2, x.size - 1) * float(x.std(ddof=1)) / math.sqrt(x.size)
    return Estimate(float(x.mean()), float(x.mean() - half), float(x.mean() + half), over, x.size)


def seeds_interval(outcomes: ArrayLike, minus: ArrayLike | None = None, confidence: float = 0.95) -> Estimate:
    """Mean over training seeds of outcomes on starts that all seeds had: of a recipe, or of one recipe over another.

    Seeds and starts are crossed random effects: the variance of the mean is (M_seeds + M_starts - M_rest) / (S N) with
    the mean squares of the two-way table (Cornfield and Tukey 1956), and Satterthwaite's degrees of freedom (1946,
    Biometrics 2:110). Successes that hardly vary show too little of that: the interval reaches at least as far as
    :func:`clopper_pearson` of all episodes does, or that of :func:`paired_interval`.

    Args:
        outcomes: [S, N]: successes, 0 or 1, or any other figure of an episode. One seed is a policy, not a recipe: the
            interval is then over its starts, and says so.
        minus: [S, N], of another recipe on the same seeds and starts: the interval is of the difference.
        confidence: Coverage, two-sided.

    Raises:
        ValueError: It is no table, or empty, or the tables differ in shape.
    """
    x = np.asarray(outcomes, np.float64)
    if x.ndim != 2 or x.size == 0:
        raise ValueError(f"outcomes are a table of seeds by starts, got shape {x.shape}")
    floor, bounds = (math.inf, -math.inf), (-math.inf, math.inf)
    if np.isin(x, (0, 1)).all() and minus is None:
        floor, bounds = clopper_pearson(int(x.sum()), x.size, confidence), (0.0, 1.0)
    if minus is not None:
        other = np.asarray(minus, np.float64)
        if other.shape != x.shape:
            raise ValueError(f"tables of shapes {x.shape} and {other.shape} are not of the same seeds and starts")
        if np.isin([x, other], (0, 1)).all():
            floor, bounds = paired_interval(other.ravel(), x.ravel(), confidence).interval, (-1.0, 1.0)
        x = x - other
    plain = _crossed(x, confidence)
    low, high = max(bounds[0], min(plain.low, floor[0])), min(bounds[1], max(plain.high, floor[1]))
    return Estimate(plain.value, low, high, plain.over, plain.n)


def rates_interval(rates: ArrayLike, episodes: int, confidence: float = 0.95) -> Estimate:
    """Success of a recipe where of each training seed only its rate over ``episodes`` is known: Student's t over seeds,
    reaching at least as far as :func:`clopper_pearson` of all episodes.

    Args:
        rates: [S].
        episodes: Of each seed.
        confidence: Coverage, two-sided.
    """
    plain = mean_interval(rates, SEEDS, confidence)
    low, high = clopper_pearson(round(plain.value * plain.n * episodes), plain.n * episodes, confidence)
    return Estimate(plain.value, max(0.0, min(low, plain.low)), min(1.0, max(high, plain.high)), SEEDS, plain.n)


def rates_difference(
    rates: ArrayLike, episodes: int, minus: ArrayLike, their_episodes: int, confidence: float = 0.95
) -> Estimate:
    """Success minus that of something else of the same training seeds: Student's t over seeds, reaching at least as far
    as Agresti and Caffo's interval of all episodes (2000, American Statistician 54:280).

    Args:
        rates, minus: [S], of the same seeds.
        episodes, their_episodes: Of each seed, behind either.
        confidence: Coverage, two-sided.
    """
    a, b = np.asarray(rates, np.float64), np.asarray(minus, np.float64)
    plain = mean_interval(a - b, SEEDS, confidence)
    p, q = ((r.sum() * k + 1) / (r.size * k + 2) for r, k in ((a, episodes), (b, their_episodes)))
    spread = p * (1 - p) / (a.size * episodes + 2) + q * (1 - q) / (b.size * their_episodes + 2)
    half = NormalDist().inv_cdf(0.5 + confidence / 2) * math.sqrt(spread)
    low, high = min(plain.low, p - q - half), max(plain.high, p - q + half)
    return Estimate(plain.value, max(-1.0, float(low)), min(1.0, float(high)), SEEDS, plain.n)


def ratio_interval(a: ArrayLike, b: ArrayLike, over: str, confidence: float = 0.95) -> Estimate:
    """Mean of ``a`` over mean of ``b``, both above 0 and paired: Student's t on the logarithm, linearised.

    Args:
        a, b: [N], of the same seeds or repeats.
        over: What these are.
        confidence: Coverage, two-sided.
    """
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    value = float(x.mean() / y.mean())
    log = mean_interval(x / x.mean() - y / y.mean(), over, confidence)
    low, high = (math.exp(e) if e < 700 else math.inf for e in log.interval)
    return Estimate(value, value * low, value * high, over, log.n)


def median_interval(values: ArrayLike, over: str, confidence: float = 0.95) -> Estimate:
    """Median between order statistics, whatever the distribution; all numbers where there are too few values."""
    x = np.sort(np.asarray(values, np.float64))
    rank, below = -1, 0.0  # the most ranks to leave out on each side
    for k in range(x.size // 2):
        below += math.comb(x.size, k) / 2**x.size
        if below > (1 - confidence) / 2:
            break
        rank = k
    low, high = (float(x[rank]), float(x[-1 - rank])) if rank >= 0 else (-math.inf, math.inf)
    return Estimate(float(np.median(x)), low, high, over, x.size)


def drawn_interval(value: float, draws: ArrayLike, over: str, n: int, confidence: float = 0.95) -> Estimate:
    """Of a statistic that has no formula, such as a rank correlation: percentiles of its bootstrap draws and itself.

    Of few they are too narrow, as an interval of a mean would be by the normal distribution and the standard deviation
    with n below the fraction. The percentiles lie as much further out as Student's t and n - 1 take that interval
    ("expanded percentiles": Hesterberg 2015, The American Statistician 69:371).

    Args:
        value: The statistic.
        draws: [D] of it on resampled data; those that are not defined do not count.
        over: What was resampled.
        n: How many of them.
        confidence: Coverage, two-sided.
    """
    known = np.asarray(draws, np.float64)
    known = known[~np.isnan(known)]
    if not known.size or math.isnan(value) or n < 2:
        return Estimate(value, -math.inf, math.inf, over, n)
    outside = NormalDist().cdf(-math.sqrt(n / (n - 1)) * t_quantile(0.5 + confidence / 2, n - 1))
    low, high = np.quantile(known, (outside, 1 - outside))
    return Estimate(value, min(value, float(low)), max(value, float(high)), over, n)


def holm(p: Sequence[float]) -> list[float]:
    """P-values of several claims, corrected so that any of them is wrong with their nominal chance (Holm 1979).

    Returns:
        Adjusted values in the order given: hold the claims whose value is at most alpha.
    """
    adjusted, least = [0.0] * len(p), 0.0
    for place, i in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        least = max(least, min(1.0, (len(p) - place) * p[i]))
        adjusted[i] = least
    return adjusted


def t_quantile(q: float, freedom: float) -> float:
    """Quantile of Student's t, q in (0.5, 1)."""
    x = _inverse_beta(2 * (1 - q), freedom / 2, 0.5)  # of freedom / (freedom + t^2)
    return math.sqrt(freedom * (1 - x) / x)


def _crossed(x: NDArray[np.float64], confidence: float) -> Estimate:
    """Mean of a table of seeds by starts, both of them sampled."""
    seeds, starts = x.shape
    if seeds == 1 or starts == 1:
        return mean_interval(x.ravel(), STARTS if seeds == 1 else SEEDS, confidence)
    mean, rows, columns = float(x.mean()), x.mean(1), x.mean(0)
    rest = x - rows[:, None] - columns[None, :] + mean
    freedom = np.array([seeds - 1, starts - 1, (seeds - 1) * (starts - 1)])
    sums = [starts * ((rows - mean) ** 2).sum(), seeds * ((columns - mean) ** 2).sum(), (rest**2).sum()]
    by_seed, by_start, both = np.array(sums) / freedom
    total = max(by_seed + by_start - both, by_seed, by_start)
    half = 0.0
    if total > 0:
        of_total = max(total**2 / (np.array([by_seed, by_start, both]) ** 2 / freedom).sum(), 1.0)
        half = t_quantile(0.5 + confidence / 2, float(of_total)) * math.sqrt(total / x.size)
    return Estimate(mean, mean - half, mean + half, BOTH, min(seeds, starts))


def _counts(successes: int, n: int) -> None:
    if not 0 <= successes <= n:
        raise ValueError(f"{successes} successes in {n} trials")


def _inverse_beta(q: float, a: float, b: float) -> float:
    """x with I_x(a, b) = q, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _beta(middle, a, b) < q else (low, middle)
    return (low + high) / 2


def _beta(x: float, a: float, b: float) -> float:
    """Regularised incomplete beta function I_x(a, b): Lentz's continued fraction (DLMF 8.17.22)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - _beta(1 - x, b, a)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    d = 1 / (1 - (a + b) * x / (a + 1))
    c, value = 1.0, d
    for m in range(1, 500):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / (1 + term * d)
            c = 1 + term / c
            value *= d * c
        if abs(d * c - 1) < 1e-14:
            break
    return front * value

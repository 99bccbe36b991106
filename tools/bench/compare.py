"""What the comparison of policies and every interval are worth, at rates that are known.

    python tools/bench/compare.py

A thousand simulated comparisons of each pair of rates, by the test of ``vla compare`` with its looks and margin: how
often it says what is not so, and how many starts it uses against McNemar's exact test on a number of starts that is
fixed beforehand for the same power. Then how often each interval of ``vla_stack.statistics`` holds the truth: of 95 %.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from results import Check, parser, write
from vla_stack.evaluation.ranking import bradley_terry
from vla_stack.evaluation.sequential import evidence, paired_test
from vla_stack.statistics import (
    drawn_interval,
    mean_interval,
    median_interval,
    paired_interval,
    rates_difference,
    rates_interval,
    ratio_interval,
    seeds_interval,
    success_interval,
)
from vla_stack.verbs.compare import BLOCK

COMPARISONS, BUDGET, ALPHA, MARGIN = 1000, 400, 0.05, 0.1
# Success of both, and the share of starts whose luck is common to both: scenes that are hard for one are for the other.
EQUAL = ((0.5, 0.5, 0.0), (0.5, 0.5, 0.5), (0.9, 0.9, 0.0), (0.9, 0.9, 0.8), (0.2, 0.2, 0.3))
MARGINAL = ((0.5, 0.6, 0.0), (0.8, 0.9, 0.5), (0.9, 1.0, 0.0))
APART = ((0.5, 0.7, 0.0), (0.5, 0.7, 0.5), (0.6, 0.9, 0.0), (0.8, 0.95, 0.3), (0.85, 0.95, 0.5), (0.3, 0.4, 0.5))
NARROW = "percentiles of bootstrap draws are too narrow for a skewed statistic"
RATES = np.linspace(0.02, 0.98, 49)


def outcomes(rng: np.random.Generator, a: float, b: float, common: float) -> tuple[NDArray, NDArray]:
    """Wins and losses of the second policy, int [comparisons, starts] each, counted up to each start."""
    luck = rng.random((COMPARISONS, BUDGET))
    other = np.where(rng.random(luck.shape) < common, luck, rng.random(luck.shape))
    first, second = luck < a, other < b
    return np.cumsum(second & ~first, 1), np.cumsum(first & ~second, 1)


def played(rng: np.random.Generator, a: float, b: float, common: float) -> dict[str, float]:
    """What a thousand comparisons said, and the starts that they used."""
    wins, losses = outcomes(rng, a, b, common)
    ties = np.arange(1, BUDGET + 1) - wins - losses
    limit = np.log(1 / ALPHA)

    def reached(d: float, side) -> NDArray:  # the first start at which it is refuted, BUDGET where it is not
        over = evidence(wins, ties, losses, d, side) >= limit
        return np.where(over.any(1), over.argmax(1), BUDGET)

    better = reached(0.0, "both")
    same = np.maximum(reached(MARGIN, "below"), reached(-MARGIN, "above"))
    stop = np.minimum((np.minimum(better, same) // BLOCK + 1) * BLOCK, BUDGET)
    told = better < stop  # as in `PairedTest.verdict`: who is better goes first
    ahead = (wins - losses)[np.arange(COMPARISONS), np.minimum(better, BUDGET - 1)] > 0
    return {
        "a": a,
        "b": b,
        "common": common,
        "first better": float((told & ~ahead).mean()),
        "second better": float((told & ahead).mean()),
        "same": float((~told & (same < stop)).mean()),
        "starts": float(stop.mean()),
        "alone": [float(losses[:, -1].mean() / BUDGET), float(wins[:, -1].mean() / BUDGET)],  # type: ignore[dict-item]
    }


def power(lost: float, won: float, n: int) -> float:
    """Of McNemar's exact two-sided test with n starts of which each policy alone wins these shares."""
    k = np.arange(n + 1)
    critical = binom.ppf(ALPHA / 2, k, 0.5)
    critical = np.where(binom.cdf(critical, k, 0.5) <= ALPHA / 2, critical, critical - 1)
    share = won / (won + lost)
    rejected = binom.cdf(critical, k, share) + binom.sf(k - critical - 1, k, share)
    return float((binom.pmf(k, n, won + lost) * rejected * (critical >= 0)).sum())


def fixed(lost: float, won: float, wanted: float) -> int:
    """The fewest starts that give the power."""
    low, high = 1, 4096
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power(lost, won, middle) >= wanted else (middle, high)
    return high


def coverage_of_rates() -> list[float]:
    """Of :func:`success_interval`, exactly, by number of starts: mean over :data:`RATES`."""
    found = []
    for n in (20, 50, 100, 500):
        bounds = np.array([success_interval(k, n).interval for k in range(n + 1)])
        inside = (bounds[:, :1] <= RATES) & (bounds[:, 1:] >= RATES)
        found.append(float((binom.pmf(np.arange(n + 1)[:, None], n, RATES) * inside).sum(0).mean()))
    return found


def share(repeats: int, held: Callable[[], bool]) -> float:
    return sum(held() for _ in range(repeats)) / repeats


def coverage(rng: np.random.Generator, repeats: int) -> dict[str, list[float]]:
    """How often each interval holds the truth, by setting."""

    def paired(n: int, a: float, b: float, common: float) -> bool:
        luck = rng.random(n)
        other = np.where(rng.random(n) < common, luck, rng.random(n))
        e = paired_interval(luck < a, other < b)
        return e.low <= b - a <= e.high

    def recipe(seeds: int, starts: int, mean: float, spread: float) -> Callable[[], bool]:
        of_all = mean + spread * rng.normal(size=400_000) + rng.normal(size=400_000)
        truth = float((1 / (1 + np.exp(-of_all))).mean())

        def held() -> bool:
            odds = mean + spread * rng.normal(size=(seeds, 1)) + rng.normal(size=(1, starts))
            e = seeds_interval(rng.random((seeds, starts)) < 1 / (1 + np.exp(-odds)))
            return e.low <= truth <= e.high

        return held

    def gain(seeds: int, starts: int, spread: float) -> bool:
        """Two recipes that are as good, on the same starts."""
        hard = rng.normal(size=(1, starts))
        odds = [0.5 + spread * rng.normal(size=(seeds, 1)) + hard for _ in range(2)]
        a, b = ((rng.random((seeds, starts)) < 1 / (1 + np.exp(-o))).astype(float) for o in odds)
        e = seeds_interval(b, a)
        return e.low <= 0 <= e.high

    def mean(n: int) -> bool:
        e = mean_interval(rng.normal(size=n), "repeats")
        return e.low <= 0 <= e.high

    def rates(seeds: int, mean: float) -> Callable[[], bool]:
        truth = float((1 / (1 + np.exp(-(mean + 0.4 * rng.normal(size=400_000))))).mean())

        def held() -> bool:
            of_seeds = 1 / (1 + np.exp(-(mean + 0.4 * rng.normal(size=seeds))))
            e = rates_interval(rng.binomial(40, of_seeds) / 40, 40)
            return e.low <= truth <= e.high

        return held

    def rates_apart(seeds: int) -> bool:
        """Of the same seeds, which are as good in both."""
        of_seeds = 1 / (1 + np.exp(-(0.5 + 0.4 * rng.normal(size=(2, seeds)))))
        a, b = rng.binomial(40, of_seeds) / 40
        e = rates_difference(a, 40, b, 40)
        return e.low <= 0 <= e.high

    def ratio(seeds: int) -> bool:
        """Steps of seeds that are slow in both arms, a quarter more of them in one."""
        steps = 1000 * np.exp(0.3 * rng.normal(size=(1, seeds)) + 0.2 * rng.normal(size=(2, seeds)))
        e = ratio_interval(1.25 * steps[0], steps[1], "seeds")
        return e.low <= 1.25 <= e.high

    def median(n: int) -> bool:
        e = median_interval(rng.exponential(size=n), "repeats")
        return e.low <= np.log(2) <= e.high

    def drawn(n: int) -> bool:
        """A correlation of 0.6."""
        x = rng.normal(size=(2, n))
        x[1] = 0.6 * x[0] + 0.8 * x[1]
        picks = rng.integers(n, size=(400, n))
        draws = [np.corrcoef(x[:, p])[0, 1] for p in picks]
        e = drawn_interval(float(np.corrcoef(x)[0, 1]), draws, "starts", n)
        return e.low <= 0.6 <= e.high

    def strengths(starts: int) -> float:
        true = np.array([-1.0, -0.2, 0.2, 1.0])
        odds = true + rng.normal(size=(starts, 1))
        found = bradley_terry(rng.random((starts, 4)) < 1 / (1 + np.exp(-odds)))
        return float(np.mean([s.low <= t <= s.high for s, t in zip(found, true, strict=True)]))

    tables = [(n, seeds, mu, sd) for n in (100,) for seeds in (3, 5) for mu in (0.0, 1.0, 2.0) for sd in (0.3, 0.6)]
    return {
        "success of a policy, over starts": coverage_of_rates(),
        "difference of two policies, over starts": [
            share(repeats, lambda n=n, x=x: paired(n, *x))
            for n in (20, 50, 200)
            for x in ((0.5, 0.5, 0.0), (0.5, 0.7, 0.3), (0.8, 0.9, 0.5), (0.9, 0.95, 0.0))
        ],
        "success of a recipe, over seeds and starts": [
            share(repeats, recipe(seeds, n, mu, sd)) for n, seeds, mu, sd in tables
        ],
        "difference of two recipes, over seeds and starts": [
            share(repeats, lambda s=s, n=n, sd=sd: gain(s, n, sd))
            for s in (3, 5)
            for n in (50, 200)
            for sd in (0.3, 0.8)
        ],
        "success of a recipe, rates of seeds alone": [
            share(repeats, rates(seeds, mu)) for seeds in (3, 5, 10) for mu in (0.0, 1.0, 2.0)
        ],
        "difference of two recipes, rates of seeds alone": [
            share(repeats, lambda s=s: rates_apart(s)) for s in (3, 5, 10)
        ],
        "a ratio, over few seeds": [share(repeats, lambda s=s: ratio(s)) for s in (3, 5, 10)],
        "a median, over repeats": [share(repeats, lambda n=n: median(n)) for n in (40, 60, 100, 200)],
        "a correlation, by its draws": [share(repeats // 4, lambda n=n: drawn(n)) for n in (8, 20, 50, 200)],
        "a mean, over few repeats": [share(repeats, lambda n=n: mean(n)) for n in (2, 3, 5, 20)],
        "Bradley and Terry's strengths, over starts": [
            float(np.mean([strengths(n) for _ in range(repeats // 4)])) for n in (50, 200)
        ],
    }


def always(rng: np.random.Generator, repeats: int) -> float:
    """How often the interval of the sequential test holds the truth after every tenth of 200 starts."""

    def held() -> bool:
        a, b = rng.random(200) < 0.6, rng.random(200) < 0.75
        tests = [paired_test(a[:n], b[:n]) for n in range(10, 201, 10)]
        return all(t.low <= 0.15 <= t.high for t in tests)

    return share(repeats, held)


def main() -> int:
    parser(__doc__).parse_args()
    rng = np.random.default_rng(0)
    equal = [played(rng, *x) for x in EQUAL]
    marginal = [played(rng, *x) for x in MARGINAL]
    apart = [played(rng, *x) for x in APART]
    for row in apart:
        lost, won = row.pop("alone")  # type: ignore[misc]
        row["fixed"] = fixed(lost, won, min(row["second better"], 1 - 1 / COMPARISONS))
    worst = max(r["first better"] + r["second better"] for r in equal)
    used, needed = (sum(r[key] for r in apart) for key in ("starts", "fixed"))
    ratios = [r["starts"] / r["fixed"] for r in apart]
    checks = [
        Check("simulated comparisons of each pair of rates", COMPARISONS, 1000),
        Check("equal policies: one called better, worst pair of rates", worst, ALPHA, "<="),
        Check("the worse called better, worst pair of rates", max(r["first better"] for r in apart), ALPHA, "<="),
        Check("apart by the margin: called alike, worst pair of rates", max(r["same"] for r in marginal), ALPHA, "<="),
        Check("starts used, of those of a fixed number of equal power, all pairs", used / needed, 0.6, "<="),
        *(
            Check(f"... {r['a']:g} and {r['b']:g}, {r['common']:.0%} common, power {r['second better']:.3f}", x)
            for r, x in zip(apart, ratios, strict=True)
        ),
        Check("equal policies: mean starts of a budget of 400", float(np.mean([r["starts"] for r in equal]))),
        Check("interval of the test, held at every look", always(rng, 300), 1 - ALPHA),
    ]
    covered = coverage(rng, COMPARISONS)
    for name, settings in covered.items():
        value = float(np.mean(settings))
        checks += [
            Check(f"coverage: {name}, at least", value, 0.93, why=NARROW),
            Check(f"coverage: {name}, at most", value, 0.97, "<="),
            Check(f"coverage: {name}, worst setting", min(settings)),
        ]
    data = {"budget": BUDGET, "margin": MARGIN, "alpha": ALPHA, "looks every": BLOCK}
    write("compare", checks, data | {"equal": equal, "marginal": marginal, "apart": apart, "coverage": covered}, [0])
    return 0


if __name__ == "__main__":
    sys.exit(main())

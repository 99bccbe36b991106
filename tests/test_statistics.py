import numpy as np
import pytest

from vla_stack.statistics import (
    BOTH,
    SEEDS,
    STARTS,
    clopper_pearson,
    drawn_interval,
    holm,
    mean_interval,
    median_interval,
    paired_interval,
    rates_difference,
    rates_interval,
    ratio_interval,
    seeds_interval,
    success_interval,
    t_quantile,
    wilson,
)


@pytest.mark.parametrize(
    ("successes", "n", "interval"),
    [(0, 10, (0.0, 0.27753)), (10, 10, (0.72247, 1.0)), (5, 10, (0.23659, 0.76341)), (45, 50, (0.78640, 0.95652))],
)
def test_wilson_matches_published_values(successes, n, interval):
    assert wilson(successes, n) == pytest.approx(interval, abs=2e-5)


def test_wilson_without_trials_says_nothing():
    assert wilson(0, 0) == (0.0, 1.0)


def test_wilson_refuses_impossible_counts():
    with pytest.raises(ValueError, match="11 successes in 10 trials"):
        wilson(11, 10)


@pytest.mark.parametrize(
    ("successes", "n", "interval"),
    [(7, 40, (0.0733827, 0.3277901)), (1, 1, (0.025, 1.0)), (9, 10, (0.5549839, 0.9974714))],
)
def test_clopper_pearson_matches_published_values(successes, n, interval):
    assert clopper_pearson(successes, n) == pytest.approx(interval, abs=1e-6)


@pytest.mark.parametrize(("freedom", "value"), [(1, 12.70620), (2, 4.30265), (4, 2.77645), (30, 2.04227)])
def test_quantiles_of_t_match_tables(freedom, value):
    assert t_quantile(0.975, freedom) == pytest.approx(value, abs=1e-5)


@pytest.mark.parametrize("n", [1, 5, 40, 400])
def test_none_and_all_are_exact_and_start_at_the_figure(n):
    none, every = success_interval(0, n), success_interval(n, n)
    assert none.interval == pytest.approx((0.0, 1 - 0.025 ** (1 / n)), abs=1e-9) and none.low == 0.0
    assert every.interval == pytest.approx((0.025 ** (1 / n), 1.0), abs=1e-9) and every.high == 1.0
    assert none.over == STARTS


def test_every_interval_contains_its_estimate():
    rng = np.random.default_rng(0)
    for rate in (0.0, 0.01, 0.3, 0.99, 1.0):
        for seeds, starts in ((1, 40), (2, 1), (3, 40), (5, 200)):
            a, b = (rng.random((2, seeds, starts)) < rate).astype(float)
            for e in (seeds_interval(a), seeds_interval(a, b), paired_interval(a[0], b[0])):
                assert -1 <= e.low <= e.value <= e.high <= 1
                assert e.low < e.high  # and never a point
    for k in range(41):
        e = success_interval(k, 40)
        assert e.low <= e.value <= e.high


def test_the_interval_of_a_recipe_grows_with_its_seeds_not_with_its_starts():
    """Seeds that differ, starts that do not: as Student's t of the seeds; more starts do not narrow it."""
    by_seed = np.array([0.2, 0.5, 0.8])
    few, many = (np.repeat(by_seed, n).reshape(3, n) for n in (10, 1000))
    half = t_quantile(0.975, 2) * by_seed.std(ddof=1) / np.sqrt(3)
    for table in (few, many):
        e = seeds_interval(table)
        assert e.interval == pytest.approx((0.5 - half, 0.5 + half), abs=1e-9) and e.over == BOTH
    assert seeds_interval(few[:1] > 0.3).over == STARTS
    assert seeds_interval((few > 0.3)[:, :1]).over == SEEDS


def test_one_value_says_nothing_of_how_it_varies():
    assert mean_interval([0.4], "repeats").interval == (-np.inf, np.inf)
    assert mean_interval([1.0, 3.0], "repeats").interval == pytest.approx((2 - 12.7062, 2 + 12.7062), abs=1e-4)


def test_holm_is_ordered_and_no_less_than_its_p():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0] and holm([]) == []


@pytest.mark.parametrize(("a", "b"), [([], []), ([1], [1, 0]), ([[1]], [[1]]), ([0.5], [1])])
def test_what_is_not_paired_is_refused(a, b):
    with pytest.raises(ValueError, match="paired outcomes"):
        paired_interval(a, b)


def test_seeds_of_which_only_the_rate_is_known():
    rates = np.array([0.2, 0.5, 0.8])
    half = t_quantile(0.975, 2) * rates.std(ddof=1) / np.sqrt(3)
    e = rates_interval(rates, 40)
    assert e.interval == (0.0, 1.0) or e.low == pytest.approx(max(0, 0.5 - half))
    assert rates_interval([0.0] * 5, 40).interval == pytest.approx(clopper_pearson(0, 200))
    alike = rates_difference([1.0] * 5, 40, [1.0] * 5, 40)
    assert alike.low < 0 < alike.high and alike.value == 0.0 and alike.over == SEEDS
    assert seeds_interval(np.ones((5, 40)), np.ones((5, 40))).low < 0  # nothing seen is not nothing there


def test_ratios_are_paired_and_medians_between_order_statistics():
    a = np.array([100.0, 200.0, 300.0])
    e = ratio_interval(a, 2 * a, SEEDS)
    assert (e.value, e.low, e.high) == pytest.approx((0.5, 0.5, 0.5))
    assert median_interval(np.arange(1, 11), "repeats").interval == (2, 9)  # as in tables of the sign test, n = 10
    assert median_interval([1, 2], "repeats").interval == (-np.inf, np.inf)


def test_percentiles_of_draws_hold_the_statistic():
    assert drawn_interval(0.5, [0.6, 0.7, np.nan], STARTS, 9).low == 0.5
    assert drawn_interval(np.nan, [0.6], STARTS, 9).interval == (-np.inf, np.inf)
    assert drawn_interval(0.5, [0.6], STARTS, 1).interval == (-np.inf, np.inf)


def test_percentiles_of_draws_hold_a_mean_of_few_as_students_t_does():
    """Bootstrap means of n values have a standard deviation that is too small by sqrt((n - 1) / n)."""
    rng = np.random.default_rng(0)
    for n in (5, 10, 2000):
        x = rng.normal(size=n)
        draws = x.mean() + x.std() / np.sqrt(n) * rng.normal(size=400_000)
        found, known = drawn_interval(float(x.mean()), draws, STARTS, n), mean_interval(x, STARTS)
        assert found.interval == pytest.approx(known.interval, abs=0.03 * (known.high - known.low))

"""The sequential test against its own definition, exact probabilities and simulation at known rates."""

import itertools
import math

import numpy as np
import pytest

from vla_stack.evaluation.ranking import bradley_terry, ranks
from vla_stack.evaluation.sequential import STAKES, evidence, paired_test


def test_a_fortune_is_a_fair_game_at_the_mean_that_is_doubted():
    """Over all sequences of three starts, weighed by their probability, the fortune keeps its mean of 1."""
    chance = {1: 0.3, 0: 0.6, -1: 0.1}
    for side in ("above", "below", "both"):
        mean = 0.0
        for x in itertools.product(chance, repeat=3):
            counts = (x.count(1), x.count(0), x.count(-1))
            mean += math.prod(chance[v] for v in x) * math.exp(float(evidence(*counts, d=0.2, side=side)))
        assert mean == pytest.approx(1.0, abs=1e-12)


def test_alike_starts_change_nothing_at_no_difference():
    assert evidence(5, 0, 2) == pytest.approx(evidence(5, 1000, 2), abs=1e-9)
    assert evidence(5, 3, 2) == pytest.approx(evidence(2, 3, 5), abs=1e-12)
    both = np.concatenate([STAKES, -STAKES])
    assert evidence(5, 0, 2) == pytest.approx(np.log(((1 + both) ** 5 * (1 - both) ** 2).mean()))


def test_error_over_all_looks_is_exactly_bounded():
    """The chance that a fair coin ever carries the fortune to 20 in 300 discordant starts, by dynamic programming."""
    alive, crossed = np.ones(1), 0.0
    for n in range(1, 301):
        alive = np.convolve(alive, [0.5, 0.5])
        wins = np.arange(n + 1)
        out = evidence(wins, 0, n - wins) >= math.log(20)
        crossed += alive[out].sum()
        alive[out] = 0.0
    assert 0.02 < crossed <= 0.05


def test_verdicts_say_who_leads():
    better = paired_test([0] * 20, [1] * 20)
    assert better.verdict(0.05) == "second" and better.difference == 1.0 and better.low > 0.3
    worse = paired_test([1] * 20, [0] * 20)
    assert worse.verdict(0.05) == "first" and worse.p == pytest.approx(better.p)
    assert (worse.low, worse.high) == pytest.approx((-better.high, -better.low))
    assert paired_test([1] * 100, [1] * 100).verdict(0.05) == "same"
    assert paired_test([1, 0], [0, 1]).verdict(0.05) == "open"
    nothing = paired_test([], [])
    assert (nothing.p, nothing.same_p, nothing.low, nothing.high) == (1.0, 1.0, -1.0, 1.0)


def test_p_is_that_of_the_best_look():
    """Stopping is not needed for the p-value to hold: later starts cannot take a verdict back."""
    a, b = [0] * 20 + [1] * 5, [1] * 20 + [0] * 5
    assert paired_test(a, b).p == paired_test(a[:20], b[:20]).p


def test_the_interval_contains_its_estimate_and_excludes_zero_with_the_test():
    rng = np.random.default_rng(0)
    for n in (1, 3, 20, 200):
        a, b = rng.random(n) < 0.5, rng.random(n) < 0.8
        t = paired_test(a, b)
        assert -1 <= t.low <= t.difference <= t.high <= 1
        assert (t.low > 0 or t.high < 0) == (evidence(t.wins, t.ties, t.losses) >= math.log(20))


def test_outcomes_of_other_starts_are_refused():
    with pytest.raises(ValueError, match="paired outcomes"):
        paired_test([1, 0], [1])


def test_strengths_are_log_odds_whatever_the_scenes():
    """Rasch's model: the difficulty of scenes cancels."""
    rng = np.random.default_rng(1)
    true = np.array([-0.8, 0.0, 0.8])
    hard = rng.normal(0.5, 2.0, (20_000, 1))
    success = rng.random((20_000, 3)) < 1 / (1 + np.exp(-(true - hard)))
    found = bradley_terry(success)
    assert [s.value for s in found] == pytest.approx(true, abs=0.06)
    assert sum(s.value for s in found) == pytest.approx(0, abs=1e-9)
    assert all(s.low <= t <= s.high for s, t in zip(found, true, strict=True))


def test_who_never_lost_has_a_finite_strength_and_missing_starts_do_not_count():
    success = np.array([[1, 0, np.nan]] * 10 + [[1, 0, 0]] * 10, float)
    found = bradley_terry(success)
    assert np.isfinite([(s.low, s.value, s.high) for s in found]).all()
    assert found[0].value > found[1].value and found[0].value > found[2].value


def test_ranks_follow_from_what_is_decided():
    verdicts = {("a", "b"): "first", ("a", "c"): "open", ("b", "c"): "second"}
    assert ranks(("a", "b", "c"), verdicts) == {"a": (1, 2), "b": (3, 3), "c": (1, 2)}

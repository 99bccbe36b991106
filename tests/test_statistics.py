import pytest

from vla_stack.statistics import wilson


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

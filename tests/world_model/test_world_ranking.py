"""Rank statistics on cases computed by hand."""

from __future__ import annotations

import numpy as np

from vla_stack.world_model.ranking import bias, mmrv, over_policies, pearson, ranks, rates, spearman


def test_rank_violations() -> None:
    real = [0.1, 0.4, 0.9]
    assert mmrv(real, [0.0, 0.2, 0.3]) == 0  # the same order, whatever the scale
    # Reversed: the first is furthest from the third (0.8), the second from the third (0.5), the third from the first.
    np.testing.assert_allclose(mmrv(real, [0.3, 0.2, 0.0]), (0.8 + 0.5 + 0.8) / 3)
    # The model swaps the first two alone.
    np.testing.assert_allclose(mmrv(real, [0.2, 0.1, 0.9]), (0.3 + 0.3 + 0.0) / 3)


def test_correlations_and_bias() -> None:
    x, y = np.random.default_rng(0).normal(size=(2, 9))
    np.testing.assert_allclose(pearson(x, y), np.corrcoef(x, y)[0, 1])
    assert ranks([3, 1, 1, 2]).tolist() == [3, 0.5, 0.5, 2]
    assert spearman([1, 2, 3], [1, 10, 1000]) == 1
    assert np.isnan(pearson([1, 1], [0, 1]))
    np.testing.assert_allclose(bias([0.5, 0.7], [0.4, 0.4]), -0.2)


def test_intervals_hold_their_value_and_uncounted_episodes_are_left_out() -> None:
    rng = np.random.default_rng(0)
    p = np.linspace(0.1, 0.9, 5)[:, None]
    real = (rng.random((5, 60)) < p).astype(float)
    assert over_policies(pearson, real, real, draws=200).value > 1 - 1e-12
    assert over_policies(mmrv, real, real, draws=200).value == over_policies(bias, real, real, draws=200).value == 0
    model = np.where(rng.random((5, 60)) < 0.1, 1 - real, real)
    e = over_policies(pearson, real, model, draws=200)
    assert e.low < e.value < e.high and e.over == "policies and starts"
    model[:, :30] = np.nan
    np.testing.assert_allclose(rates(model), model[:, 30:].mean(1))
    assert over_policies(bias, real, model, draws=1).value == (model[:, 30:].mean(1) - real.mean(1)).mean()


def test_few_policies_say_little_however_many_starts_they_had() -> None:
    rng, width = np.random.default_rng(1), []
    for policies in (4, 40):
        p = rng.uniform(0.1, 0.9, (policies, 1))
        model = np.clip(p + rng.normal(0, 0.15, p.shape), 0, 1)
        e = over_policies(pearson, *((rng.random((policies, 2000)) < q).astype(float) for q in (p, model)), draws=400)
        width.append(e.high - e.low)
    assert width[0] > 2 * width[1]

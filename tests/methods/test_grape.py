"""The trajectory-wise preference loss against what is exactly true of it (specification, section 6, tests 1 to 8)."""

import math

import pytest
import torch

from vla_stack.errors import UserError
from vla_stack.methods.grape import loss as grape

B, T, LOG2 = 3, 5, math.log(2)
AGGREGATES = ("sum", "mean", "truncate_min", "window")
each_aggregate = pytest.mark.parametrize("aggregate", AGGREGATES)


@pytest.fixture
def mask():
    lengths = torch.tensor([[5, 3], [2, 4], [1, 5]])
    return torch.arange(T) < lengths[..., None]


@pytest.fixture
def ratio():
    return torch.randn(B, 2, T, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def tpo(ratio, mask, beta=0.7, aggregate="sum"):
    return grape.tpo(ratio, mask, beta, aggregate, window=2)


@each_aggregate
@pytest.mark.parametrize("beta", [0.0, 0.3, 50.0])
def test_log_two_at_the_reference(mask, aggregate, beta):
    terms = tpo(torch.zeros(B, 2, T), mask, beta, aggregate)
    assert terms["tpo"].item() == pytest.approx(LOG2)
    assert (terms["tpo"] + terms["proximal"]).item() == pytest.approx(3 * LOG2)


def test_gradient_at_the_reference_is_half_beta_a_pair(mask):
    ratio = torch.zeros(B, 2, T, requires_grad=True)
    tpo(ratio, mask)["tpo"].backward()
    sign = torch.tensor([-1.0, 1.0])[:, None]
    torch.testing.assert_close(ratio.grad, sign * 0.7 / (2 * B) * mask)


def test_gradient_is_that_of_the_formula(ratio, mask):
    ratio.requires_grad_()
    terms = tpo(ratio, mask)
    terms["tpo"].backward()
    z = terms["margin"].detach()[:, :, None]
    expected = torch.tensor([-1.0, 1.0])[:, None] * 0.7 / B * torch.sigmoid(-z) * mask
    torch.testing.assert_close(ratio.grad, expected)


@pytest.mark.parametrize("aggregate", ["sum", "mean", "truncate_min"])
def test_swapping_the_sides_adds_the_margin(ratio, mask, aggregate):
    there, back = tpo(ratio, mask, aggregate=aggregate), tpo(ratio.flip(1), mask.flip(1), aggregate=aggregate)
    torch.testing.assert_close(there["tpo"] - back["tpo"], -there["margin"].mean())
    torch.testing.assert_close(there["proximal"], back["proximal"])


def test_a_constant_on_both_sides_changes_nothing_and_on_one_side_it_does(ratio):
    mask = torch.ones(B, 2, T, dtype=torch.bool)
    loss = tpo(ratio, mask)["tpo"]
    torch.testing.assert_close(tpo(ratio + 3.0, mask)["tpo"], loss)  # equal lengths: to both sides' S
    one = ratio.clone()
    one[:, 0] += 3.0
    assert tpo(one, mask)["tpo"] < loss - 1e-3


@each_aggregate
def test_padding_and_the_order_of_pairs_change_nothing(ratio, mask, aggregate):
    loss = tpo(ratio, mask, aggregate=aggregate)["tpo"]
    nan = torch.full((B, 2, 4), math.nan, dtype=ratio.dtype)
    longer = torch.cat((torch.where(mask, ratio, math.nan), nan), 2).requires_grad_()
    padded = tpo(longer, torch.cat((mask, torch.zeros(B, 2, 4, dtype=torch.bool)), 2), aggregate=aggregate)["tpo"]
    torch.testing.assert_close(padded, loss)
    padded.backward()
    assert longer.grad.isfinite().all() and (longer.grad[..., T:] == 0).all()
    order = torch.tensor([2, 0, 1])
    torch.testing.assert_close(tpo(ratio[order], mask[order], aggregate=aggregate)["tpo"], loss)


@pytest.mark.parametrize("aggregate", ["sum", "mean"])
def test_the_order_of_decisions_changes_nothing(ratio, mask, aggregate):
    order = torch.tensor([3, 1, 4, 0, 2])
    loss = tpo(ratio, mask, aggregate=aggregate)["tpo"]
    torch.testing.assert_close(tpo(ratio[..., order], mask[..., order], aggregate=aggregate)["tpo"], loss)


def test_one_decision_is_ordinary_dpo(ratio):
    one, there = ratio[..., :1], torch.ones(B, 2, 1, dtype=torch.bool)
    dpo = -torch.nn.functional.logsigmoid(0.7 * (one[:, 0, 0] - one[:, 1, 0])).mean()
    for aggregate in AGGREGATES:
        torch.testing.assert_close(tpo(one, there, aggregate=aggregate)["tpo"], dpo)


def test_aggregates_are_what_they_say(ratio, mask):
    def margin(aggregate):
        return (tpo(ratio, mask, 1.0, aggregate)["margin"]).flatten()

    a, b = (torch.where(mask, ratio, 0.0)[:, side] for side in (0, 1))
    torch.testing.assert_close(margin("sum"), a.sum(1) - b.sum(1))
    torch.testing.assert_close(margin("mean"), a.sum(1) / mask[:, 0].sum(1) - b.sum(1) / mask[:, 1].sum(1))
    cut = [a[i, :n].sum() - b[i, :n].sum() for i, n in enumerate((3, 2, 1))]
    torch.testing.assert_close(margin("truncate_min"), torch.stack(cut))
    terms = tpo(ratio, mask, 1.0, "window")
    assert terms["counted"].sum(1).tolist() == [2, 1, 1]
    torch.testing.assert_close(terms["margin"][0, 1], (a[0, 1:3] - b[0, 1:3]).sum())
    step_wise = grape.tpo(ratio, mask, 1.0, "window", window=1)
    pairs = torch.cat([torch.nn.functional.softplus(b[i, :n] - a[i, :n]) for i, n in enumerate((3, 2, 1))])
    torch.testing.assert_close(step_wise["tpo"], pairs.mean())


def test_beta_zero_teaches_nothing(ratio, mask):
    ratio.requires_grad_()
    terms = tpo(ratio, mask, beta=0.0)
    assert terms["tpo"].item() == pytest.approx(LOG2)
    terms["tpo"].backward()
    assert (ratio.grad == 0).all()


def test_beta_is_calibrated_to_the_gap():
    assert grape.calibrated_beta(0.003) * 0.003 == pytest.approx(grape.TARGET_MARGIN)
    with pytest.raises(UserError, match="changed nothing"):
        grape.calibrated_beta(0.0)


def test_data_without_pairs_is_refused():
    with pytest.raises(UserError, match="preference pairs"):
        grape.loss(None, {}, torch.Generator())

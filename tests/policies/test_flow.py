"""Identities of the flow convention: t = 1 noise, t = 0 data."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from vla_stack.policies import flow


@pytest.fixture
def pair() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 4, 3, generator=generator), torch.randn(2, 4, 3, generator=generator)


def test_path_starts_at_data_and_ends_at_noise(pair):
    actions, noise = pair
    assert torch.equal(flow.interpolate(actions, noise, torch.zeros(2)), actions)
    assert torch.equal(flow.interpolate(actions, noise, torch.ones(2)), noise)


def test_target_is_the_derivative_of_the_path(pair):
    actions, noise = (x.double().requires_grad_() for x in pair)
    t = torch.tensor([0.3, 0.8], dtype=torch.float64)
    _, derivative = torch.func.jvp(lambda s: flow.interpolate(actions, noise, s), (t,), (torch.ones_like(t),))
    torch.testing.assert_close(derivative, flow.target(actions, noise))


def test_time_per_token_equals_time_per_sample_when_equal(pair):
    t = torch.tensor([0.3, 0.8])
    assert torch.equal(flow.interpolate(*pair, t), flow.interpolate(*pair, t[:, None].expand(2, 4)))


def test_training_times_follow_the_beta_distribution():
    t = flow.sample_time(20_000, torch.Generator().manual_seed(0), "cpu").numpy()
    assert t.min() >= flow.T_MIN and t.max() <= 1.0
    assert stats.kstest((t - flow.T_MIN) / (1 - flow.T_MIN), stats.beta(1.5, 1.0).cdf).pvalue > 0.01


@pytest.mark.parametrize("steps", [1, 3, 10])
def test_euler_is_exact_for_a_constant_velocity(pair, steps):
    actions, noise = (x.double() for x in pair)
    end = flow.euler(lambda x, t: flow.target(actions, noise), noise, steps)
    torch.testing.assert_close(end, actions, rtol=0, atol=1e-14)


def test_euler_visits_falling_times(pair):
    seen = []

    def velocity(x, t):
        seen.append(t[0].item())
        return torch.zeros_like(x)

    flow.euler(velocity, pair[1], 4)
    np.testing.assert_allclose(seen, [1.0, 0.75, 0.5, 0.25])


def test_prefix_is_kept_bit_for_bit_and_marked_by_time(pair):
    actions, noise = pair
    mask = torch.tensor([[True, True, False, False], [False, False, False, False]])
    prefix = flow.ActionPrefix(actions * 0.123, mask)
    seen = []

    def velocity(x, t):
        seen.append(t)
        assert torch.equal(x[mask], prefix.actions[mask])
        return x * 1.7 + 0.3

    end = flow.euler(velocity, noise, 5, prefix)
    assert torch.equal(end[mask], prefix.actions[mask])
    assert not torch.equal(end[~mask], noise[~mask])
    assert all((t[mask] == 0).all() and (t[~mask] > 0).all() for t in seen)


def test_noise_under_the_prefix_changes_nothing(pair):
    actions, noise = pair
    mask = torch.tensor([[True, False, False, False]] * 2)
    other = torch.where(mask[..., None], noise + 5.0, noise)
    ends = [
        flow.euler(lambda x, t: x.mean(1, keepdim=True) + x, e, 3, flow.ActionPrefix(actions, mask))
        for e in (noise, other)
    ]
    assert torch.equal(*ends)


def test_masked_mean_counts_real_steps_only():
    error = torch.tensor([[[1.0], [3.0]], [[5.0], [7.0]]])
    is_pad = torch.tensor([[False, True], [True, True]])
    assert flow.masked_mean(error, (~is_pad)[..., None].expand_as(error)).tolist() == [1.0, 0.0]


def test_expected_target_is_the_marginal_velocity():
    """Between two equal modes the regression target averages velocities at one x, not actions over all noise."""
    actions = torch.tensor([-1.0, 1.0]).repeat(20_000)[:, None, None]
    noise = flow.sample_noise((40_000, 1, 1), torch.Generator().manual_seed(0), "cpu")
    x = flow.interpolate(actions, noise, torch.full((40_000,), 0.5))
    near = (x - 0.6).abs() < 0.1
    # x ~ N(a / 2, 1 / 4), so E[a | x] = tanh(2 x); noise = 2 x - a and u = noise - a = 2 (x - a).
    expected = 2 * (0.6 - math.tanh(2 * 0.6))
    assert flow.target(actions, noise)[near].mean().item() == pytest.approx(expected, abs=0.06)

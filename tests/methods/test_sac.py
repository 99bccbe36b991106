"""Soft actor-critic: its targets, what each step moves and in which direction, and which rows each step sees."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from rl_toys import SMALL, stored

from vla_stack.methods.sac import Sac
from vla_stack.policies.critics import Ensemble
from vla_stack.policies.gaussian import GaussianActor

AFFINE = replace(SMALL, actor=(), critic=(), subset=3)  # without hidden layers every number follows by hand


def affine(ensemble: Ensemble, slopes, offsets) -> None:
    """Make every member slope . x + offset."""
    for parameter, values in ((ensemble.weights[0], slopes), (ensemble.biases[0], offsets)):
        parameter.data.copy_(torch.as_tensor(values).view_as(parameter))


# Targets -------------------------------------------------------------------------------------------------------------


def test_density_of_a_squashed_gaussian_integrates_to_one():
    actor = GaussianActor(1, 1, (4,), generator=torch.Generator().manual_seed(0)).double()
    mean, log_std = actor(torch.zeros(1, 1, dtype=torch.float64))
    u = torch.linspace(-12, 12, 100_001, dtype=torch.float64)[:, None]
    noise = (u - mean) / log_std.exp()
    from vla_stack.policies.gaussian import log_density

    density, a = log_density(u, noise, log_std).exp(), torch.tanh(u)[:, 0]
    assert torch.trapezoid(density, a).item() == pytest.approx(1.0, abs=1e-4)


def test_target_is_the_discounted_minimum_and_stops_at_an_end():
    agent, store = Sac(SMALL, 2, 1), stored()
    batch = store.view(np.arange(40), 1)
    state = agent.generator.get_state()
    y = agent.sac_target(batch)
    agent.generator.set_state(state)
    actions, _ = agent.actor.sample(batch.next_obs, agent.generator)
    subset = agent.draw()
    assert len(subset) == 2
    q = agent.target(torch.cat([batch.next_obs, actions], -1))[subset].amin(0)
    torch.testing.assert_close(y, batch.reward + batch.discount * q)
    over = torch.from_numpy(store.columns["terminated"][:40])
    assert over.any() and torch.equal(y[over], batch.reward[over])


def test_the_actor_does_not_move_the_critics_nor_they_the_actor():
    agent, batch = Sac(SMALL, 2, 1), stored().view(np.arange(16), 1)
    before = copy.deepcopy(agent.state_dict())
    agent.actor_step(batch.obs)
    after = agent.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in after if k.startswith(("critic", "target")))
    assert any(not torch.equal(before[k], after[k]) for k in after if k.startswith("actor"))
    before = copy.deepcopy(after)
    agent.critic_step(batch, agent.sac_target(batch))
    after = agent.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in after if k.startswith("actor"))
    assert all(p.grad is None or not p.grad.any() for p in agent.target.parameters())


@pytest.mark.parametrize("entropy", [False, True])
def test_targets_are_of_the_averaged_critics_and_may_pay_for_entropy(entropy):
    agent, batch = Sac(replace(AFFINE, entropy_backup=entropy, temperature=0.5), 2, 1), stored().view(np.arange(40), 1)
    affine(agent.critic, torch.zeros(3, 3), (-1.0, -2.0, -3.0))
    affine(agent.target, torch.zeros(3, 3), (7.0, 5.0, 9.0))
    assert (agent.target_value(batch.obs, batch.actions) == 5.0).all()
    state = agent.generator.get_state()
    y = agent.sac_target(batch)
    agent.generator.set_state(state)
    _, log_p = agent.actor.sample(batch.next_obs, agent.generator)
    torch.testing.assert_close(y, batch.reward + batch.discount * (5.0 - 0.5 * log_p if entropy else 5.0))


def test_averaged_critics_follow_by_tau_after_each_critic_step():
    agent, batch = Sac(replace(SMALL, tau=0.25), 2, 1), stored().view(np.arange(8), 1)
    for p in agent.target.parameters():
        p.data.add_(1.0)
    expected = [p.clone() for p in agent.target.parameters()]
    for _ in range(2):
        agent.critic_step(batch, torch.zeros(8))
        expected = [0.75 * old + 0.25 * p.detach() for old, p in zip(expected, agent.critic.parameters(), strict=True)]
    torch.testing.assert_close([*agent.target.parameters()], expected)


# Directions ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("log_std", "direction"), [(-5.0, 1.0), (0.0, -1.0)])
def test_too_little_entropy_raises_the_temperature_and_too_much_lowers_it(log_std, direction):
    agent = Sac(AFFINE, 2, 1)
    affine(agent.actor.net, torch.zeros(2, 2), (0.0, log_std))
    entropy = agent.actor_step(torch.zeros(64, 2))["entropy"].item()
    assert (entropy < agent.target_entropy) == (direction > 0)
    assert agent.log_temperature.item() == pytest.approx(direction * AFFINE.lr_temperature, rel=1e-3)  # Adam's first


@pytest.mark.parametrize(("actor_q", "slope"), [("min", 3.0), ("mean", -2.0)])
def test_the_actor_climbs_the_minimum_or_the_mean_of_its_critics(actor_q, slope):
    agent = Sac(replace(AFFINE, actor_q=actor_q, temperature=1e-9), 2, 1)
    affine(agent.critic, [[0.0, 0.0, s] for s in (0.0, 3.0, -9.0)], (50.0, 0.0, 100.0))  # 3 a is below, -9 a above
    affine(agent.actor.net, torch.zeros(2, 2), (0.0, -20.0))  # a = tanh(mu) at mu = 0, where its slope is 1
    agent.actor_step(torch.zeros(4, 2))
    assert agent.actor.net.biases[0].grad[0, 0, 0].item() == pytest.approx(-slope, rel=1e-5)


# Rows ----------------------------------------------------------------------------------------------------------------


def test_critic_steps_take_the_slices_of_a_batch_in_turn(monkeypatch):
    agent, batch, seen = Sac(SMALL, 2, 1), stored().view(np.arange(12), 1), []
    monkeypatch.setattr(agent, "critic_step", lambda part, y, term: seen.append((part, y)) or {})
    agent.update(batch, 3, target=lambda _, part: 2.0 * part.reward)
    assert len(seen) == 3
    for (part, y), rows in zip(seen, (slice(0, 4), slice(4, 8), slice(8, 12)), strict=True):
        assert all(torch.equal(x, whole[rows]) for x, whole in zip(part, batch, strict=True))
        assert torch.equal(y, 2.0 * part.reward)


@pytest.mark.parametrize(("actor_rows", "rows"), [("all", slice(None)), ("last", slice(8, None))])
def test_the_actor_sees_all_rows_of_its_critic_steps_or_the_last_slice(actor_rows, rows, monkeypatch):
    agent, batch = Sac(replace(SMALL, actor_rows=actor_rows), 2, 1), stored().view(np.arange(12), 1)
    seen = []
    monkeypatch.setattr(agent, "actor_step", lambda obs: seen.append(obs) or {})
    agent.update(batch, 3)
    assert len(seen) == 1 and torch.equal(seen[0], batch.obs[rows])

"""Soft actor-critic, Cal-QL's bound, and WSRL's three phases."""

import copy
import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from rl_toys import GAMMA, SMALL, Line, stored

from vla_stack.methods import cal_ql
from vla_stack.methods.cal_ql import CalQlRecipe, calibrated, difference, max_backup
from vla_stack.methods.sac import Sac
from vla_stack.methods.wsrl import ARMS, Phase, Wsrl, WsrlRecipe
from vla_stack.policies.gaussian import GaussianActor
from vla_stack.training.actor import Actor
from vla_stack.training.rollouts import Source, Store

K = 12
RECIPE = WsrlRecipe("wsrl", SMALL, CalQlRecipe(draws=3), offline_steps=3, warmup=K)


def learner(arm="wsrl", horizon=1, pretrained=True, seed=0):
    made = Wsrl(replace(RECIPE, arm=arm), stored(), Store(200, 2, 1, 1, GAMMA, -1 / (1 - GAMMA)), horizon, seed)
    while pretrained and made.phase is Phase.OFFLINE:
        made.pretrain()
    return made


def run(made, steps):
    seeds = iter(range(5000, 6000))
    actor = Actor([Line()], lambda: next(seeds))
    for _ in range(steps):
        made.store.add(actor.step(partial(made.policy, source=made.source), made.source))
        made.update()


def parameters(made):
    return torch.cat([p.detach().flatten() for p in made.agent.parameters()])


# Soft actor-critic ---------------------------------------------------------------------------------------------------


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
    members = agent.draw()
    assert len(members) == 2
    q = agent.target(torch.cat([batch.next_obs, actions], -1))[members].amin(0)
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


# Cal-QL --------------------------------------------------------------------------------------------------------------


def test_bound_lifts_values_to_the_return_and_gates_their_gradient():
    q = torch.tensor([[[-3.0, 2.0]], [[0.5, -1.0]]], requires_grad=True)  # [E=2, n=1, b=2]
    g = torch.tensor([0.0, 1.0])
    bounded = calibrated(q, g)
    assert (bounded >= g).all()
    bounded.sum().backward()
    assert torch.equal(q.grad, (q > g).float())
    free = torch.full((2,), -math.inf)
    assert torch.equal(calibrated(q, free), q)


def test_only_the_policys_actions_are_calibrated(monkeypatch):
    agent, batch = Sac(SMALL, 2, 1), stored().view(np.arange(8), 1)
    seen = []
    monkeypatch.setattr(cal_ql, "difference", lambda v, d, p: seen.append((v, d, p)) or v.mean())
    high = batch._replace(returns=torch.full((8,), 100.0))
    cal_ql.term(agent, high, torch.zeros(3, 8), None, CalQlRecipe(draws=4))
    values, _, log_p = seen[0]
    assert values.shape == (3, 12, 8) and (values[:, 4:] == 100.0).all() and (values[:, :4] < 100.0).all()
    torch.testing.assert_close(log_p[:4], torch.full((4, 8), math.log(0.5)))


def test_without_a_bound_it_is_cql():
    agent, batch = Sac(SMALL, 2, 1), stored().view(np.arange(8), 1)
    q = agent.critic(torch.cat([batch.obs, batch.actions], -1))
    state, terms = agent.generator.get_state(), []
    low = batch._replace(returns=torch.full((8,), -math.inf))
    for b, calibrate in ((batch, False), (low, True)):
        agent.generator.set_state(state)
        terms.append(cal_ql.term(agent, b, q, None, CalQlRecipe(draws=3, calibrate=calibrate)))
    assert torch.equal(*terms)


def test_constant_values_have_no_difference_without_importance_weights():
    values = torch.full((2, 6, 5), -7.25, dtype=torch.float64)
    torch.testing.assert_close(difference(values, values[:, 0], None), torch.zeros(2, 5).double(), rtol=0, atol=1e-12)


def test_gradient_of_a_tabular_difference_sums_to_zero():
    table = torch.randn(1, 6, 1, dtype=torch.float64, requires_grad=True, generator=torch.Generator().manual_seed(0))
    uniform = torch.zeros(6, 1, dtype=torch.float64)
    difference(table, table[:, 2], uniform).sum().backward()
    assert table.grad.sum().abs() < 1e-12 and table.grad[0, 2] < 0


def test_max_backup_is_at_least_each_draws_backup():
    agent, batch = Sac(replace(SMALL, subset=3), 2, 1), stored().view(np.arange(30), 1)
    state = agent.generator.get_state()
    y = max_backup(agent, batch, 5)
    agent.generator.set_state(state)
    draws, _ = agent.actor.sample(batch.next_obs, agent.generator, 5)
    single = torch.stack([agent.target_value(batch.next_obs, a) for a in draws])
    torch.testing.assert_close(y, batch.reward + batch.discount * single.amax(0))
    assert (y + 1e-6 >= batch.reward + batch.discount * single[0]).all()


# WSRL ----------------------------------------------------------------------------------------------------------------


def test_phases():
    made = learner(pretrained=False)
    for _ in range(RECIPE.offline_steps):
        assert made.phase is Phase.OFFLINE
        made.pretrain()
    run(made, K - 1)
    assert made.phase is Phase.WARMUP
    run(made, 1)
    assert made.phase is Phase.ONLINE and made.store.total == K


def test_warm_up_fills_an_empty_buffer_with_the_frozen_policy_and_changes_nothing():
    made = learner()
    assert len(made.store) == 0
    before, optimizer = parameters(made), copy.deepcopy(made.agent.critic_optimizer.state_dict())
    state = made.agent.explorer.get_state()
    run(made, K - 1)
    assert torch.equal(parameters(made), before)
    assert made.agent.critic_optimizer.state_dict()["state"][0]["step"] == optimizer["state"][0]["step"]
    assert len(made.store) == K - 1 and (made.store.columns["source"][: K - 1] == Source.WARMUP).all()
    made.agent.explorer.set_state(state)  # every action is the stochastic policy's own draw
    for obs, action in zip(made.store.columns["obs"][: K - 1], made.store.columns["action"][: K - 1], strict=True):
        assert torch.equal(made.agent.act(torch.from_numpy(obs[None]))[0], torch.from_numpy(action))
    run(made, 1)  # the K-th step is still the frozen policy's, and then the updates begin
    assert made.store.columns["source"][K - 1] == Source.WARMUP
    assert not torch.equal(parameters(made), before)
    step = made.agent.critic_optimizer.state_dict()["state"][0]["step"]
    assert step == optimizer["state"][0]["step"] + SMALL.utd  # Adam goes on, it does not start again


def test_no_stored_episode_is_seen_after_the_switch(monkeypatch):
    made = learner()
    monkeypatch.setattr(made.offline, "sample", lambda *a, **k: pytest.fail("offline data was drawn"))
    run(made, K + 10)
    assert made.store.total == K + 10


@pytest.mark.parametrize("arm", [a for a in ARMS if ARMS[a].retain])
def test_baselines_with_retained_data_draw_half_of_each_batch_from_it(arm, monkeypatch):
    made, seen = learner(arm), []
    run(made, K + 10)
    monkeypatch.setattr(made.agent, "update", lambda batch, steps=1, *a: seen.append(batch) or {})
    run(made, 1)
    old = {tuple(row) for row in made.offline.columns["obs"][: made.offline.total].tolist()}
    from_old = [tuple(row) in old for row in seen[0].obs.tolist()]
    assert from_old == [False, True] * (SMALL.batch * SMALL.utd // 2)


def test_arms_start_and_warm_up_as_they_say():
    for name, arm in ARMS.items():
        made = learner(name)
        assert made.pretrained == (RECIPE.offline_steps if arm.pretrain else 0)
        fresh = Sac(SMALL, 2, 1, 0)
        assert torch.equal(parameters(made), torch.cat([p.detach().flatten() for p in fresh.parameters()])) == (
            not arm.pretrain
        )
        run(made, K - 1)
        moved = arm.warmup == "none"
        assert (made.source is Source.ONLINE) == moved and (len(made.agent.actor_optimizer.state) > 0) == (
            moved or arm.pretrain
        )


def test_chunks_are_planned_and_learnt_as_one_action():
    made = learner(horizon=3)
    assert made.agent.width == 3
    run(made, K + 9)
    index = made.store.columns["chunk_index"][: made.store.total]
    starts = np.flatnonzero(index == 0)
    over = (made.store.columns["terminated"] | made.store.columns["truncated"])[: made.store.total]
    assert all(i + 3 == j or over[i:j].any() for i, j in zip(starts, starts[1:], strict=False))

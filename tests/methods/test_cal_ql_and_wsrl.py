"""Cal-QL's bound, and WSRL's three phases."""

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from rl_toys import GAMMA, SEEN, SMALL, run, stored

from vla_stack.methods import cal_ql
from vla_stack.methods.cal_ql import CalQlRecipe, calibrated, difference, max_backup
from vla_stack.methods.off_policy.collecting import Acting
from vla_stack.methods.replay_buffer import Batch, ReplayBuffer, Source
from vla_stack.methods.sac import Sac
from vla_stack.methods.wsrl import ARMS, Phase, Wsrl, WsrlLearner
from vla_stack.schema import Observation

K = 12
METHOD = Wsrl(sac=SMALL, cal_ql=CalQlRecipe(draws=3), offline_steps=3, warmup=K)


def learner(arm="wsrl", horizon=1, pretrained=True, seed=0):
    online = ReplayBuffer(200, 2, 1, 1, GAMMA, -1 / (1 - GAMMA))
    made = WsrlLearner(replace(METHOD, arm=arm, horizon=horizon), stored(), online, seed)
    while pretrained and made.phase is Phase.OFFLINE:
        made.pretrain()
    return made


def parameters(made):
    return torch.cat([p.detach().flatten() for p in made.agent.parameters()])


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


def test_a_sampled_action_has_the_density_of_where_it_was_drawn_and_the_value_of_the_datas_observation(monkeypatch):
    agent = Sac(replace(SMALL, actor=(), critic=()), 1, 1)  # affine: u ~ N(o, exp(-o)), and Q = a + 10 o
    agent.actor.net.weights[0].data[:] = torch.tensor([1.0, -1.0])
    agent.actor.net.biases[0].data.zero_()
    agent.critic.weights[0].data[:] = torch.tensor([[10.0], [1.0]])
    agent.critic.biases[0].data.zero_()
    seen, n, rows = [], 50, torch.zeros(4)
    monkeypatch.setattr(cal_ql, "difference", lambda v, d, p: seen.append((v, p)) or v.mean())
    batch = Batch(rows[:, None], rows[:, None], rows, rows[:, None] + 1.0, rows, rows, rows.long())  # o = 0, o' = 1
    cal_ql.term(agent, batch, torch.zeros(3, 4), None, CalQlRecipe(draws=n, calibrate=False))
    values, log_p = seen[0]
    for group, mean, std in ((slice(n, 2 * n), 0.0, 1.0), (slice(2 * n, None), 1.0, math.exp(-1.0))):
        a = values[0, group].detach().double()  # at o = 0 a value is the action itself
        gaussian = torch.distributions.Normal(torch.tensor(mean).double(), std)
        torch.testing.assert_close(
            log_p[group].double(), gaussian.log_prob(torch.atanh(a)) - torch.log1p(-a.square()), rtol=0, atol=2e-3
        )
        assert torch.atanh(a).mean().item() == pytest.approx(mean, abs=0.3)


# WSRL ----------------------------------------------------------------------------------------------------------------


def test_phases():
    made = learner(pretrained=False)
    for _ in range(METHOD.offline_steps):
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
    asked = run(made, K - 1)
    assert torch.equal(parameters(made), before)
    assert made.agent.critic_optimizer.state_dict()["state"][0]["step"] == optimizer["state"][0]["step"]
    assert len(made.store) == K - 1 and (made.store.columns["source"][: K - 1] == Source.WARMUP).all()
    executed = made.store.columns["action"][: K - 1]
    for (obs, seed, _), action in zip(asked, executed, strict=True):  # every action is the stochastic policy's own draw
        mean, log_std = made.agent.actor(torch.from_numpy(obs[None]))
        noise = torch.randn(1, 1, generator=torch.Generator().manual_seed(seed))
        drawn = torch.tanh(mean + log_std.exp() * noise)[0]
        torch.testing.assert_close(drawn.detach(), torch.from_numpy(action), atol=1e-6, rtol=0)
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


def test_every_return_that_bounds_a_value_is_known(monkeypatch):
    made, seen = learner("cal_ql", pretrained=False), []
    monkeypatch.setattr(cal_ql, "update", lambda agent, batch, *_: seen.append(batch.returns) or {})
    for _ in range(20):  # an episode that goes on
        made.offline.add(made.offline.at(0)._replace(terminated=np.array([False]), truncated=np.array([False])))
    for _ in range(20):
        made.pretrain()
    offline = len(seen)
    run(made, 1)
    assert len(seen) == offline  # the only episode is open: nothing is known yet
    run(made, 20)
    for _ in range(20):
        made.update()
    assert len(seen) >= offline + 20
    assert all(np.isnan(store.columns["returns"][: store.total]).any() for store in (made.store, made.offline))
    assert all(torch.isfinite(returns).all() for returns in seen)


def test_only_cal_ql_is_conservative_online():
    for name in ARMS:
        made = learner(name)
        run(made, K + 8)
        metrics = made.update()
        assert "td" in metrics and ("term" in metrics) == (name == "cal_ql")


@pytest.mark.parametrize(("arm", "uniform"), [("wsrl", False), ("random_warmup", True), ("rlpd", True), ("sac", True)])
def test_a_random_warm_up_is_uniform_and_any_other_is_the_policys(arm, uniform):
    made = learner(arm)
    made.agent.actor.net.biases[-1].data[..., 0] = 50.0  # the policy goes right, always
    acting, seen = Acting(made, SEEN), [Observation(np.zeros(2, np.float32), {}, "")] * 1000
    acting.source = made.source
    warm = acting.infer(seen, range(1000)).actions
    acting.source = Source.ONLINE
    assert made.source is Source.WARMUP and (acting.infer(seen, range(1000)).actions == 1.0).all()
    if uniform:  # its moments, within five standard errors
        assert abs(warm.mean()) < 0.1 and abs(warm.var() - 1 / 3) < 0.05 and np.abs(warm).max() <= 1.0
    else:
        assert (warm == 1.0).all()


def test_arms_start_and_warm_up_as_they_say():
    for name, arm in ARMS.items():
        made = learner(name)
        assert made.pretrained == (METHOD.offline_steps if arm.pretrain else 0)
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


def test_the_deployed_policy_has_the_learners_bounds_and_constants():
    online = ReplayBuffer(200, 2, 1, 1, GAMMA, -1 / (1 - GAMMA))
    sac = replace(SMALL, log_std=(-0.125, 0.0625), norm_eps=1e-3)
    policy = WsrlLearner(replace(METHOD, sac=sac, horizon=1), stored(), online, 0).network(SEEN)
    again = type(policy)(policy.config)  # as a loader makes it
    again.load_state_dict(policy.state_dict())
    obs = 100.0 * torch.randn(50, 2, generator=torch.Generator().manual_seed(0))
    assert all(torch.equal(a, b) for a, b in zip(policy.actor(obs), again.actor(obs), strict=True))
    assert again.actor(obs)[1].aminmax() == (-0.125, 0.0625) and again.actor.net.norm_eps == 1e-3

"""WSRL that begins with an imitating actor: one step by hand, and what stands still meanwhile."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from rl_toys import GAMMA, SMALL, run, stored

from vla_stack.methods.off_policy import learner as learners
from vla_stack.methods.replay_buffer import ReplayBuffer, Source
from vla_stack.methods.wsrl import Phase, Wsrl, WsrlLearner
from vla_stack.policies.gaussian import LARGEST

METHOD = Wsrl(arm="bc", sac=replace(SMALL, lr_actor=1e-2), offline_steps=3, warmup=6)


def learner(horizon=1, **settings):
    online = ReplayBuffer(200, 2, 1, 1, GAMMA, -1 / (1 - GAMMA))
    return WsrlLearner(replace(METHOD, horizon=horizon, **settings), stored(), online, seed=0)


def copied(modules):
    return [p.detach().clone() for module in modules for p in module.parameters()]


@pytest.mark.parametrize("horizon", [1, 2])
def test_a_step_is_that_of_the_likelihood_by_hand(horizon):
    made = learner(horizon)
    agent, batch = made.agent, made.offline.view(np.arange(5), horizon)
    batch.actions[0, 0] = 1.0  # of infinite likelihood, were it not held off the end
    before = copied([agent.actor])
    mean, log_std = agent.actor(batch.obs)
    u = np.arctanh(np.clip(batch.actions.double().numpy(), -LARGEST, LARGEST))
    m, s = mean.detach().double().numpy(), log_std.detach().double().numpy()
    z = (u - m) / np.exp(s)
    nll = 0.5 * z**2 + s + 0.5 * math.log(2 * math.pi) + np.log(1 - np.tanh(u) ** 2)
    by_mean, by_log_std = -z / np.exp(s) / 5, (1 - z**2) / 5  # of the mean over five rows
    outer = [torch.from_numpy(x).float() for x in (by_mean, by_log_std)]
    wanted = torch.autograd.grad([mean, log_std], [*agent.actor.parameters()], outer)
    told = made.imitate(batch)
    assert told["nll"].item() == pytest.approx(nll.sum(1).mean(), rel=1e-5)
    for p, old, g in zip(agent.actor.parameters(), before, wanted, strict=True):
        torch.testing.assert_close(p.grad, g, rtol=1e-4, atol=1e-6)
        adam = old - 1e-2 * p.grad / (p.grad.abs() + 1e-8)  # its first step
        torch.testing.assert_close(p.detach(), adam, rtol=1e-5, atol=1e-6)


def test_critics_and_temperature_stand_still_while_the_actor_imitates():
    made = learner()
    agent = made.agent
    still, actor = [agent.critic, agent.target], copied([agent.actor])
    before, temperature = copied(still), agent.log_temperature.item()
    while made.phase is Phase.OFFLINE:
        made.pretrain()
    assert made.pretrained == 3 and all(map(torch.equal, copied(still), before))
    assert agent.log_temperature.item() == temperature and not agent.critic_optimizer.state
    assert not all(map(torch.equal, copied([agent.actor]), actor))


def test_it_finds_what_was_done():
    made = learner(offline_steps=400)
    made.offline.columns["action"][:] = np.where(made.offline.columns["obs"][:, :1] > 0, 0.5, -0.5)
    told = [made.pretrain()["nll"].item() for _ in range(400)]
    obs = torch.from_numpy(made.offline.columns["obs"][made.offline.rows()])
    wanted = made.offline.columns["action"][made.offline.rows()]
    close = np.abs(made.agent.act(obs, explore=False).numpy() - wanted) < 0.2
    assert np.mean(told[-50:]) < np.mean(told[:50]) - 1 and close.mean() > 0.8


def test_the_imitating_policy_warms_up_and_is_then_improved(tmp_path):
    made = learner()
    while made.phase is Phase.OFFLINE:
        made.pretrain()
    imitating = copied([made.agent.actor])
    assert made.source is Source.WARMUP
    run(made, 5)
    assert made.phase is Phase.WARMUP and all(map(torch.equal, copied([made.agent.actor]), imitating))
    learners.save(made, tmp_path)
    again = learner()
    learners.load(again, tmp_path)
    for each in (made, again):
        run(each, 9)
        assert each.phase is Phase.ONLINE
    assert not all(map(torch.equal, copied([made.agent.actor]), imitating))
    assert all(map(torch.equal, copied([made.agent]), copied([again.agent])))  # a resumed run goes on as it would have

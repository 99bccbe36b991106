"""EXPO: candidates, edits, the backup that equals the enumerated maximum, and what gradients reach."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from rl_toys import GAMMA, SMALL, Line, stored

from vla_stack.methods.expo import Expo, ExpoRecipe, best
from vla_stack.training.actor import Actor
from vla_stack.training.rollouts import Source, Store

SAC = replace(SMALL, subset=3, actor_q="mean", actor_rows="last", target_entropy=-0.5)  # all critics choose and judge
RECIPE = ExpoRecipe(SAC, (8,), euler_steps=2, base_steps=2, samples=3, edits=2, beta=0.2)


def learner(horizon=2, **changes):
    made = Expo(replace(RECIPE, **changes), stored(), Store(200, 2, 1, 1, GAMMA), horizon, 0)
    for p in made.agent.actor.parameters():  # edits that are worth the name
        p.data.mul_(3.0)
    return made


def batch(made, n=16):
    return made.offline.sample(n, made.horizon, made.rng)


def gradients(module):
    return [p.grad for p in module.parameters() if p.grad is not None and p.grad.any()]


def test_backup_equals_the_enumerated_maximum():
    made = learner()
    b = batch(made)
    state = made.agent.generator.get_state()
    y = made.target(b)
    made.agent.generator.set_state(state)
    offered = made.candidates(b.next_obs, made.base, made.agent.generator)
    assert offered.shape == (16, 5, 2)
    each = torch.stack([made.agent.target_value(b.next_obs, offered[:, j]) for j in range(5)], 1)
    torch.testing.assert_close(y, b.reward + b.discount * each.amax(1))
    assert (each.amax(1) >= each[:, : RECIPE.samples].amax(1)).all()


def test_one_sample_without_edits_is_the_base_policys_own_backup():
    made = learner(samples=1, edits=0)
    b = batch(made)
    state = made.agent.generator.get_state()
    y = made.target(b)
    made.agent.generator.set_state(state)
    actions = made.base.sample(b.next_obs, made.agent.generator).flatten(1)
    torch.testing.assert_close(y, b.reward + b.discount * made.agent.target_value(b.next_obs, actions))


def test_redrawn_critics_judge_what_others_chose():
    made = learner()
    made.agent.recipe = replace(SAC, subset=1)
    drawn = []
    draw = made.agent.draw
    made.agent.draw = lambda g=None: drawn.append(draw(g)) or drawn[-1]
    for _ in range(8):
        made.target(batch(made))
    pairs = list(zip(drawn[::2], drawn[1::2], strict=True))
    assert len(pairs) == 8 and any(not torch.equal(a, b) for a, b in pairs)


def test_without_reach_the_edit_is_the_base_action():
    made = learner(beta=0.0)
    offered = made.candidates(torch.randn(6, 2), made.base, made.agent.generator)
    torch.testing.assert_close(offered[:, 3:], offered[:, :2])


def test_an_edit_moves_by_at_most_beta_and_stays_legal():
    made = learner()
    offered = made.candidates(torch.randn(50, 2), made.base, made.agent.generator)
    moved = (offered[:, 3:] - offered[:, :2]).abs()
    assert 0.01 < moved.max() <= 0.2 + 1e-6 and offered.abs().max() <= 1.0


def test_density_of_an_edit_integrates_to_one():
    made = Expo(RECIPE, stored(), Store(200, 2, 1, 1, GAMMA), 1, 0)
    made.agent.actor.double()
    obs, actions = torch.zeros(1, 2).double(), torch.zeros(1, 1).double()
    mean, log_std = made.agent.actor(torch.cat([obs, actions], -1))
    u = torch.linspace(-12, 12, 100_001, dtype=torch.float64)[:, None]
    noise = (u - mean) / log_std.exp()

    def given(inputs, generator):  # the policy's draws, replaced by a grid
        from vla_stack.policies.gaussian import log_density

        return torch.tanh(u), log_density(u, noise, log_std)

    made.agent.actor.sample = given
    edited, log_p = made.edit(obs, actions, made.agent.generator)
    assert torch.trapezoid(log_p.detach().exp(), edited[:, 0].detach()) == pytest.approx(1.0, abs=1e-3)


def test_no_value_gradient_reaches_the_base():
    made = learner()
    b = batch(made)
    made.agent.critic_step(b, made.target(b))
    loss, _ = made.edit_loss(b)
    loss.backward()
    assert not gradients(made.base) and not gradients(made.average) and not gradients(made.agent.target)
    assert gradients(made.agent.actor)


def test_order_of_candidates_does_not_matter():
    made = learner()
    obs = torch.randn(9, 2)
    offered = made.candidates(obs, made.base, made.agent.generator).detach()
    order = torch.randperm(5, generator=torch.Generator().manual_seed(0))
    one, other = (best(o, made.values(obs, o, made.agent.generator)) for o in (offered, offered[:, order]))
    torch.testing.assert_close(one, other)


def test_acting_and_backup_choose_by_one_function(monkeypatch):
    made, calls = learner(), []
    choose = made.on_the_fly
    monkeypatch.setattr(made, "on_the_fly", lambda obs, base, g: calls.append(base) or choose(obs, base, g))
    made.policy(torch.zeros(1, 2).numpy(), Source.ONLINE)
    made.target(batch(made))
    assert calls == [made.average, made.base]


def test_baselines_are_settings():
    base_only = learner(learn=False)
    before = [p.clone() for p in base_only.base.parameters()]
    actor, seeds = Actor([Line()], iter(range(99)).__next__), None
    for made in (base_only, learner(edits=0), learner(samples=1, edits=1, unedited=False), learner()):
        actor, seeds = Actor([Line()], iter(range(99)).__next__), seeds
        for _ in range(8):
            made.store.add(actor.step(partial(made.policy, source=made.source)))
            metrics = made.update()
        assert ("td" in metrics) == made.recipe.learn
        assert ("entropy" in metrics) == bool(made.recipe.learn and made.recipe.edits)
    assert all(torch.equal(a, b) for a, b in zip(before, base_only.base.parameters(), strict=True))
    only = learner(samples=1, edits=1, unedited=False)
    assert only.candidates(torch.zeros(4, 2), only.base, only.agent.generator).shape == (4, 1, 2)


def test_imitation_moves_the_base_towards_the_demonstrations():
    made = learner(base_steps=60, lr_base=3e-2)
    made.offline.columns["action"][:] = 0.5
    losses = [made.pretrain()["base"].item() for _ in range(60)]
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])
    assert all(torch.equal(a, b) for a, b in zip(made.base.parameters(), made.average.parameters(), strict=True))

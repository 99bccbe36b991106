"""EXPO: candidates, edits, the backup that equals the enumerated maximum, and what gradients reach."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from rl_toys import GAMMA, SEEN, SMALL, run, stored

from vla_stack.methods import expo, sac
from vla_stack.methods.expo import Expo, ExpoLearner, best
from vla_stack.methods.replay_buffer import ReplayBuffer, Source, Transition, mix
from vla_stack.methods.sac import step

SAC = replace(SMALL, subset=3, actor_q="mean", actor_rows="last", target_entropy=-0.5)  # all critics choose and judge
AFFINE = replace(SAC, actor=(), critic=())  # without hidden layers every number follows by hand
METHOD = Expo(sac=SAC, base=(8,), euler_steps=2, base_steps=2, samples=3, edits=2, beta=0.2)


def learner(horizon=2, **changes):
    made = ExpoLearner(replace(METHOD, horizon=horizon, **changes), stored(), ReplayBuffer(200, 2, 1, 1, GAMMA), 0)
    for p in made.agent.actor.parameters():  # edits that are worth the name
        p.data.mul_(3.0)
    return made


def batch(made, n=16):
    return made.offline.sample(n, made.horizon, made.rng)


def reached(loss, module):
    """Whether the loss depends on the module's weights, be it with a gradient of zero."""
    parameters = [*module.parameters()]
    return any(g is not None for g in torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True))


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
    assert (each.amax(1) >= each[:, : METHOD.samples].amax(1)).all()


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
    made = ExpoLearner(replace(METHOD, horizon=1), stored(), ReplayBuffer(200, 2, 1, 1, GAMMA), 0)
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


def test_no_value_gradient_reaches_the_base(monkeypatch):
    made, known = learner(), []
    made.store, kept = stored(seed=1), (made.base, made.average)
    monkeypatch.setattr(made, "imitate", lambda part: {})  # which alone may move the base
    parts = {"critic": made.agent.critic, "edit": made.agent.actor, "base": made.base, "average": made.average}

    def spy(optimizer, loss, parameters):  # a step takes the gradient by some parameters; the loss may know more
        known.append({name for name, module in parts.items() if reached(loss, module)})
        step(optimizer, loss, parameters)

    for module in (sac, expo):
        monkeypatch.setattr(module, "step", spy)
    for p in made.average.parameters():
        p.data.add_(0.1)  # apart from the base, or a step from one to the other would not show
    before = [p.clone() for module in kept for p in module.parameters()]
    made.update()
    assert known == [{"critic"}] * SAC.utd + [{"critic", "edit"}]
    after = [p for module in kept for p in module.parameters()]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert not any(p.requires_grad for p in made.agent.target.parameters())


def test_edits_are_learnt_on_the_batchs_own_actions():
    made = learner(sac=AFFINE, beta=0.0)  # an edit is then the action itself
    for p in made.agent.critic.parameters():
        p.data.zero_()
    made.agent.critic.weights[0].data[:, 2:] = 2.0  # Q = 2 (a1 + a2)
    made.agent.log_temperature.data.fill_(-50.0)
    b = batch(made, 2)._replace(actions=torch.tensor([[0.5, 0.25], [-0.25, 0.125]]))
    assert made.edit_loss(b)[0].item() == pytest.approx(-0.625)  # (1.5 - 0.25) / 2


@pytest.mark.parametrize(("actor_q", "slope"), [("min", 3.0), ("mean", -2.0)])
def test_edits_climb_the_minimum_or_the_mean_of_the_critics(actor_q, slope):
    made = learner(horizon=1, sac=replace(AFFINE, actor_q=actor_q, temperature=1e-9), beta=0.5)
    for p in (*made.agent.critic.parameters(), *made.agent.actor.parameters()):
        p.data.zero_()
    made.agent.critic.weights[0].data[:, 2, 0] = torch.tensor([0.0, 3.0, -9.0])
    made.agent.critic.biases[0].data[:, 0, 0] = torch.tensor([50.0, 0.0, 100.0])  # 3 a is below, -9 a above
    made.agent.actor.net.biases[0].data[..., 1] = -20.0  # y = tanh(mu) at mu = 0, where its slope is 1
    b = batch(made)
    made.edit_step(b._replace(actions=torch.zeros(16, 1)))
    assert made.agent.actor.net.biases[0].grad[0, 0, 0].item() == pytest.approx(-0.5 * slope, rel=1e-5)


@pytest.mark.parametrize(("log_std", "direction"), [(-5.0, 1.0), (0.0, -1.0)])
def test_too_little_entropy_of_edits_raises_the_temperature_and_too_much_lowers_it(log_std, direction):
    made = learner(sac=AFFINE)
    for p in made.agent.actor.parameters():
        p.data.zero_()
    made.agent.actor.net.biases[0].data[..., 2:] = log_std
    entropy = made.edit_step(batch(made, 64))["entropy"].item()
    assert (entropy < -1.0) == (direction > 0)  # the target is -0.5 for each of two dimensions
    if direction < 0:  # in the edit's own range it is too much, though the edit's density is 2 log 0.2 more
        assert entropy + 2 * math.log(METHOD.beta) < -1.0
    assert made.agent.log_temperature.item() == pytest.approx(direction * AFFINE.lr_temperature, rel=1e-3)


def test_critic_steps_take_the_slices_in_turn_and_base_and_edit_the_last(monkeypatch):
    made, seen = learner(), {"critic": [], "base": [], "edit": []}
    made.store, made.rng = stored(seed=1), np.random.default_rng(7)
    monkeypatch.setattr(made, "target", lambda part: part.reward)
    monkeypatch.setattr(made.agent, "critic_step", lambda part, y: seen["critic"].append(part) or {})
    monkeypatch.setattr(made, "imitate", lambda part: seen["base"].append(part) or {})
    monkeypatch.setattr(made, "edit_step", lambda part: seen["edit"].append(part) or {})
    made.update()
    rng, rows = np.random.default_rng(7), SAC.batch * SAC.utd // 2
    whole = mix(*(store.sample(rows, made.horizon, rng) for store in (made.store, made.offline)))
    assert len(seen["critic"]) == SAC.utd == 2
    for column in ("obs", "actions", "reward", "next_obs", "discount"):
        given = [getattr(part, column) for part in seen["critic"]]
        assert torch.equal(torch.cat(given), getattr(whole, column))
        assert all(torch.equal(getattr(part, column), given[-1]) for (part,) in (seen["base"], seen["edit"]))


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
    made.target(batch(made))
    assert calls == [made.base]
    acting = made.network(SEEN, Source.ONLINE)
    assert acting.base.net is made.average and acting.critics is made.agent.target and acting.edit is made.agent.actor
    assert (acting.config.samples, acting.config.edits) == (made.method.samples, made.method.edits)
    warm = made.network(SEEN, Source.WARMUP).config
    assert (warm.samples, warm.edits) == (1, 0)  # the base alone


def test_baselines_are_settings():
    base_only = learner(learn=False)
    before = [p.clone() for p in base_only.base.parameters()]
    for made in (base_only, learner(edits=0), learner(samples=1, edits=1, unedited=False), learner()):
        run(made, 8)
        metrics = made.update()
        assert ("td" in metrics) == made.method.learn
        assert ("entropy" in metrics) == bool(made.method.learn and made.method.edits)
    assert all(torch.equal(a, b) for a, b in zip(before, base_only.base.parameters(), strict=True))
    only = learner(samples=1, edits=1, unedited=False)
    assert only.candidates(torch.zeros(4, 2), only.base, only.agent.generator).shape == (4, 1, 2)


def test_imitation_moves_the_base_towards_the_demonstrations():
    made = learner(base_steps=60, lr_base=3e-2)
    made.offline.columns["action"][:] = 0.5
    losses = [made.pretrain()["base"].item() for _ in range(60)]
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])
    assert all(torch.equal(a, b) for a, b in zip(made.base.parameters(), made.average.parameters(), strict=True))


@pytest.mark.parametrize("base_ema", [None, 0.25])
def test_the_acting_base_moves_towards_the_base_by_a_given_part(base_ema):
    made = learner(lr_base=0.1, **({} if base_ema is None else {"base_ema": base_ema}))
    before = [p.clone() for p in made.average.parameters()]
    made.imitate(batch(made))
    part = 0.01 if base_ema is None else base_ema
    for old, average, base in zip(before, made.average.parameters(), made.base.parameters(), strict=True):
        torch.testing.assert_close(average, torch.lerp(old, base, part))
        assert not torch.equal(average, old)


def test_the_base_imitates_what_succeeded_online_where_it_is_told_to(monkeypatch):
    made = learner(horizon=2, successes=True)
    made.store.tail = -1 / (1 - GAMMA)  # -1 a step for ever
    world = np.random.default_rng(3)
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(made, "imitate", lambda b: seen.append(b.actions) or {})
    for episode in range(6):  # every second one succeeds; what is done tells which
        for k in range(5):
            last = k == 4
            won = last and episode % 2 == 1
            mark = np.full((1, 1), 0.25 if episode % 2 else -0.25, np.float32)
            obs = world.normal(size=(1, 2)).astype(np.float32)
            t = Transition(
                obs, mark, np.array([float(won) - 1], np.float32), np.array([won]), np.array([last and not won]), obs,
                np.zeros(1, np.int32), np.zeros(1, np.int64), np.full(1, int(Source.ONLINE), np.int8),
            )  # fmt: skip
            made.store.add(t)
        made.update()
        done = {round(float(x), 2) for x in seen[-1].flatten() if abs(abs(float(x)) - 0.25) < 1e-6}
        assert done == ({0.25} if episode else set())  # demonstrations alone, until an episode has succeeded
    half = torch.isclose(seen[-1], torch.tensor(0.25)).all(1).sum()
    assert half == len(seen[-1]) // 2

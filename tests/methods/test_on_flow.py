"""Learners around a frozen flow policy: what is kept equals what is computed, sizes of edits, noise, discounts."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from small_vla import ACTIONS, STATES, make_observations, make_policy, make_stats
from tiny_vlas import make_processors, make_vla, tiny_pi

from vla_stack.methods.dsrl import Dsrl
from vla_stack.methods.dsrl_na import PAIRS, DsrlNa
from vla_stack.methods.episodes_loop import FINAL
from vla_stack.methods.expo_vla import ExpoVla
from vla_stack.methods.on_flow.decisions import Decisions, Drawn, episode, gathered, joined, mixed, row
from vla_stack.methods.on_flow.rollouts import Explorer
from vla_stack.methods.practice import chunks_of
from vla_stack.methods.rlpd_vla import RlpdVla
from vla_stack.methods.sac import SacRecipe
from vla_stack.policies.chunk_policy import ChunkPolicy, load_policy
from vla_stack.policies.processor_vla import make_vla_pre_post_processors
from vla_stack.rollout.records import EpisodeRecord
from vla_stack.schema import PolicySpec, RobotSpec

SAC = SacRecipe(actor=(8,), critic=(8,), num_critics=3, subset=3, batch=8, utd=2, layer_norm=True, entropy_backup=False)
STEPS, GAMMA = 3, 0.9
METHODS = {
    "expo": ExpoVla(sac=SAC, samples=3, edits=2, beta=0.2),
    "dsrl": Dsrl(sac=SAC, magnitude=1.5),
    "dsrl_na": DsrlNa(sac=SAC, magnitude=1.5),
    "rlpd": RlpdVla(sac=SAC),
}


@pytest.fixture(scope="module")
def base():
    policy = make_policy(noise_scale=0.5).requires_grad_(False)
    pre, post = make_vla_pre_post_processors(policy.config, make_stats())
    return ChunkPolicy(policy, pre, post, PolicySpec(RobotSpec.from_json(policy.config.robot), policy.horizon))


@pytest.fixture(scope="module")
def batch(base):
    with torch.no_grad():
        return base.preprocess(make_observations(6))


def width(base, batch):
    return base.policy.observed(base.policy.encode(batch), batch).shape[-1]


def learner(base, batch, name, offline=None, **changes):
    torch.manual_seed(0)
    method = replace(METHODS[name], **changes)
    made = method.learner(base.policy, width(base, batch), STEPS, offline, 0)
    for p in made.agent.actor.parameters():  # actors that do something
        p.data.mul_(3.0)
    return made


def decided(made, batch, alone=False):
    network = made.explorer()
    noise = torch.randn(len(batch["observation.state"]), network.horizon, network.noise_dim)
    return network, noise, network.decide(batch, noise, alone)


@pytest.mark.parametrize("name", METHODS)
def test_the_loss_of_what_is_kept_is_that_of_what_is_computed_anew(base, batch, name):
    made = learner(base, batch, name)
    network, noise, rows = decided(made, batch)
    at, after, reward, discount = [0, 1, 3, 4], [1, 2, 4, 5], [-1.0, 0.5, -2.0, 0.0], [0.9, 0.8, 0.9, 0.0]
    kept = Decisions.of(rows, at, after, reward, discount).view(torch.arange(4), made.present)
    seen = base.policy.observed(base.policy.encode(batch), batch)  # the pictures once more
    anew = network.decide(batch, noise)
    fresh = Drawn(
        kept.batch._replace(obs=seen[at], next_obs=seen[after], actions=anew.actions[at]),
        anew.drawn[at if made.present else after],
    )
    losses = []
    for drawn in (kept, fresh):
        made.agent.generator.manual_seed(5)
        losses.append((*made.critic_step(drawn).values(), made.actor_step(drawn)["entropy"]))
        made = learner(base, batch, name)  # the steps have moved it
    assert all(torch.equal(a, b) for a, b in zip(*losses, strict=True))
    assert torch.isfinite(losses[0][0])


def test_edits_are_of_the_executed_steps_and_at_most_beta(base, batch):
    made = learner(base, batch, "expo", edits=3)
    network, noise, rows = decided(made, batch)
    of_base, of_edits, _ = noise.split(network._widths, -1)
    context = base.policy.encode(batch)
    offered = network.candidates(context, rows.seen, of_base, of_edits)
    moved, d = (offered[:, 3:] - offered[:, :3]).abs(), STEPS * ACTIONS
    assert 0.01 < moved[..., :d].max() <= 0.2 + 1e-6 and moved[..., d:].max() == 0
    chosen = (rows.chunk.flatten(1)[:, None] == offered).all(-1)
    assert chosen.any(1).all() and torch.equal(rows.actions, rows.chunk.flatten(1)[:, :d])
    torch.testing.assert_close(rows.drawn, offered[:, :3, :d])


@pytest.mark.parametrize("name", METHODS)
def test_before_anything_is_learnt_the_base_acts_bit_for_bit(base, batch, name):
    network = learner(base, batch, name).network(learnt=False)
    noise = torch.randn(6, network.horizon, network.noise_dim)
    own = base.policy.predict_action_chunk(batch, noise[..., :ACTIONS] * base.policy.noise_scale)
    assert torch.equal(network.predict_action_chunk(batch, noise), own.clamp(-4.0, 4.0) if name == "expo" else own)
    assert ChunkPolicy(network, base.preprocessor, base.postprocessor, base.spec).noise([3]).std() > 0.5


def test_an_edit_of_size_zero_is_the_bases_chunk_bit_for_bit(base, batch):
    made = learner(base, batch, "expo", samples=1, edits=1, beta=0.0, unedited=False)
    network, noise, rows = decided(made, batch)
    own = base.policy.predict_action_chunk(batch, noise[..., :ACTIONS] * base.policy.noise_scale)
    assert torch.equal(rows.chunk, own.clamp(-4.0, 4.0))


def test_the_actors_noise_is_the_noise_that_the_base_starts_from(base, batch):
    made = learner(base, batch, "dsrl")
    network, _, rows = decided(made, batch)
    assert rows.actions.shape == (6, base.policy.horizon * ACTIONS) and rows.actions.abs().max() <= 1
    given = 1.5 * rows.actions.view(6, -1, ACTIONS)
    assert torch.equal(rows.chunk, base.policy.predict_action_chunk(batch, given))
    prior = torch.randn(6, network.horizon, ACTIONS)
    own = network.decide(batch, prior, alone=True)  # the warm-up: the prior's noise, kept as if the actor gave it
    assert torch.equal(own.chunk, base.policy.predict_action_chunk(batch, 0.5 * prior))
    torch.testing.assert_close(1.5 * own.actions, (0.5 * prior).flatten(1).clamp(-1.5 * 0.999, 1.5 * 0.999))
    mode = made.network(learnt=True)
    assert mode.noise_scale == 0 and made.network(learnt=True, explores=True).noise_scale == 1


def test_a_noise_is_kept_beside_the_actions_that_it_becomes(base, batch):
    made = learner(base, batch, "dsrl_na")
    network, noise, rows = decided(made, batch)
    d, w = STEPS * ACTIONS, base.policy.horizon * ACTIONS
    assert rows.drawn.shape == (6, PAIRS, w + d) and rows.drawn[..., :w].abs().max() <= 1
    for i in range(PAIRS):
        given = 1.5 * rows.drawn[:, i, :w].view(6, -1, ACTIONS)
        chunk = base.policy.predict_action_chunk(batch, given)
        torch.testing.assert_close(rows.drawn[:, i, w:], chunk[:, :STEPS].flatten(1).clamp(-4, 4), atol=1e-5, rtol=1e-4)
    draws = noise.unflatten(-1, (1 + PAIRS, -1))[:, :, 1:]  # the first half of the pairs' is of a unit normal
    torch.testing.assert_close(1.5 * rows.drawn[:, 0, :w], draws[:, :, 0].flatten(1).clamp(-1.4985, 1.4985))
    mean, log_std = made.agent.actor(rows.seen)
    theirs = torch.tanh(mean + log_std.exp() * draws[:, :, PAIRS - 1].flatten(1))
    torch.testing.assert_close(rows.drawn[:, PAIRS - 1, :w], theirs)
    served = made.network(learnt=True, explores=True)  # pays for no pairs
    assert torch.equal(served.predict_action_chunk(batch, noise[..., :ACTIONS]), rows.chunk)
    assert served.noise_dim == ACTIONS and torch.equal(rows.actions, rows.chunk[:, :STEPS].flatten(1).clamp(-4, 4))


def test_a_critic_of_noise_learns_from_actions_alone_which_noise_is_better(base, batch):
    """Actions that begin to the right are paid; nobody tells of what noise they came."""
    made = learner(base, batch, "dsrl_na", sac=replace(SAC, actor=(32,), critic=(32,), lr_critic=3e-3, batch=32))
    torch.manual_seed(0)
    for _ in range(20):
        _, _, rows = decided(made, batch, alone=True)
        paid = rows.actions[:, 0].sign()
        made.store = joined([made.store, Decisions.of(rows, range(6), range(6), paid.tolist(), [0.0] * 6)])
    for _ in range(150):
        made.critic_step(made.draw(32))
    _, _, rows = decided(made, batch)
    w = base.policy.horizon * ACTIONS
    noises, became = rows.drawn.split((w, STEPS * ACTIONS), -1)
    q = made.agent.critic.judge(rows.seen, noises).mean(0)
    right = became[..., 0] > 0
    assert 0 < right.float().mean() < 1 and q[right].mean() > q[~right].mean() + 0.5


def test_an_actor_in_the_bases_place_holds_its_last_action(base, batch):
    _, _, rows = decided(learner(base, batch, "rlpd"), batch)
    assert torch.equal(rows.chunk[:, :STEPS].flatten(1), 4.0 * rows.actions)
    assert torch.equal(rows.chunk[:, STEPS:], rows.chunk[:, STEPS - 1 : STEPS].expand(-1, 8 - STEPS, -1))


def record(success, chunks=(0, 0, 0, 1, 1)):
    n = len(chunks)
    noise = np.array(chunks, np.int64) + 70
    return EpisodeRecord(1, "", "", success, n, chunks=np.array(chunks, np.int32), noise=noise, rewards=np.zeros(n))


@pytest.mark.parametrize("success", [True, False])
def test_discounts_count_executed_steps_and_what_is_cut_off_bootstraps(base, batch, success):
    chunks = list(chunks_of(record(success), "step", GAMMA))
    assert [(c.noise, c.executed) for c in chunks] == [(70, 3), (71, 2)]
    last = -1.0 + GAMMA * (float(success) - 1.0)
    assert [c.reward for c in chunks] == pytest.approx([-1 - 0.9 - 0.81, last])
    rows = gathered([row(decided(learner(base, batch, "expo"), batch)[2], i) for i in range(2 + (not success))])
    store = Decisions.of(rows, *episode([row(rows, i) for i in range(len(rows.seen))], chunks, success, GAMMA))
    view = store.view(torch.arange(2)).batch
    assert view.discount.tolist() == pytest.approx([GAMMA**3, 0.0 if success else GAMMA**2])
    assert torch.equal(view.next_obs[0], rows.seen[1])
    assert success or torch.equal(view.next_obs[1], rows.seen[2])
    with pytest.raises(ValueError, match="2 chunks"):
        episode([row(rows, 0)], chunks, success, GAMMA)
    twice = joined([store, store])
    again = twice.view(torch.tensor([2, 3])).batch
    assert all(torch.equal(a, b) for a, b in zip(view[:5], again[:5], strict=True))


@pytest.mark.parametrize(("reward", "last"), [("task", 0.0), ("step", GAMMA**2)])
def test_a_failure_for_good_ends_what_the_task_pays_and_is_cut_off_elsewhere(base, batch, reward, last):
    made = learner(base, batch, "expo")
    policy = ChunkPolicy(made.explorer(), base.preprocessor, base.postprocessor, base.spec)
    explorer, observations = Explorer(policy), make_observations(3)
    explorer.infer(observations[:2], [70, 71])
    failed = replace(record(False), terminated=True, attached={FINAL: observations[2]})
    decisions = explorer.experience([failed], reward, GAMMA).decisions
    assert decisions.discount.tolist() == pytest.approx([GAMMA**3, last])
    assert len(decisions.seen) == 2 + (last > 0)


def test_half_of_each_slice_is_demonstrations(base, batch):
    _, _, rows = decided(learner(base, batch, "expo"), batch)
    own, demos = (Decisions.of(rows, [0, 1], [1, 2], [value] * 2, [0.9] * 2) for value in (1.0, -1.0))
    made = learner(base, batch, "expo", offline=demos)
    made.store = own
    assert made.draw(8).batch.reward.tolist() == [1.0, -1.0] * 4
    assert mixed(own.view(torch.arange(2)), demos.view(torch.arange(2))).offered.shape == (4, 3, STEPS * ACTIONS)


@pytest.mark.parametrize("name", METHODS)
def test_an_update_moves_critics_and_actor_and_never_the_base(base, batch, name):
    made = learner(base, batch, name)
    lived = Decisions.of(decided(made, batch)[2], [0, 1, 2], [1, 2, 2], [-1.0, -1.0, 0.0], [0.9, 0.9, 0.0])
    made.store = joined([made.store, lived])
    before = [p.clone() for p in base.policy.parameters()]
    own = {k: p.clone() for k, p in made.agent.named_parameters()}
    metrics = [made.update() for _ in range(3)]
    assert all(math.isfinite(v) for m in metrics for v in m.values())
    assert all(torch.equal(a, b) for a, b in zip(before, base.policy.parameters(), strict=True))
    assert all(not torch.equal(p, own[k]) for k, p in made.agent.named_parameters() if k.startswith(("actor", "cri")))
    kept = made.store.state_dict()
    other = Decisions.none(1, 1, 1)
    other.load_state_dict(kept)
    assert other == made.store or all(torch.equal(kept[k], v) for k, v in other.state_dict().items())


def test_what_is_observed_is_features_and_state_in_half_precision(base, batch):
    seen = base.policy.observed(base.policy.encode(batch), batch)
    assert torch.equal(seen, seen.half().float()) and not seen.requires_grad
    torch.testing.assert_close(seen[:, -STATES:], batch["observation.state"].clamp(-5, 5), atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("kind", ["smolvla", "pi05"])
@pytest.mark.parametrize("name", METHODS)
def test_the_policy_may_be_another_vla_and_is_saved_whole(tmp_path, kind, name):
    with tiny_pi(tmp_path):
        policy = make_vla(kind, tmp_path).requires_grad_(False)
        pre, post = make_processors(policy)
        robot = RobotSpec.from_json(make_policy().config.robot)
        spec = PolicySpec(robot, policy.horizon, extras={"n_action_steps": STEPS})
        batch = ChunkPolicy(policy, pre, post, spec).preprocess(make_observations(2))
        base = SimpleNamespace(policy=policy)
        made = learner(base, batch, name)
        made.store = Decisions.of(decided(made, batch)[2], [0, 0], [1, 0], [-1.0, 0.0], [0.9, 0.0])
        assert all(math.isfinite(v) for v in made.update().values())
        network = made.network(learnt=True)
        for part in (network, pre, post):
            part.save_pretrained(tmp_path / "left")
        loaded = load_policy(tmp_path / "left")
        noise = torch.randn(2, network.horizon, network.noise_dim) * network.noise_scale
        torch.testing.assert_close(
            loaded.policy.predict_action_chunk(batch, noise), network.predict_action_chunk(batch, noise)
        )
        assert loaded.spec.horizon == policy.horizon and loaded.spec.extras["n_action_steps"] == STEPS

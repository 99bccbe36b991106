"""Chunks that continue a plan: on the real policy, through its processors, in commands."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from small_vla import ACTIONS, make_batch, make_config, make_observations, make_policy, make_stats

from vla_stack.methods.imitation import loss as imitation
from vla_stack.methods.mixture_of_horizons import loss as mixture_of_horizons
from vla_stack.policies.action_attention import NOISY_OFFSET
from vla_stack.policies.chunk_policy import load_policy
from vla_stack.policies.configuration_moh import MohConfig
from vla_stack.policies.continuation import Continuing, continue_chunk
from vla_stack.policies.modeling_moh import MohPolicy
from vla_stack.policies.processor_moh import make_moh_pre_post_processors
from vla_stack.policies.processor_vla import make_vla_pre_post_processors
from vla_stack.schema import ACTION, CONTINUE, Continuation

H, D = 8, 3
SEEDS = [11, 12]


@pytest.fixture(scope="module", params=["full", "lambda"])
def served(tmp_path_factory, request):
    """The small policy, trained to take prefixes of up to four steps, with either attention among actions."""
    options = {"prefix_attention": request.param, "prefix_window": 2}
    path, policy = tmp_path_factory.mktemp("policy"), make_policy(max_delay=4, **options)
    for part in (policy, *make_vla_pre_post_processors(policy.config, make_stats())):
        part.save_pretrained(path)
    return load_policy(path)


@pytest.fixture(scope="module")
def observations():
    return make_observations(2)


@pytest.fixture(scope="module")
def plans(served, observations):
    """Plausible plans: chunks of other noise, as the robot would have them two steps later."""
    return served.infer(observations, [1, 2]).actions[:, 2:]


def continuations(mode, plans, delay=D):
    return [Continuation(mode, plan, delay, H - len(plan) + 1) for plan in plans]


def test_its_modes_are_announced(served):
    assert set(served.spec.extras["continues"]) == set(CONTINUE) and served.spec.d_train_max == 4


@pytest.mark.parametrize("mode", ["rtc", "rtc_identity", "prefix"])
def test_without_anything_to_continue_it_is_plain_sampling(served, observations, plans, mode):
    """§8 test 1: nothing is over, nothing known: the chunk is that without a plan; bit for bit if none is asked for."""
    nothing = [Continuation(mode, plan[:1], 0, H) for plan in plans]
    plain = served.infer(observations, SEEDS).actions
    np.testing.assert_allclose(served.infer(observations, SEEDS, nothing).actions, plain, atol=1e-6)
    np.testing.assert_array_equal(served.infer(observations, SEEDS, [None, None]).actions, plain)


def test_a_prefix_comes_back_as_it_was_commanded(served, observations, plans):
    chunk = served.infer(observations, SEEDS, continuations("prefix", plans)).actions
    np.testing.assert_allclose(chunk[:, :D], plans[:, :D], atol=1e-5)
    assert np.abs(chunk[:, D:] - served.infer(observations, SEEDS).actions[:, D:]).max() > 1e-3


def test_in_model_space_the_prefix_is_kept_bit_for_bit_and_its_noise_is_not_read(served):
    """§8 test 5: what comes out, and what does not matter."""
    batch = served.preprocessor(served._collate(make_observations(2)))
    generator = torch.Generator().manual_seed(0)
    noise, plan = torch.randn(2, 2, H, ACTIONS, generator=generator)
    known = continuations("prefix", np.zeros((2, 6, ACTIONS), np.float32))
    chunk = continue_chunk(served.policy, batch, noise, plan, known, SEEDS, "prefix").chunk
    assert torch.equal(chunk[:, :D], plan[:, :D])
    other = torch.cat((noise[:, :D] * 7.0 + 1.0, noise[:, D:]), dim=1)
    assert torch.equal(continue_chunk(served.policy, batch, other, plan, known, SEEDS, "prefix").chunk, chunk)


@pytest.mark.parametrize("mode", ["rtc", "rtc_identity", "bid"])
def test_it_stays_closer_to_the_plan(served, observations, plans, mode):
    """On the steps that will be over; by guidance much closer than a fresh chunk."""

    def distance(chunk):
        return np.abs(chunk[:, :D] - plans[:, :D]).mean()

    free = distance(served.infer(observations, SEEDS).actions)
    near = distance(served.infer(observations, SEEDS, continuations(mode, plans)).actions)
    assert near < (0.9 if mode == "bid" else 0.5) * free


def test_modes_can_share_a_batch(served, observations, plans):
    rtc, prefix = continuations("rtc", plans)[0], continuations("prefix", plans)[1]
    both = served.infer(observations, SEEDS, [rtc, prefix]).actions
    for i, plan in enumerate((rtc, prefix)):
        alone = served.infer(observations[i : i + 1], SEEDS[i : i + 1], [plan]).actions
        np.testing.assert_allclose(both[i], alone[0], atol=1e-5)
    mixed = served.infer(observations, SEEDS, [None, prefix]).actions
    np.testing.assert_allclose(mixed[0], served.infer(observations, SEEDS).actions[0], atol=1e-5)


def test_a_plan_is_anchored_at_the_state_of_now(served, observations, plans):
    """The plan is in commands; what the network sees of it moves with the state, what comes out does not."""
    moved = [replace(o, state=o.state + 0.3) for o in observations]
    for obs in (observations, moved):
        chunk = served.infer(obs, SEEDS, continuations("prefix", plans)).actions
        np.testing.assert_allclose(chunk[:, :D], plans[:, :D], atol=1e-5)


def test_guidance_leaves_no_graph_behind(served, observations, plans):
    assert isinstance(served.infer(observations, SEEDS, continuations("rtc", plans)).actions, np.ndarray)
    assert all(p.grad is None for p in served.policy.parameters())


def test_what_follows_is_the_plan_s_to_say(served, observations, plans):
    """Steps that the plan does not reach are free: a change of what lies beyond its end changes nothing."""
    short = [Continuation("rtc", plan[:4], 2, H - 4) for plan in plans]
    beyond = [Continuation("rtc", np.concatenate([plan[:4], plan[:2] * 0 + 9.0]), 2, H - 4) for plan in plans]
    a, b = (served.infer(observations, SEEDS, c).actions for c in (short, beyond))
    np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("reweight", [False, True])
def test_training_on_prefixes_has_no_gradient_from_them(reweight):
    """§8 test 5: the loss of the given steps."""
    policy = make_policy(max_delay=4)
    pre, _ = make_vla_pre_post_processors(policy.config, make_stats())
    batch = {**make_batch(6), "action_is_pad": torch.zeros(6, H, dtype=torch.bool)}
    batch = {**pre(batch), "action_is_pad": batch["action_is_pad"]}
    asked, velocity = {}, policy.velocity

    def spy(context, x, t):
        asked["t"], asked["v"] = t, velocity(context, x, t)
        asked["v"].retain_grad()
        return asked["v"]

    policy.velocity = spy
    loss, _ = imitation.loss(policy, batch, torch.Generator().manual_seed(0), draws=4, reweight=reweight)
    loss.backward()
    clean = asked["t"] == 0.0
    delays = clean.sum(1)
    assert clean.shape == (24, H) and set(delays.tolist()) == {0, 1, 2, 3, 4}
    assert (clean == (torch.arange(H) < delays[:, None])).all()
    gradient = asked["v"].grad
    assert (gradient[clean] == 0).all() and (gradient[~clean] != 0).any(-1).all()
    assert ACTION in batch


def test_steps_that_are_predicted_badly_weigh_more():
    """By their distance over the mean distance of what counts, within [0.5, 5]."""
    t = torch.tensor([[0.0, 0.5, 0.5, 1.0]])
    distance = torch.tensor([[[9.0, 9.0], [0.0, 0.0], [2.0, 4.0], [60.0, 40.0]]])  # of velocities
    valid = (t > 0)[..., None].expand(1, 4, 2).clone()
    weights = imitation.online_weights(distance.square(), t, valid)[0, 1:, 0]
    mean = (0.0 + 1.5 + 50.0) / 3
    torch.testing.assert_close(weights, torch.tensor([0.5, 0.5, 50.0 / mean]))
    few = torch.tensor([[[1.0]] * 9 + [[1000.0]]])
    assert imitation.online_weights(few, torch.ones(1, 10), torch.ones(1, 10, 1, dtype=torch.bool)).max() == 5.0


def test_a_mixture_of_horizons_learns_from_given_actions_too():
    config = MohConfig(base=make_config(max_delay=4), horizons=(2, 5, 8), device="cpu", push_to_hub=False)
    policy, asked = MohPolicy(config), []
    pre, _ = make_moh_pre_post_processors(config, make_stats())
    predict = policy.predict

    def spy(*args):
        asked.append(predict(*args))
        asked[0].mixture.branches.retain_grad()
        return asked[0]

    policy.predict = spy
    batch = {**pre(make_batch(16)), "action_is_pad": torch.zeros(16, H, dtype=torch.bool)}
    loss, _ = mixture_of_horizons.loss(policy, batch, torch.Generator().manual_seed(0))
    loss.backward()
    given, gradient = asked[0].given, asked[0].mixture.branches.grad.transpose(1, 2)
    assert set(given.sum(1).tolist()) == {0, 1, 2, 3, 4}
    assert (gradient[given] == 0).all() and (gradient[~given] != 0).any()


def test_given_steps_have_no_say_in_how_much_a_mixture_executes():
    """Branches may disagree on them as they like: nothing was trained there, and they are over when the chunk comes."""
    config = MohConfig(base=make_config(max_delay=4), horizons=(5, 8), consensus_ratio=1.0, consensus_min_steps=2,
                       consensus_min_active=1, device="cpu", push_to_hub=False)  # fmt: skip
    torch.manual_seed(0)
    policy = MohPolicy(config).eval()
    policy.base.load_state_dict(make_policy(max_delay=4).state_dict())
    pre, _ = make_moh_pre_post_processors(config, make_stats())
    batch = pre({k: v for k, v in make_batch(2).items() if k != ACTION})
    noise, plan = torch.randn(2, 2, H, ACTIONS, generator=torch.Generator().manual_seed(0))
    known = [Continuation("prefix", np.zeros((6, ACTIONS), np.float32), delay, 3) for delay in (D, 1)]
    _, disagreement, given = continue_chunk(policy, batch, noise, plan, known, SEEDS, "prefix")
    assert given.sum(1).tolist() == [D, 1]
    assert (disagreement[given] == 0).all() and (disagreement[:, :5][~given[:, :5]] > 0).all()
    steps = policy.execute_steps(disagreement, given)
    assert (steps >= given.sum(1) + 2).all()
    for row, k, delay in zip(disagreement, steps.tolist(), (D, 1), strict=True):
        threshold = row[delay : delay + 2].mean()
        agree = [bool(d < threshold) for d in row[delay + 2 : 5]]
        assert k == delay + 2 + (agree.index(False) if False in agree else len(agree))


def test_a_mixture_of_horizons_says_how_much_of_a_continued_chunk_to_execute(tmp_path):
    """In every mode, by the disagreement that its own sampling met; where nothing is known, as without a plan."""
    config = MohConfig(base=make_config(max_delay=4), horizons=(2, 5, 8), consensus_ratio=0.6, consensus_min_steps=2,
                       consensus_min_active=1, device="cpu", push_to_hub=False)  # fmt: skip
    torch.manual_seed(0)
    policy = MohPolicy(config).eval()
    policy.base.load_state_dict(make_policy(max_delay=4).state_dict())
    for part in (policy, *make_moh_pre_post_processors(policy.config, make_stats())):
        part.save_pretrained(tmp_path)
    served, seeds = load_policy(tmp_path), [3, 1, 4, 1, 5, 9]
    observations = make_observations(6)
    plain = served.infer(observations, seeds)
    assert set(CONTINUE) == set(served.spec.extras["continues"]) and len(set(plain.execute)) > 1
    for mode in CONTINUE:
        nothing = [Continuation(mode, plan[:1], 0, H) for plan in plain.actions]
        chunks = served.infer(observations, seeds, nothing)
        assert all(2 <= k <= 5 for k in chunks.execute)
        if mode != "bid":  # which is free to choose where nothing is known
            assert chunks.execute == plain.execute
        known = served.infer(observations, seeds, continuations(mode, plain.actions[:, 2:]))
        least = 2 + D * (mode == "prefix")  # given steps come before them
        assert len(known.execute) == 6 and all(least <= k <= 5 for k in known.execute)


def test_schedule_beta_and_a_weaker_policy_have_a_say_in_their_modes_alone(served, observations, plans):
    def chunk(mode, **how):
        served.continuing = Continuing(**how)
        try:
            return served.infer(observations, SEEDS, continuations(mode, plans)).actions
        finally:
            served.continuing = Continuing()

    weak = make_policy(max_delay=4)
    with torch.no_grad():
        for parameter in weak.parameters():
            parameter.mul_(1.3)
    for how, moved in (
        ({"schedule": "linear"}, {"rtc", "rtc_identity"}),
        ({"beta": 0.5}, {"rtc", "rtc_identity"}),
        ({"weak": weak}, set()),
    ):
        changed = {mode for mode in CONTINUE if np.abs(chunk(mode, **how) - chunk(mode)).max() > 1e-5}
        assert moved <= changed and changed <= moved | {"bid"}
    assert np.abs(chunk("rtc", beta=3.0) - chunk("rtc")).max() == 0  # as many as the Euler steps


def test_a_plain_policy_can_be_trained_on_with_the_lambda_mask(tmp_path):
    plain, config = make_policy(), make_config(max_delay=4, prefix_attention="lambda", prefix_window=2)
    plain.save_pretrained(tmp_path)
    begun = type(plain).from_pretrained(tmp_path, config=config, dataset_stats=make_stats())
    expert, before = begun.expert, plain.expert
    assert torch.equal(expert.positions[1 : 1 + H], before.positions)  # of clean tokens, after the sink's
    assert torch.equal(expert.positions[1 + NOISY_OFFSET :], before.positions)  # of noisy ones
    assert torch.equal(expert.blocks[0].attention.qkv.weight, before.blocks[0].attention.qkv.weight)

    for part in (begun, *make_vla_pre_post_processors(begun.config, make_stats())):
        part.save_pretrained(tmp_path)
    again = load_policy(tmp_path)
    assert torch.equal(again.policy.expert.sink, expert.sink)  # what has a sink keeps it
    assert np.isfinite(again.infer(make_observations(2), SEEDS).actions).all()

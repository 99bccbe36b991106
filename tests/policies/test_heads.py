"""One-step heads: densities, moments, bins, and the policy around them; and the binary gripper."""

import numpy as np
import pytest
import torch
from small_vla import ACTIONS, make_batch, make_config, make_policy, make_stats

from vla_stack.errors import UserError
from vla_stack.methods.imitation import loss as imitation
from vla_stack.policies import flow
from vla_stack.policies.chunk_policy import load_policy
from vla_stack.policies.configuration_moh import MohConfig
from vla_stack.policies.heads import BINS, LOG_STD_RANGE, BinsHead, GaussianHead
from vla_stack.policies.modeling_moh import MohPolicy
from vla_stack.policies.processor_moh import make_moh_pre_post_processors
from vla_stack.policies.processor_vla import make_vla_pre_post_processors
from vla_stack.schema import ACTION, ACTION_DIM_IS_PAD

HEADS = ("regression", "gaussian", "bins")
WIDTH = 16


@pytest.fixture
def states():
    return torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", params=HEADS)
def policy(request):
    return make_policy(head=request.param, depth=1)


@pytest.fixture(scope="module")
def batch(policy):
    return make_vla_pre_post_processors(policy.config, make_stats())[0](make_batch(4))


def test_gaussian_density_integrates_to_one(states):
    torch.manual_seed(0)
    head = GaussianHead(WIDTH, 1)
    x = torch.linspace(-12, 12, 4001)
    density = torch.stack([head.log_prob(states, x[i].expand(2, 3, 1)).exp() for i in range(len(x))])
    torch.testing.assert_close(torch.trapezoid(density, x, dim=0), torch.ones(2, 3, 1), atol=1e-3, rtol=0)


def test_gaussian_sampling_has_its_moments(states):
    torch.manual_seed(0)
    head = GaussianHead(WIDTH, 2)
    noise = torch.randn(40_000, 3, 2)
    samples = head.sample(states[:1].expand(40_000, -1, -1), noise)
    d = head.distribution(states[:1])
    torch.testing.assert_close(samples.mean(0), d.mean[0], atol=0.03, rtol=0)
    torch.testing.assert_close(samples.std(0), d.stddev[0], atol=0.03, rtol=0)
    assert torch.equal(head.sample(states, torch.zeros(2, 3, 2)), head.point(states))


def test_gaussian_width_is_bounded(states):
    head = GaussianHead(WIDTH, 2)
    torch.nn.init.constant_(head.log_std.bias, 50.0)
    assert head.distribution(states).stddev.max() <= np.exp(LOG_STD_RANGE[1]) * 1.001


@pytest.mark.parametrize("limit", [1.0, 4.0])
def test_bins_round_trip(limit):
    head = BinsHead(WIDTH, 1, limit)
    index = torch.arange(BINS)[None, :, None]
    assert torch.equal(head.index(head.centre(index)), index)
    actions = torch.linspace(-limit, limit, 999)[None, :, None]
    assert (head.centre(head.index(actions)) - actions).abs().max() <= limit / BINS * 1.001
    beyond = torch.tensor([[[-9.0], [9.0]]]) * limit
    assert head.index(beyond).flatten().tolist() == [0, BINS - 1]


def test_bins_are_a_categorical_distribution(states):
    torch.manual_seed(0)
    head = BinsHead(WIDTH, 2, 1.0)
    actions = torch.rand(2, 3, 2) * 2 - 1
    logits = head(states).view(2, 3, 2, BINS)
    expected = torch.distributions.Categorical(logits=logits).log_prob(head.index(actions))
    torch.testing.assert_close(head.log_prob(states, actions), expected)
    every = torch.stack([head.log_prob(states, head.centre(torch.full((2, 3, 2), i))) for i in range(BINS)])
    torch.testing.assert_close(every.exp().sum(0), torch.ones(2, 3, 2))


def test_bins_are_sampled_as_likely_as_they_are(states):
    head = BinsHead(WIDTH, 1, 1.0)
    with torch.no_grad():
        head.weight.zero_()
        head.bias.fill_(-30.0)
        head.bias[[20, 100, 200]] = torch.tensor([0.2, 0.5, 0.3]).log()
    noise = torch.randn(20_000, 1, 1, generator=torch.Generator().manual_seed(0))
    drawn = head.index(head.sample(states[:1, :1].expand(20_000, -1, -1), noise)).flatten()
    share = torch.bincount(drawn, minlength=BINS) / len(drawn)
    torch.testing.assert_close(share[[20, 100, 200]], torch.tensor([0.2, 0.5, 0.3]), atol=0.015, rtol=0)
    median = head.sample(states, torch.zeros(2, 3, 1))
    assert (head.index(median) == 100).all() and torch.equal(head.point(states), median)


def test_loss_is_the_head_s(policy, batch):
    """Mean over what is not padding, of |a - a*|, or of the negative log-probability."""
    batch = {**batch, "action_is_pad": torch.zeros(4, 8, dtype=torch.bool)}
    batch["action_is_pad"][1, 5:] = True
    value, logs = imitation.loss(policy, batch, torch.Generator().manual_seed(0))
    context = policy.encode(batch)
    if policy.config.head == "regression":
        error = (policy.action_head(policy.query_states(context)) - batch[ACTION]).abs()
    else:
        error = -policy.head.log_prob(policy.query_states(context), batch[ACTION])
    expected = error[flow.valid_entries(batch)].mean()
    torch.testing.assert_close(value, expected)
    assert list(logs) == [f"{policy.config.head}_loss"]
    whole = dict(batch, action_is_pad=torch.zeros(4, 8, dtype=torch.bool))
    torch.testing.assert_close(policy.forward(whole)[0], imitation.loss(policy, whole, torch.Generator())[0])


def test_padding_is_not_learnt_from(policy, batch):
    padded = {**batch, "action_is_pad": torch.zeros(4, 8, dtype=torch.bool)}
    padded["action_is_pad"][:, 6:] = True
    changed = {**padded, ACTION: padded[ACTION].clone()}
    changed[ACTION][:, 6:] = 3.0
    losses = [imitation.loss(policy, b, torch.Generator())[0] for b in (padded, changed)]
    assert torch.equal(*losses)


def test_a_head_learns(batch, policy):
    policy = make_policy(head=policy.config.head, depth=1)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    losses = []
    for _ in range(40):
        value, _ = imitation.loss(policy.train(), batch, torch.Generator().manual_seed(0))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    start = abs(losses[0])
    assert losses[-1] < losses[0] - 0.3 * start
    idle = [n for n, p in policy.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert idle == []


def test_steps_differ_and_noise_counts_where_there_is_any(policy, batch):
    zero, one = torch.zeros(4, 8, ACTIONS), torch.ones(4, 8, ACTIONS)
    chunk, other = policy.predict_action_chunk(batch, zero), policy.predict_action_chunk(batch, one)
    assert chunk.shape == (4, 8, ACTIONS) and (chunk[:, 0] - chunk[:, 7]).abs().max() > 1e-3
    assert torch.equal(chunk, other) == (policy.config.head == "regression")


def test_log_prob_of_a_chunk(policy, batch):
    actions = batch[ACTION]
    if policy.config.head == "regression":
        with pytest.raises(UserError, match="'regression' has no log-probability"):
            policy.log_prob(batch, actions)
        return
    per_step = policy.log_prob(batch, actions)
    entries = policy.head.log_prob(policy.query_states(policy.encode(batch)), actions)
    assert per_step.shape == (4, 8)
    torch.testing.assert_close(per_step, entries.sum(-1))
    lacking = torch.zeros(4, ACTIONS, dtype=torch.bool)
    lacking[:, 3:] = True
    torch.testing.assert_close(
        policy.log_prob({**batch, ACTION_DIM_IS_PAD: lacking}, actions), entries[..., :3].sum(-1)
    )


def test_one_step_heads_have_no_flow(policy, batch):
    context = policy.encode(batch)
    with pytest.raises(UserError, match="has no velocity.*head=flow"):
        policy.velocity(context, batch[ACTION], torch.ones(4))
    mask = torch.ones(4, 8, dtype=torch.bool)
    with pytest.raises(UserError, match="cannot continue given actions"):
        policy.predict_action_chunk(batch, prefix=flow.ActionPrefix(batch[ACTION], mask))


@pytest.mark.parametrize("mixed", [False, True], ids=["alone", "mixed"])
def test_a_frozen_policy_predicts_the_same(policy, batch, mixed, tmp_path):
    """As every server loads it; only regression can be mixed."""
    if mixed:
        if policy.config.head != "regression":
            return
        base = make_config(head=policy.config.head, depth=1)
        policy = MohPolicy(MohConfig(base=base, horizons=(4, 8), device="cpu", push_to_hub=False)).eval()
    made = make_moh_pre_post_processors if mixed else make_vla_pre_post_processors
    for part in (policy, *made(policy.config, make_stats())):
        part.save_pretrained(tmp_path)
    frozen = load_policy(tmp_path, frozen=True).policy
    noise = torch.randn(4, 8, ACTIONS, generator=torch.Generator().manual_seed(0))
    wanted, got = (p.predict_action_chunk(batch, noise) for p in (policy, frozen))
    torch.testing.assert_close(got, wanted)


def test_flow_has_no_log_probability(batch):
    with pytest.raises(UserError, match="'flow' has no log-probability"):
        make_policy().log_prob(batch, batch[ACTION])


def test_unknown_choices_are_named():
    with pytest.raises(UserError, match="head is 'fast'.*flow, regression, gaussian, bins"):
        make_config(head="fast")


# --- Gripper ----------------------------------------------------------------------------------------------------


def test_binary_gripper_sends_extremes_alone():
    config = make_config(gripper="binary")
    stats = make_stats()
    stats[ACTION] |= {"min": np.full(ACTIONS, -7.0), "max": np.full(ACTIONS, 40.0)}
    pre, post = make_vla_pre_post_processors(config, stats)
    raw = make_batch(4)
    raw[ACTION][..., 4] = torch.linspace(0, 40, 32).view(4, 8)
    batch = pre(dict(raw))
    commands = post(batch[ACTION])
    expected = torch.where(raw[ACTION][..., 4] > 16.5, 40.0, -7.0)
    torch.testing.assert_close(commands[..., 4], expected)
    torch.testing.assert_close(commands[..., :4], raw[ACTION][..., :4], atol=1e-4, rtol=1e-4)
    mean, std = (torch.as_tensor(stats[ACTION][k][4]) for k in ("mean", "std"))
    torch.testing.assert_close(batch[ACTION][..., 4], (expected - mean) / std)
    between = batch[ACTION].clone()
    between[..., 4] = (16.6 - mean) / std
    assert (post(between)[..., 4] == 40.0).all()


def test_binary_gripper_needs_a_gripper():
    config = make_config(gripper="binary", action_feature_names=list("abcde"))
    with pytest.raises(UserError, match="no action is named a gripper"):
        make_vla_pre_post_processors(config, make_stats())

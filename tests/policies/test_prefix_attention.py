"""The Λ-mask of prefix conditioning: who reads whom, in every layer, by the attention that is really computed."""

import pytest
import torch
from small_vla import make_batch, make_config, make_policy, make_stats

from vla_stack.errors import UserError
from vla_stack.policies import transformer
from vla_stack.policies.action_attention import NOISY_OFFSET
from vla_stack.policies.configuration_moh import MohConfig
from vla_stack.policies.modeling_moh import MohPolicy
from vla_stack.policies.processor_vla import make_vla_pre_post_processors

H, WINDOW, DELAY = 8, 2, 4


@pytest.fixture(scope="module")
def policy():
    return make_policy(max_delay=DELAY, prefix_attention="lambda", prefix_window=WINDOW)


@pytest.fixture(scope="module")
def context(policy):
    pre, _ = make_vla_pre_post_processors(policy.config, make_stats())
    with torch.no_grad():
        return policy.encode(pre({k: v for k, v in make_batch(3).items() if k != "action_is_pad"}))


def times(delay, t=0.7, n=3):
    return torch.where(torch.arange(H) < delay, 0.0, t).expand(n, H)


def chunk(seed=0):
    return torch.randn(3, H, 5, generator=torch.Generator().manual_seed(seed))


def attention_weights(policy, context, x, t, monkeypatch):
    """float [layers, b, heads, sink and H, m + sink and H]: the kernel's own, as what it makes of the unit matrix."""
    weights, attention = [], transformer.attention

    def record(q, k, v, mask):
        unit = torch.eye(k.shape[2]).expand(*k.shape[:2], -1, -1).contiguous()
        weights.append(attention(q, k, unit, mask))
        return attention(q, k, v, mask)

    monkeypatch.setattr(transformer, "attention", record)
    with torch.no_grad():
        policy.velocity(context, x, t)
    return torch.stack(weights)


@pytest.mark.parametrize("kernel", ["fused", "bfloat16"])
def test_a_noisy_token_reads_no_given_action_beyond_its_window(policy, context, monkeypatch, kernel):
    """§8 test 6 of asynchronous execution: exactly 0, in every layer."""
    if kernel == "bfloat16":  # which a CPU computes step by step
        with torch.autocast("cpu", torch.bfloat16):
            weights = attention_weights(policy, context, chunk(), times(DELAY), monkeypatch)
    else:
        weights = attention_weights(policy, context, chunk(), times(DELAY), monkeypatch)
    assert len(weights) == policy.config.depth
    own = weights[..., 1:, -H:]  # action tokens on action tokens
    for reader in range(H):
        near = range(max(0, reader - WINDOW), reader + 1)
        for token in range(H):
            if token in near:
                assert (own[..., reader, token] > 0).all()
            else:
                assert (own[..., reader, token] == 0).all()
    seen = context.mask.all(0)
    assert (weights[..., 1:, : len(seen)][..., seen] > 0).all() and (weights[..., 1:, len(seen)] > 0).all()  # the sink
    assert (weights[..., 0, -H:] == 0).all()  # which reads no action


def test_positions_tell_noisy_from_given(policy, context):
    """Token i has position 1 + i where it is given, ``NOISY_OFFSET`` more where it is noisy."""
    positions = policy.expert.positions
    assert positions.shape[0] == 1 + H + NOISY_OFFSET
    positions.grad = None
    policy.velocity(context, chunk(), times(3)).square().sum().backward()
    used = positions.grad.abs().sum(1) > 0
    assert used.nonzero()[:, 0].tolist() == [0, 1, 2, 3, *range(NOISY_OFFSET + 4, NOISY_OFFSET + 1 + H)]


def test_one_time_a_sample_is_all_noisy(policy, context):
    with torch.no_grad():
        a, b = (policy.velocity(context, chunk(), t) for t in (torch.full((3,), 0.7), times(0)))
    assert torch.equal(a, b)


def test_it_is_causal_so_shorter_chunks_agree(policy, context):
    with torch.no_grad():
        long, short = (
            policy.velocity(context, chunk(), times(2)),
            policy.velocity(context, chunk()[:, :5], times(2)[:, :5]),
        )
    torch.testing.assert_close(long[:, :5], short)


@pytest.mark.parametrize("options", [{}, {"max_delay": 4, "prefix_window": 0}])
def test_it_needs_prefixes_and_a_window(options):
    with pytest.raises(UserError, match="prefix_attention is 'lambda' with max_delay"):
        make_config(prefix_attention="lambda", **options)


def test_a_mixture_of_horizons_has_nothing_to_mix():
    base = make_config(max_delay=4, prefix_attention="lambda")
    with pytest.raises(UserError, match="causal, so all horizons would predict the same.*prefix_attention=full"):
        MohPolicy(MohConfig(base=base, horizons=(4, 8), device="cpu", push_to_hub=False))

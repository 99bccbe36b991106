"""The noisy chain of a flow policy: its likelihood against brute force, its limits and its gradients."""

import math

import pytest
import torch
from small_vla import make_batch, make_policy
from tiny_vlas import make_processors, make_vla

from vla_stack.methods.reinflow.loss import NoiseNet
from vla_stack.policies import flow
from vla_stack.policies.chain import chain_log_prob, sample_chain
from vla_stack.policies.processor_vla import make_vla_pre_post_processors
from vla_stack.schema import ACTION

ROWS = 3


@pytest.fixture(scope="module", params=["native", "smolvla"])
def case(request, tmp_path_factory):
    """A policy, the native one in float64, and a context of a few observations."""
    if request.param == "native":
        policy = make_policy()
        pre, _ = make_vla_pre_post_processors(policy.config, None)
    else:
        policy = make_vla("smolvla", tmp_path_factory.mktemp("tiny"))
        pre, _ = make_processors(policy)
    batch = pre(make_batch(ROWS, policy.horizon))
    batch.pop(ACTION)
    if request.param == "native":  # SmolVLA's layers cast to float32
        policy = policy.double()
        batch = {k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in batch.items()}
    with torch.no_grad():
        return policy, policy.encode(batch)


def noise_net(policy, context, low=0.05, high=0.2):
    torch.manual_seed(1)
    net = NoiseNet(policy.features(context).shape[-1], (policy.horizon, policy.noise_dim), low, high).to(
        dtype_of(policy)
    )
    torch.nn.init.normal_(net.network[-1].weight, std=0.3)
    return net


def dtype_of(policy):
    return torch.float64 if policy.name == "vla" else torch.float32


def start(policy, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, policy.horizon, policy.noise_dim, generator=g, dtype=dtype_of(policy)), g


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("limit", [math.inf, 0.7])
def test_log_prob_is_the_sum_over_gaussians(case, steps, limit) -> None:
    policy, context = case
    std = noise_net(policy, context)(policy.features(context), steps)
    x, g = start(policy)
    with torch.no_grad():
        chain = sample_chain(policy, context, x, std, g, limit)
        entries = chain_log_prob(policy, context, chain, std, limit)
        assert entries.shape == chain.shape == (ROWS, steps + 1, policy.horizon, policy.noise_dim)
        brute = torch.distributions.Normal(0.0, 1.0).log_prob(chain[:, 0]).sum((1, 2))
        for k in range(steps):
            t = torch.full((ROWS,), 1 - k / steps, dtype=x.dtype)
            mean = chain[:, k] - policy.velocity(context, chain[:, k], t) / steps
            normal = torch.distributions.Normal(mean.clip(-limit, limit), std[:, k])
            brute += normal.log_prob(chain[:, k + 1]).sum((1, 2))
    assert torch.allclose(entries.sum((1, 2, 3)), brute, rtol=0, atol=1e-9 if x.dtype == torch.float64 else 1e-2)


def test_the_ratio_is_one_before_the_first_step(case) -> None:
    policy, context = case
    std = noise_net(policy, context)(policy.features(context), 4)
    x, g = start(policy)
    chain = sample_chain(policy, context, x, std, g)
    old = chain_log_prob(policy, context, chain, std).detach()
    ratio = (chain_log_prob(policy, context, chain, std) - old).sum((1, 2, 3)).exp()
    assert (ratio == 1.0).all()


def test_without_noise_the_chain_is_the_sampler(case) -> None:
    policy, context = case
    x, g = start(policy)
    zero = torch.zeros(1, 4, 1, 1, dtype=x.dtype)
    chain = sample_chain(policy, context, x, zero, g)
    with torch.no_grad():
        ode = flow.euler(lambda y, t: policy.velocity(context, y, t), x, 4)
    assert torch.equal(chain[:, -1], ode)
    near = sample_chain(policy, context, x, zero + 1e-7, g)
    assert torch.allclose(near[:, -1], ode, rtol=0, atol=1e-4)


def test_noise_is_bounded_and_starts_at_the_geometric_mean() -> None:
    net = NoiseNet(6, (4, 5), 0.05, 0.2)
    features = torch.randn(7, 6)
    assert torch.allclose(net(features, 3), torch.tensor(math.sqrt(0.05 * 0.2)))
    assert net.bounded(torch.tensor([-50.0, 50.0])).tolist() == pytest.approx([0.05, 0.2])
    torch.nn.init.normal_(net.network[-1].weight, std=10.0)
    std = net(features, 3)
    assert std.shape == (7, 3, 4, 5) and std.min() >= 0.05 * (1 - 1e-6) and std.max() <= 0.2 * (1 + 1e-6)
    assert not torch.allclose(std[:, 0], std[:, 2]), "the size depends on the time"


def test_one_step_without_velocity_has_the_gaussian_score() -> None:
    policy = make_policy().double()
    pre, _ = make_vla_pre_post_processors(policy.config, None)
    batch = pre(make_batch(ROWS))
    with torch.no_grad():
        batch = {k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in batch.items()}
        context = policy.encode(batch)
        policy.expert.head.weight.zero_()
        policy.expert.head.bias.zero_()
    x, g = start(policy)
    std = torch.full((1, 1, 1, 1), 0.3, dtype=torch.float64)
    chain = sample_chain(policy, context, x, std, g)
    chain_log_prob(policy, context, chain, std).sum().backward()
    # mu = x^0 - v, so d/dv log N(x^1; mu, sigma^2) = -(x^1 - x^0)/sigma^2 at v = 0; the head's bias adds to every v.
    score = -((chain[:, 1] - chain[:, 0]) / 0.3**2).sum((0, 1))
    assert torch.allclose(policy.expert.head.bias.grad, score, rtol=0, atol=1e-9)


def test_noise_moves_no_parameter_of_the_policy(case) -> None:
    policy, _ = case
    policy.zero_grad()
    pre_context = policy_context_with_gradients(case)
    net = noise_net(policy, pre_context)
    net(policy.features(pre_context), 2).sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in policy.parameters())
    assert net.network[0].weight.grad.any()


def policy_context_with_gradients(case):
    policy, context = case
    learnt = context.summary.clone().requires_grad_()
    return type(context)(context.keys_values, context.mask, learnt + 0 * next(policy.parameters()).sum())

"""A chunk as one graph. Nothing here has a GPU: buffers are tested with a graph that runs the function again, and what
would forbid a capture with tensors that say they lie on a GPU and hold nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from small_vla import make_batch, make_policy, make_stats
from torch._subclasses.fake_tensor import FakeTensorMode

from vla_stack.errors import UserError
from vla_stack.policies.backends import load_with
from vla_stack.policies.captured import CapturedSampler
from vla_stack.policies.flow import ActionPrefix
from vla_stack.policies.processor_vla import make_vla_pre_post_processors

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools" / "bench"))
from base_models import make_batch as make_gpu_batch
from base_models import make_policy as make_gpu_policy
from base_models import paligemma, smolvlm
from counting import on_fake_gpu

FAKE = FakeTensorMode()


def again(run):
    """A graph without a GPU: the output's buffer, filled anew by each call."""
    out = run().clone()
    return out, lambda: out.copy_(run())


@pytest.fixture(scope="module")
def policy():
    return make_policy(max_delay=3)


def batch_of(policy, n, seed=0):
    return make_vla_pre_post_processors(policy.config, make_stats())[0](make_batch(n, seed=seed))


def noise(policy, n, seed=0):
    return torch.randn(n, policy.horizon, policy.noise_dim, generator=torch.Generator().manual_seed(seed))


def test_every_call_reads_its_own_inputs_and_keeps_its_own_output(policy):
    captures = []
    sampler = CapturedSampler(policy.predict_action_chunk, lambda run: captures.append(run) or again(run))
    with torch.inference_mode():
        wanted = [policy.predict_action_chunk(batch_of(policy, 2, i), noise(policy, 2, i)) for i in range(3)]
        got = [sampler(batch_of(policy, 2, i), noise(policy, 2, i)) for i in range(3)]
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert len(captures) == 1


def test_other_shapes_and_a_plan_are_other_graphs(policy):
    captures = []
    sampler = CapturedSampler(policy.predict_action_chunk, lambda run: captures.append(run) or again(run))
    given = torch.zeros(2, policy.horizon, dtype=torch.bool)
    for steps in (1, 2):
        given[:, :steps] = True
        plan = ActionPrefix(noise(policy, 2, 9), given)
        wanted = policy.predict_action_chunk(batch_of(policy, 2), noise(policy, 2), plan)
        torch.testing.assert_close(sampler(batch_of(policy, 2), noise(policy, 2), plan), wanted, rtol=0, atol=0)
    sampler(batch_of(policy, 2), noise(policy, 2))
    sampler(batch_of(policy, 3), noise(policy, 3))
    assert len(captures) == 3


def test_new_weights_need_no_new_graph(policy):
    sampler = CapturedSampler(policy.predict_action_chunk, again)
    batch, x = batch_of(policy, 1), noise(policy, 1)
    before = sampler(batch, x)
    state = {name: value.clone() for name, value in policy.state_dict().items()}
    try:
        with torch.no_grad():
            policy.expert.head.weight.mul_(0.5)
        assert not torch.equal(sampler(batch, x), before)
        torch.testing.assert_close(sampler(batch, x), policy.predict_action_chunk(batch, x), rtol=0, atol=0)
    finally:
        policy.load_state_dict(state)


def test_without_a_gpu_it_is_refused(saved):
    with pytest.raises(UserError, match="needs a CUDA device"):
        load_with("graph", saved, "cpu")


def native():
    policy = make_policy(max_delay=3)
    batch = batch_of(policy, 2)
    with FAKE:
        batch = {k: FAKE.from_tensor(v).to("cuda") for k, v in batch.items() if isinstance(v, torch.Tensor)}
        on_fake_gpu(policy, FAKE).for_inference()
    return policy, batch


def on_backbone(backbone, cameras, **options):
    policy = make_gpu_policy(backbone(True), cameras, torch.device("cpu"), expert_width=32, **options).eval()
    on_fake_gpu(policy, FAKE)
    with FAKE:
        policy.for_inference()
        return policy, make_gpu_batch(policy, 2, torch.device("cuda"), recorded=False)


@pytest.mark.parametrize(
    "make",
    [
        native,
        lambda: on_backbone(smolvlm, 2, chunk_size=8, max_tokens=8),
        lambda: on_backbone(
            paligemma, 3, chunk_size=8, max_tokens=8, train_backbone="expert_only", state_input="prompt"
        ),
    ],
    ids=["native", "SmolVLM", "PaliGemma"],
)
def test_nothing_waits_for_the_gpu_while_a_chunk_is_sampled(make):
    """Reading a value, or a shape that depends on one, raises for tensors that have none."""
    policy, batch = make()
    with FAKE, torch.no_grad(), torch.device("cuda"):
        x = torch.zeros(2, policy.horizon, policy.noise_dim)
        given = torch.zeros(2, policy.horizon, dtype=torch.bool)
        for prefix in (None, ActionPrefix(x, given)):
            chunk = policy.predict_action_chunk(batch, noise=x, prefix=prefix)
            assert chunk.device.type == "cuda" and chunk.shape == x.shape
        with pytest.raises(Exception, match="_local_scalar_dense"):
            chunk.sum().item()  # it would have been seen

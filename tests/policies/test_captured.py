"""A chunk as one graph. Nothing here has a GPU: buffers are tested with a graph that runs the function again, and what
would forbid a capture with tensors that say they lie on a GPU and hold nothing."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

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


def test_a_graph_is_of_the_device_where_the_policy_lies(monkeypatch):
    """Of a second GPU; what is captured on another stream or device is an empty graph."""
    entered, cuda = [], Mock()

    @contextmanager
    def on(device):
        entered.append(str(device))
        yield
        entered.pop()

    for name in ("Stream", "current_stream", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, stream=None: on(stream))
    cuda.Stream.return_value.__str__ = lambda _: f"stream on {entered}"
    seen = []
    sampler = CapturedSampler(lambda batch, noise, prefix: seen.append(list(entered)) or noise)
    with FAKE:
        sampler({}, torch.zeros(1, 8, 5, device="cuda:1"))
    where = ["cuda:1", "stream on ['cuda:1']"]
    assert seen == [where] * 4 and not entered
    cuda.CUDAGraph.return_value.replay.assert_called_once()


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

"""Sampling at a fixed schedule is the sampling of every flow policy, in few operations."""

import sys
from pathlib import Path

import pytest
import torch
from small_vla import ACTIONS, make_batch, make_policy, make_stats

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools" / "bench"))
from base_models import deep_paligemma, deep_smolvlm
from base_models import make_batch as make_gpu_batch
from counting import Counted, Launched, OneAttention, on_fake_gpu
from inference import on_backbone
from torch._subclasses.fake_tensor import FakeTensorMode

from vla_stack.policies import flow
from vla_stack.policies.processor_vla import make_vla_pre_post_processors


def both(n: int, **options):
    """A policy, the same one made ready for inference, and a batch."""
    plain, ready = make_policy(**options), make_policy(**options)
    ready.for_inference()
    return plain, ready, make_vla_pre_post_processors(plain.config, make_stats())[0](make_batch(n))


def noise(n: int) -> torch.Tensor:
    return torch.randn(n, 8, ACTIONS, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("heads", [1, 4])
def test_chunks_are_the_same(n, heads):
    plain, ready, batch = both(n, heads=heads, depth=3)
    wanted, got = (policy.predict_action_chunk(batch, noise=noise(n)) for policy in (plain, ready))
    assert ready.unrolled is not None and plain.unrolled is None
    torch.testing.assert_close(got, wanted, rtol=0.0, atol=1e-5)


def test_given_actions_are_kept_and_continued_alike():
    plain, ready, batch = both(3, max_delay=3)
    given = torch.arange(8) < torch.tensor([[0], [1], [3]])
    prefix = flow.ActionPrefix(noise(3).flip(0), given)
    wanted, got = (policy.predict_action_chunk(batch, noise(3), prefix) for policy in (plain, ready))
    torch.testing.assert_close(got, wanted, rtol=0.0, atol=1e-5)
    assert torch.equal(got[given], prefix.actions[given])


def test_operations_of_a_chunk_are_few():
    """Three layers and ten steps, as the shipped policy has them; 1,334 as a loop over ``velocity``."""
    _, ready, batch = both(1, depth=3, num_inference_steps=10)
    with torch.inference_mode(), Counted() as counted:
        ready.predict_action_chunk(batch, noise=noise(1))
    assert counted.count <= 920


@pytest.mark.parametrize(("deep", "cameras"), [(deep_paligemma, 3), (deep_smolvlm, 2)], ids=["PaliGemma", "SmolVLM"])
def test_on_a_backbone_of_full_depth(deep, cameras):
    """The chunk is the same but for bfloat16's rounding, in at most 3,000 operations; 7,700 as a loop over modules."""
    policy = on_backbone(deep, cameras)
    batch = make_gpu_batch(policy, 2, torch.device("cpu"), recorded=False)
    batch["observation.language.attention_mask"][0, 30:] = False
    x = torch.randn(2, 50, policy.noise_dim, generator=torch.Generator().manual_seed(1))
    given = flow.ActionPrefix(x.flip(0), torch.arange(50) < torch.tensor([[0], [4]]))
    with torch.no_grad():
        wanted = [policy.predict_action_chunk(batch, x, prefix) for prefix in (None, given)]
        policy.for_inference()
        got = [policy.predict_action_chunk(batch, x, prefix) for prefix in (None, given)]
    for one, other in zip(got, wanted, strict=True):
        moved, expected = (one - x).flatten(1).double(), (other - x).flatten(1).double()
        assert torch.cosine_similarity(moved, expected).min() > 0.9999
    context = policy.encode(batch)
    assert torch.equal(policy.unrolled.sample(context, x), policy.unrolled.sample(context, x))

    fake = FakeTensorMode()
    policy = on_backbone(deep, cameras)
    on_fake_gpu(policy, fake)
    with fake, torch.no_grad(), torch.device("cuda"):
        policy.for_inference()
        batch = make_gpu_batch(policy, 1, torch.device("cuda"), recorded=False)
        with OneAttention(), Launched() as launched:
            policy.predict_action_chunk(batch, noise=torch.zeros(1, 50, policy.noise_dim))
    assert 2500 < launched.count <= 3000


@pytest.mark.parametrize("backbone", [False, True])
def test_an_evaluation_is_one_graph(backbone):
    """Nothing in it makes a compiler fall back to Python, and compiled it is the same."""
    policy, batch = ready_on_backbone(2) if backbone else both(2, depth=2)[1:]
    with torch.inference_mode():
        x = torch.randn(2, policy.horizon, policy.noise_dim, generator=torch.Generator().manual_seed(1))
        context = policy.encode(batch)
        wanted = policy.unrolled.sample(context, x)
        policy.unrolled.velocity = torch.compile(policy.unrolled.velocity, backend="eager", fullgraph=True)
        got = policy.unrolled.sample(context, x)
    torch.testing.assert_close(got, wanted, rtol=0.0, atol=0.05 if backbone else 1e-5)


def ready_on_backbone(layers: int):
    policy = on_backbone(lambda: deep_paligemma(layers, 1), 1)
    policy.for_inference()
    return policy, make_gpu_batch(policy, 2, torch.device("cpu"), recorded=False)


def test_instructions_alike_are_encoded_once_and_padding_is_left_out(monkeypatch):
    """On the CPU; gradients and outcome are those of whole rows."""
    policy = make_policy(depth=3)
    batch = make_vla_pre_post_processors(policy.config, make_stats())[0](make_batch(6))
    seen, forward = [], policy.prefix.text.forward
    monkeypatch.setattr(policy.prefix.text, "forward", lambda t, m: seen.append(tuple(t.shape)) or forward(t, m))

    def outcome():
        policy.zero_grad()
        velocity = policy.velocity(policy.encode(batch), noise(6), torch.full((6,), 0.5))
        velocity.square().mean().backward()
        return velocity.detach(), [p.grad for p in policy.parameters() if p.grad is not None]

    few, gradients = outcome()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    whole, expected = outcome()
    assert seen == [(2, 21), (6, 32)]  # two instructions, the longer one of 21 bytes
    torch.testing.assert_close(few, whole)
    torch.testing.assert_close(gradients, expected)


def test_contexts_of_other_lengths_are_joined():
    policy = make_policy()
    process = make_vla_pre_post_processors(policy.config, make_stats())[0]
    parts = [process({**make_batch(1, seed=i), "task": [task]}) for i, task in enumerate(("go", "pick the red cube"))]
    contexts = [policy.encode(batch) for batch in parts]
    joined, t = type(contexts[0]).joined(contexts), torch.tensor([0.3, 0.8])
    assert contexts[0].mask.shape[1] + 15 == contexts[1].mask.shape[1]
    alone = [policy.velocity(c, noise(2)[i : i + 1], t[i : i + 1]) for i, c in enumerate(contexts)]
    torch.testing.assert_close(policy.velocity(joined, noise(2), t), torch.cat(alone))

"""A policy on a pretrained backbone, exported: in float32, for any batch, adapters merged, weights in files beside."""

import copy
from types import SimpleNamespace

import pytest
import torch
from small_backbone import make_base, make_smolvlm
from small_vla import ACTIONS, ROBOT, make_config, make_observations, make_stats

from vla_stack.errors import UserError
from vla_stack.policies import onnx_export, onnx_write
from vla_stack.policies.backends import load_with
from vla_stack.policies.chunk_policy import load_policy
from vla_stack.policies.embodiment import Embodiment
from vla_stack.policies.modeling_moh import MohPolicy
from vla_stack.policies.onnx_export import example, export, write_graphs
from vla_stack.policies.processor_vla import make_vla_pre_post_processors


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Directory of a policy with adapters, in bfloat16."""
    backbone, source = (tmp_path_factory.mktemp(name) for name in ("backbone", "policy"))
    options = {"train_backbone": "lora", "backbone_dtype": "bfloat16", "lora_targets": ("q_proj", "v_proj")}
    policy = make_base(make_smolvlm(backbone, layers=2), **options, num_inference_steps=2)
    for part in (policy, *make_vla_pre_post_processors(policy.config, make_stats())):
        part.save_pretrained(source)
    return source


@pytest.fixture(scope="module")
def served(source):
    return load_policy(source)


def velocity(policy, batch, noise):
    """Where a chunk leads from its noise, flat; else the noise, which all chunks of it share, decides the cosine."""
    moved = (policy.predict_action_chunk(batch, noise).float() - noise).flatten(1)
    assert moved.abs().mean() > 0.1
    return moved


def noise(n):
    return torch.randn(n, 8, ACTIONS, generator=torch.Generator().manual_seed(n))


def test_a_server_has_the_same_policy_without_adapters(source, served):
    frozen, observations = load_with("torch", source, "cpu"), make_observations(2)
    assert not any("lora" in name for name in frozen.policy.state_dict())
    batch, x = served.preprocess(observations), noise(2)
    assert torch.cosine_similarity(*(velocity(p.policy, batch, x) for p in (frozen, served))).min() > 0.999


# --- Before there are graphs: what they are made of ---


def test_a_policy_in_float32_without_adapters_is_the_same_function(served):
    batch, policy = served.preprocess(make_observations(2)), copy.deepcopy(served.policy)
    onnx_export.to_float32(policy)
    exact = velocity(policy, batch, noise(2))
    assert torch.cosine_similarity(exact, velocity(served.policy, batch, noise(2))).min() > 0.999
    onnx_export.merge_adapters(policy)
    torch.testing.assert_close(velocity(policy, batch, noise(2)), exact, atol=1e-5, rtol=1e-5)
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    assert not [name for name, _ in policy.named_parameters() if "lora" in name]
    assert served.policy.config.backbone_dtype == "bfloat16"


def test_a_traced_prefix_takes_any_batch(served):
    policy, batch = copy.deepcopy(served.policy), served.preprocess(make_observations(3))
    onnx_export.to_float32(policy)
    names = tuple(name for name in batch if name.startswith("observation."))
    graph = onnx_export.PrefixGraph(policy, names)
    with torch.no_grad():
        traced = onnx_write.trace(graph, tuple(batch[name][:2] for name in names)).module()
        for n in (1, 2, 3):
            tensors = [batch[name][:n] for name in names]
            torch.testing.assert_close(traced(*tensors), graph(*tensors), atol=1e-5, rtol=1e-5)


def test_what_cannot_be_traced_is_said(monkeypatch, tmp_path, served):
    def fail(*args, **options):
        raise RuntimeError("a branch on data\nand much more")

    monkeypatch.setattr(torch.export, "export", fail)
    with pytest.raises(UserError, match="prefix.onnx cannot be made of this policy: a branch on data -- serve it with"):
        write_graphs(copy.deepcopy(served.policy), example(served, 3), tmp_path)
    assert not (tmp_path / "onnx.json").exists()


def test_policies_that_are_more_than_two_graphs_are_refused(tmp_path, served):
    robots = [Embodiment(name, ROBOT, {"front": "front"}, (True,) * ACTIONS).to_json() for name in ("a", "b")]
    make_config(embodiments=robots, robot=None)._save_pretrained(tmp_path)
    with pytest.raises(UserError, match="drives several robots.*--backend torch"):
        export(tmp_path, tmp_path / "out")
    mixture = MohPolicy.__new__(MohPolicy)
    torch.nn.Module.__init__(mixture)
    mixture.one_step, mixture.max_delay = False, 0
    mixture.config = SimpleNamespace(type="moh", consensus_ratio=1.1)
    with pytest.raises(UserError, match="mixture of horizons.*--backend torch"):
        write_graphs(mixture, {}, tmp_path / "out")
    with pytest.raises(UserError, match="padded.*--backend torch"):
        write_graphs(served.policy, {"action_dim_is_pad": torch.tensor([[False, True]])}, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- The graphs ---


@pytest.fixture(scope="module")
def exported(source, served, tmp_path_factory):
    """The policy as `vla serve --backend onnx` loads it, and its directory."""
    out = tmp_path_factory.mktemp("onnx")
    # As if this were more than a graph file holds, though not in bfloat16.
    size = sum(4 * p.numel() for name, p in served.policy.named_parameters() if "lora" not in name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnx_write, "LARGEST_INLINE", size - 1)
        export(source, out)
    return load_with("onnx", out, "cpu"), out


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 2, 3])
def test_actions_are_the_same_for_any_batch(served, exported, n):
    batch = served.preprocess(make_observations(n, seed=n))
    wanted, got = (velocity(chunks.policy, batch, noise(n)) for chunks in (served, exported[0]))
    assert torch.cosine_similarity(wanted, got).min() > 0.999
    assert exported[0].infer(make_observations(n), range(n)).actions.shape == (n, 8, ACTIONS)


@pytest.mark.slow
def test_the_graphs_are_exact_and_large_weights_lie_beside_them(exported):
    manifest = exported[0].policy.manifest
    assert manifest.max_error < 1e-5 and manifest.cosine > 0.999 and 0.999 < manifest.cosine_served < 1.0
    for name in ("prefix", "step"):
        assert (exported[1] / f"{name}.onnx.data").stat().st_size > 10_000

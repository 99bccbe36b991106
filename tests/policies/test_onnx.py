"""An exported policy is the same function, in the same kind of directory."""

import json
import shutil
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file
from small_vla import make_observations, make_policy, make_stats

from vla_stack.cli import main as vla
from vla_stack.errors import UserError
from vla_stack.policies import onnx_export
from vla_stack.policies.chunk_policy import ChunkPolicy, load_policy
from vla_stack.policies.directory import write_manifest
from vla_stack.policies.onnx_files import default_backend, open_graph
from vla_stack.policies.onnx_policy import OnnxPolicy
from vla_stack.policies.onnx_write import Graph, write
from vla_stack.policies.plain_export import plain_of
from vla_stack.policies.plain_policy import TOKENS, TOKENS_MASK, Plain, PlainPolicy, load_plain
from vla_stack.policies.processor_gripper import BinaryGripperStep
from vla_stack.policies.processor_vla import make_vla_pre_post_processors
from vla_stack.schema import Continuation, Observation, SchemaError
from vla_stack.verbs.serve import load_directory

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def beside(tmp_path_factory):
    """A policy that takes action prefixes, with its graph beside its weights."""
    source = tmp_path_factory.mktemp("beside")
    policy = make_policy(max_delay=3, num_inference_steps=2)
    for part in (policy, *make_vla_pre_post_processors(policy.config, make_stats())):
        part.save_pretrained(source)
    write_manifest(source)
    assert vla(["export", "--policy", str(source)]) == 0
    return source


@pytest.fixture(scope="module")
def directories(beside, tmp_path_factory):
    """That policy, and its export, which takes the graph along: it is traced once."""
    out = tmp_path_factory.mktemp("onnx")
    assert vla(["export", "--policy", str(beside), "--out", str(out)]) == 0
    return beside, out


@pytest.fixture(scope="module")
def both(directories):
    return [load_policy(directory) for directory in directories]


@pytest.mark.parametrize("n", [1, 2, 5])
def test_actions_are_the_same_for_any_batch(both, n):
    observations, seeds = make_observations(n), list(range(n))
    torch_actions, onnx_actions = (policy.infer(observations, seeds).actions for policy in both)
    np.testing.assert_allclose(onnx_actions, torch_actions, atol=1e-5)


def test_a_prefix_is_kept(both):
    observations = make_observations(2)
    plans = [Continuation("prefix", a[1:], 2, 2) for a in both[0].infer(observations, [1, 2]).actions]
    wanted, got = (policy.infer(observations, [3, 4], plans).actions for policy in both)
    np.testing.assert_allclose(got, wanted, atol=1e-5)
    np.testing.assert_allclose(got[:, :2], [plan.actions[:2] for plan in plans], atol=1e-5)


@pytest.fixture(scope="module")
def plain(directories):
    return load_plain(directories[1], threads=1)


def test_without_torch_it_is_the_same_policy(both, plain):
    exported, observations, seeds = both[1], make_observations(3), [0, 7, 2**40 + 1]
    assert plain.spec == exported.spec
    first = exported.infer(observations, seeds).actions
    np.testing.assert_allclose(plain.infer(observations, seeds).actions, first, atol=1e-5)
    plans = [Continuation("prefix", a[1:], 2, 2) for a in first]
    wanted = exported.infer(observations, [3, 4, 5], plans).actions
    np.testing.assert_allclose(plain.infer(observations, [3, 4, 5], plans).actions, wanted, atol=1e-5)
    some = plain.infer(observations, seeds, [None, plans[1], None]).actions  # a batch may mix them
    np.testing.assert_allclose(some[[0, 2]], first[[0, 2]], atol=1e-5)
    np.testing.assert_allclose(some[1, :2], plans[1].actions[:2], atol=1e-5)


def test_without_torch_actions_may_be_more_than_states(plain):
    robot, few = plain.spec.robot, 3
    short = replace(plain.spec, robot=replace(robot, state=robot.state[:few], cameras=()))
    rows = {"state_mean": plain._plain.state_mean[:few], "state_std": plain._plain.state_std[:few]}
    rows["relative"] = 0 * plain._plain.relative
    around = Plain.from_json(replace(plain._plain, spec=short, **rows).to_json())
    manifest = replace(plain._manifest, inputs=("observation.state",), max_delay=0)
    chunk = np.ones((1, short.horizon, len(robot.action)), np.float32)
    policy = PlainPolicy(manifest, around, SimpleNamespace(run=lambda _, given: [chunk]))
    got = policy.infer([Observation(np.ones(few, np.float32), {}, "push")], [0]).actions
    np.testing.assert_allclose(got, chunk * around.action_std + around.action_mean)


def test_a_policy_that_would_be_another_one_without_torch_does_not_export(beside, tmp_path, monkeypatch):
    def wrong(chunks):
        found = plain_of(chunks)
        return replace(found, state_mean=found.state_mean + 10, action_mean=found.action_mean[::-1] - 10)

    monkeypatch.setattr(onnx_export, "plain_of", wrong)
    with pytest.raises(UserError, match="without torch the policy is another one"):
        onnx_export.export(beside, tmp_path / "out")
    assert not (tmp_path / "out" / "onnx.json").exists()


def test_without_torch_it_refuses_what_the_other_refuses(both, plain):
    long = " ".join("word" for _ in range(200))
    for policy in (both[1], plain):
        with pytest.raises(UserError, match="the policy reads"):
            policy.infer(make_observations(1, task=long), [0])
        with pytest.raises(SchemaError, match="camera 'front' is missing"):
            policy.infer([replace(make_observations(1)[0], images={})], [0])
    with pytest.raises(SchemaError, match="continues no plan by 'rtc'"):
        plain.infer(make_observations(1), [0], [Continuation("rtc", np.zeros((8, 5), np.float32), 1, 1)])


def test_processors_that_do_more_need_torch(both):
    assert plain_of(both[0]) is not None
    steps = both[0].preprocessor.steps
    for changed in (steps[1:], [*steps, steps[-1]], [*steps[:-1], make_gripper_step(), steps[-1]]):
        policy, behind, spec = both[0].policy, both[0].postprocessor, both[0].spec
        assert plain_of(ChunkPolicy(policy, SimpleNamespace(steps=changed), behind, spec)) is None


def make_gripper_step():
    return BinaryGripperStep([4], [0.0], [1.0])


@pytest.mark.parametrize("text", ["hash", "bpe", "frozen"])
def test_words_become_the_same_tokens(text, tmp_path):
    policy = make_policy(text=text)
    for part in (policy, *make_vla_pre_post_processors(policy.config, make_stats())):
        part.save_pretrained(tmp_path)
    chunks = load_policy(tmp_path)
    found = plain_of(chunks)
    assert found is not None
    plain = Plain.from_json(json.loads(json.dumps(found.to_json())))
    texts = ["Pick up, the RED cube!", "", " push "]
    batch = chunks.preprocess([make_observations(1, task=task)[0] for task in texts])
    for got, name in zip(plain.tokens(texts), (TOKENS, TOKENS_MASK), strict=True):
        np.testing.assert_array_equal(got, batch[name].numpy())


@pytest.mark.parametrize(
    "wrong",
    [
        {"state_mean": [0.0]},
        {"action_std": [float("nan")] * 5},
        {"words": 0},
        {"tokenizer": "", "buckets": 0},
        {"tokenizer": "{"},
        {"spec": {}},
        {"epsilon": None},
    ],
)
def test_damage_of_what_surrounds_a_graph_is_named(directories, tmp_path, wrong):
    copy = tmp_path / "copy"
    shutil.copytree(directories[1], copy)
    tree = json.loads((copy / "onnx.json").read_text())
    tree["plain"] |= wrong
    (copy / "onnx.json").write_text(json.dumps(tree))
    with pytest.raises(UserError, match="onnx.json is not what was saved"):
        load_plain(copy, threads=1)
    (copy / "manifest.json").unlink()
    with pytest.raises(UserError, match="onnx.json is damaged.*export the policy again"):
        load_plain(copy, threads=1)


def test_it_describes_itself(directories, both):
    original, exported = (policy.spec for policy in both)
    assert (exported.robot, exported.horizon, exported.d_train_max) == (original.robot, original.horizon, 3)
    assert exported.extras["continues"] == ["prefix"] and exported.model_version != original.model_version
    manifest = json.loads((directories[1] / "onnx.json").read_text())
    assert manifest["cosine"] > 0.999999 and manifest["max_error"] < 1e-5
    assert not (directories[1] / "model.safetensors").exists()


def test_damage_is_named(directories, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(directories[1], copy)
    (copy / "chunk.onnx").write_bytes(b"not a graph")
    with pytest.raises(UserError, match="chunk.onnx is not what was saved"):
        load_policy(copy)
    (copy / "manifest.json").unlink()
    with pytest.raises(UserError, match="chunk.onnx cannot be run"):
        load_policy(copy)
    (copy / "chunk.onnx").unlink()
    with pytest.raises(UserError, match="chunk.onnx is missing.*vla export"):
        load_policy(copy)


def test_a_cuda_device_without_its_provider_is_said(directories):
    if torch.cuda.is_available():
        assert load_policy(directories[1], "cuda").infer(make_observations(1), [0]).actions.shape[0] == 1
    else:
        with pytest.raises(UserError, match="device 'cuda' is not available"):
            load_policy(directories[1], "cuda")


def test_one_of_several_gpus_is_the_one_that_computes(tmp_path, monkeypatch):
    """Providers, inputs and outputs of a machine with two GPUs, by what ONNX Runtime is told."""
    asked = []
    cuda, cpu = "CUDAExecutionProvider", "CPUExecutionProvider"
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: [cuda, cpu])

    def session(file, options, providers):
        asked.append(providers)
        binding = Mock(bind_output=lambda *where: asked.append(where), **{"get_outputs.return_value": ["k"]})
        made = Mock(**{"get_providers.return_value": [cuda, cpu], "io_binding.return_value": binding})
        made.get_outputs.return_value = [SimpleNamespace(name="k")]
        return made

    monkeypatch.setattr("onnxruntime.InferenceSession", session)
    monkeypatch.setattr("onnxruntime.OrtValue.ortvalue_from_numpy", lambda x, *where: asked.append(where) or Mock())
    sizes = {"horizon": 8, "noise_dim": 5, "action_dim": 5, "inference_steps": 1, "max_delay": 0, "noise_scale": 1.0}
    manifest = {"graphs": ["prefix.onnx", "step.onnx"], "inputs": ["observation.state"], **sizes}
    (tmp_path / "onnx.json").write_text(json.dumps(manifest))
    for graph in manifest["graphs"]:
        (tmp_path / graph).touch()
    policy = OnnxPolicy(tmp_path, SimpleNamespace(device="cuda:1"))
    assert asked == [[(cuda, {"device_id": 1}), cpu]] * 2
    asked.clear()
    monkeypatch.setattr(torch, "from_numpy", lambda _: torch.zeros(1, 8, 5))
    policy.predict_action_chunk({"observation.state": torch.zeros(1, 7)}, torch.zeros(1, 8, 5))
    assert asked == [("k", "cuda", 1), *[("cuda", 1)] * 5]


def test_only_flow_policies_are_exported(tmp_path, capsys):
    source = tmp_path / "regression"
    policy = make_policy(head="regression")
    for part in (policy, *make_vla_pre_post_processors(policy.config, make_stats())):
        part.save_pretrained(source)
    assert vla(["export", "--policy", str(source), "--out", str(tmp_path / "out")]) == 1
    assert "is not a flow policy" in capsys.readouterr().err


def test_policy_info_reads_it(directories, capsys):
    assert vla(["policy", "info", str(directories[1]), "--repeats", "1", "--json"]) == 0
    r = json.loads(capsys.readouterr().out)
    assert r["parameters"] == {} and r["horizon"] == 8 and r["euler_steps"] == 2 and set(r["latency_ms"]) == {"chunk"}
    assert vla(["policy", "info", str(directories[1]), "--repeats", "0"]) == 0
    assert "2 Euler steps" in capsys.readouterr().out


def test_a_graph_beside_its_weights_is_what_a_cpu_serves(beside):
    source = beside
    assert [default_backend(source, device) for device in ("cpu", "cuda")] == ["onnx", "torch"]
    weights, graph = load_policy(source), load_directory(source, "cpu", threads=1)
    assert isinstance(graph, PlainPolicy) and isinstance(load_directory(source, "cpu", 1, backend="torch"), ChunkPolicy)
    assert graph.spec.model_version == weights.spec.model_version == load_policy(source, graphs=True).spec.model_version
    observations, seeds = make_observations(3), [1, 2, 3]
    wanted = weights.infer(observations, seeds).actions
    np.testing.assert_allclose(graph.infer(observations, seeds).actions, wanted, atol=1e-4)


def test_a_graph_of_other_weights_is_refused(beside, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(beside, copy)
    weights = load_file(copy / "model.safetensors")
    save_file({name: values + 1 for name, values in weights.items()}, copy / "model.safetensors", {"format": "pt"})
    write_manifest(copy)  # as `vla policy sign` does after a change by hand
    for load in (partial(load_directory, device="cpu", threads=1), partial(load_policy, graphs=True)):
        with pytest.raises(UserError, match="made of other weights.*vla export --policy"):
            load(copy)
    assert isinstance(load_directory(copy, "cpu", 1, backend="torch"), ChunkPolicy)
    assert vla(["export", "--policy", str(copy)]) == 0
    assert isinstance(load_directory(copy, "cpu", 1), PlainPolicy)


def test_an_export_of_its_own_takes_the_graph_beside_the_weights_along(beside, tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_export, "write", None)  # nothing is traced
    assert vla(["export", "--policy", str(beside), "--out", str(tmp_path / "out")]) == 0
    assert isinstance(load_plain(tmp_path / "out", threads=1), PlainPolicy)
    assert not (tmp_path / "out" / "model.safetensors").exists()
    assert onnx_export._has_graph(beside, load_policy(beside).policy, int8=False)
    for change in ({"int8": True}, {"weights": "of others"}, {"inference_steps": 7}):
        graph = json.loads((beside / "onnx.json").read_text()) | change
        monkeypatch.setattr(onnx_export, "read_manifest", lambda _, graph=graph: SimpleNamespace(**graph))
        assert not onnx_export._has_graph(beside, load_policy(beside).policy, int8=False)


def test_a_graph_in_8_bits_is_near_and_smaller(beside, tmp_path):
    exact, near = tmp_path / "exact", tmp_path / "near"
    assert vla(["export", "--policy", str(beside), "--out", str(exact)]) == 0
    assert vla(["export", "--policy", str(beside), "--out", str(near), "--int8"]) == 0
    kinds = [node.op_type for node in onnx.load(near / "chunk.onnx").graph.node]
    assert kinds.count("MatMulInteger") > 2 * kinds.count("MultiHeadAttention") > 0
    assert (near / "chunk.onnx").stat().st_size < (exact / "chunk.onnx").stat().st_size
    policies = [load_plain(directory, threads=1) for directory in (exact, near)]
    wanted, got = (policy.infer(make_observations(3), [1, 2, 3]).actions for policy in policies)
    np.testing.assert_allclose(got, wanted, atol=0.1)
    assert not np.allclose(got, wanted, atol=1e-5)


def test_a_policy_that_its_graph_does_not_replace_keeps_its_weights_alone(tmp_path, capsys):
    policy = make_policy(head="regression")
    for part in (policy, *make_vla_pre_post_processors(policy.config, make_stats())):
        part.save_pretrained(tmp_path)
    before = sorted(tmp_path.iterdir())
    assert vla(["export", "--policy", str(tmp_path)]) == 1
    assert "is not a native VLA" in capsys.readouterr().err and sorted(tmp_path.iterdir()) == before


def test_half_precision_weights_stay_half_where_they_lose_nothing(tmp_path):
    class Layers(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
            self.first.weight.data = self.first.weight.data.half().float()

        def forward(self, x, *rest):
            return self.second(self.first(x).relu()) + rest[0]

    layers, x, file = Layers(), torch.randn(3, 64), tmp_path / "chunk.onnx"
    write(Graph(layers, (x, x), ("x", "rest"), ("y",)), file)
    kinds = [c.data_type for c in onnx.load(file).graph.initializer if np.prod(c.dims) == 64 * 64]
    assert sorted(kinds) == sorted([onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT])
    (got,) = open_graph(file, "cpu", 1).run(None, {"x": x.numpy(), "rest": x.numpy()})
    np.testing.assert_allclose(got, layers(x, x).detach().numpy(), atol=1e-6)

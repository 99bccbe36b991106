"""An exported policy is the same function, in the same kind of directory."""

import json
import shutil

import numpy as np
import pytest
import torch
from small_vla import make_observations, make_policy, make_stats

from vla_stack.cli import main as vla
from vla_stack.errors import UserError
from vla_stack.policies.chunk_policy import load_policy
from vla_stack.policies.processor_vla import make_vla_pre_post_processors
from vla_stack.schema import Continuation

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """A policy that takes action prefixes, and its export."""
    source, out = (tmp_path_factory.mktemp(name) for name in ("policy", "onnx"))
    policy = make_policy(max_delay=3)
    for part in (policy, *make_vla_pre_post_processors(policy.config, make_stats())):
        part.save_pretrained(source)
    assert vla(["export", "--policy", str(source), "--out", str(out)]) == 0
    return source, out


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
    assert r["parameters"] == {} and r["horizon"] == 8 and r["euler_steps"] == 3 and set(r["latency_ms"]) == {"chunk"}
    assert vla(["policy", "info", str(directories[1]), "--repeats", "0"]) == 0
    assert "3 Euler steps" in capsys.readouterr().out

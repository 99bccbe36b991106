"""Policies on states, exported: one graph of observation and noise, in which a seed means what it means in torch."""

import numpy as np
import pytest
import torch
from lerobot.policies import make_pre_post_processors
from small_vla import ACTIONS, STATES, make_observations, make_policy, make_stats
from test_state_policies import expo, gaussian, observations, save, state_flow

from vla_stack.cli import main as vla
from vla_stack.policies.backends import load_with
from vla_stack.policies.chunk_policy import ChunkPolicy, load_policy
from vla_stack.policies.configuration_expo import ExpoConfig
from vla_stack.policies.configuration_state import StateGaussianConfig
from vla_stack.policies.modeling_expo import ExpoPolicy
from vla_stack.policies.modeling_state import StateGaussianPolicy
from vla_stack.policies.processor_state import state_processors
from vla_stack.policies.processor_vla import make_vla_pre_post_processors
from vla_stack.schema import PolicySpec, RobotSpec

pytestmark = pytest.mark.slow


def exploring():
    return gaussian(noise_scale=1.0)


def unedited():
    return expo(edits=0, samples=1)


def judged_by_all():
    return expo(subset=4, unedited=False)


def exported(source, out):
    assert vla(["export", "--policy", str(source), "--out", str(out)]) == 0
    return [load_policy(source), load_with("onnx", out, "cpu")]


@pytest.mark.parametrize("make", [exploring, state_flow, expo, unedited, judged_by_all])
def test_seeds_give_the_same_chunks(tmp_path, capsys, make):
    torch.manual_seed(0)
    save(make(), tmp_path / "policy")
    both = exported(tmp_path / "policy", tmp_path / "onnx")
    assert "cosine 1.000000" in capsys.readouterr().out
    assert {file.name for file in (tmp_path / "onnx").glob("*.onnx")} == {"chunk.onnx"}
    for n in (1, 2, 7):
        wanted, got = (policy.infer(observations(n), list(range(n))).actions for policy in both)
        np.testing.assert_allclose(got, wanted, atol=1e-5)
    assert both[0].spec.robot == both[1].spec.robot and both[0].spec.extras.keys() == both[1].spec.extras.keys()


def small_vla():
    """A policy that sees and reads, its preprocessor, and a batch for it."""
    policy = make_policy(num_inference_steps=1, depth=1)
    pre, post = make_vla_pre_post_processors(policy.config, make_stats())
    spec = PolicySpec(RobotSpec.from_json(policy.config.robot), policy.horizon)
    batch = ChunkPolicy(policy, pre, post, spec).preprocess(make_observations(1))
    return policy, pre, batch


def on_pictures():
    """EXPO around it, and processors."""
    base, _, batch = small_vla()
    width = base.observed(base.encode(batch), batch).shape[-1]
    config = ExpoConfig(
        base=base.config, feature_dim=width, samples=2, edits=1, num_critics=2, subset=2, n_action_steps=4,
        device="cpu", robot=base.config.robot, edit_hidden=(8,), critic_hidden=(8,), push_to_hub=False,
    )  # fmt: skip
    return ExpoPolicy(config, base), *make_pre_post_processors(config, dataset_stats=make_stats())


def behind_an_encoder():
    """A Gaussian of its features, and processors."""
    encoder, pre, batch = small_vla()
    width = encoder.features(encoder.encode(batch)).shape[-1]
    config = StateGaussianConfig(
        input_features=encoder.config.input_features, output_features=encoder.config.output_features, chunk_size=3,
        n_action_steps=2, hidden=(8,), encoder=encoder.config, feature_dim=width, robot=encoder.config.robot,
        device="cpu", push_to_hub=False,
    )  # fmt: skip
    scales = np.zeros(STATES), np.ones(STATES), -np.ones(ACTIONS), np.ones(ACTIONS)
    return StateGaussianPolicy(config, encoder=encoder), *state_processors(config, *scales, pre)


@pytest.mark.parametrize("make", [on_pictures, behind_an_encoder])
def test_so_does_what_sees_through_a_vla(tmp_path, make):
    torch.manual_seed(0)
    for part in make():
        part.save_pretrained(tmp_path / "policy")
    both = exported(tmp_path / "policy", tmp_path / "onnx")
    for n in (1, 3):
        wanted, got = (policy.infer(make_observations(n), list(range(n))).actions for policy in both)
        np.testing.assert_allclose(got, wanted, atol=1e-4)

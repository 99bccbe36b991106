"""Inference for servers and evaluations: seeds, batches, descriptions, errors, other LeRobot policies."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.policies import get_policy_class, make_policy_config, make_pre_post_processors
from small_vla import ACTIONS, ROBOT, SIZE, STATES, make_observations, make_stats

from vla_stack.errors import UserError
from vla_stack.policies.chunk_policy import load_policy
from vla_stack.policies.directory import resolve_policy, resolve_source
from vla_stack.policies.registry import QUEUED, is_known
from vla_stack.schema import ACTION, OBS_STATE, Observation, SchemaError, image_key


@pytest.fixture(scope="module")
def chunk_policy(saved):
    return load_policy(saved)


@pytest.fixture(scope="module")
def act(tmp_path_factory):
    """A small ACT policy, which knows nothing of robots and takes no noise."""
    path = tmp_path_factory.mktemp("act")
    features = {image_key("front"): PolicyFeature(FeatureType.VISUAL, (3, SIZE, SIZE))}
    config = make_policy_config(
        "act",
        device="cpu",
        push_to_hub=False,
        input_features=features | {OBS_STATE: PolicyFeature(FeatureType.STATE, (STATES,))},
        output_features={ACTION: PolicyFeature(FeatureType.ACTION, (ACTIONS,))},
        pretrained_backbone_weights=None,
        chunk_size=6,
        n_action_steps=6,
        dim_model=32,
        n_heads=2,
        dim_feedforward=32,
        n_encoder_layers=1,
        latent_dim=4,
        n_vae_encoder_layers=1,
    )
    stats = {k: {n: torch.from_numpy(v) for n, v in s.items()} for k, s in make_stats().items()}
    stats[image_key("front")] = {"mean": torch.full((3, 1, 1), 0.5), "std": torch.full((3, 1, 1), 0.2)}
    torch.manual_seed(0)
    for part in (get_policy_class("act")(config), *make_pre_post_processors(config, dataset_stats=stats)):
        part.save_pretrained(path)
    return load_policy(path)


def test_spec_tells_the_robot_and_the_weights(chunk_policy, saved):
    spec = chunk_policy.spec
    assert spec.robot == ROBOT and spec.horizon == 8
    modes = ["rtc", "rtc_identity", "bid"]
    assert spec.extras == {"type": "vla", "n_action_steps": 4, "continues": modes, "noise_scale": 1.0}
    assert spec.d_train_max == 0
    assert len(spec.normalisation) == len(spec.model_version) == 16
    assert load_policy(saved).spec == spec


def test_a_chunk_does_not_depend_on_its_batch(chunk_policy):
    observations, seeds = make_observations(5), [7, 1, 7, 3, 9]
    together = chunk_policy.infer(observations, seeds).actions
    assert together.dtype == np.float32 and together.shape == (5, 8, ACTIONS)
    for i, (observation, seed) in enumerate(zip(observations, seeds, strict=True)):
        np.testing.assert_allclose(chunk_policy.infer([observation], [seed]).actions[0], together[i], atol=1e-5)


def test_a_seed_decides_the_sample(chunk_policy):
    same = make_observations(1) * 3
    chunks = chunk_policy.infer(same, [1, 1, 2]).actions
    np.testing.assert_array_equal(chunks[0], chunks[1])
    assert np.abs(chunks[0] - chunks[2]).max() > 1e-3


def test_global_generators_are_left_alone(chunk_policy, act):
    before = torch.random.get_rng_state()
    chunk_policy.infer(make_observations(1), [0])
    act.infer(make_observations(1), [0])
    assert torch.equal(before, torch.random.get_rng_state())


def test_commands_are_relative_to_the_state(chunk_policy):
    """The same pictures at a state that the network sees as equal, but shifted: commands shift with it."""
    (observation,) = make_observations(1)
    far = dataclasses.replace(observation, state=np.full(STATES, 1e3, np.float32))
    farther = dataclasses.replace(observation, state=np.full(STATES, 2e3, np.float32))
    moved = chunk_policy.infer([farther], [0]).actions - chunk_policy.infer([far], [0]).actions
    np.testing.assert_allclose(moved[..., :4], 1e3, rtol=1e-5)
    np.testing.assert_allclose(moved[..., 4], 0.0, atol=1e-5)  # the gripper is absolute


def test_missing_camera_and_wrong_size_are_named(chunk_policy):
    (observation,) = make_observations(1)
    front = {"front": observation.images["front"]}
    with pytest.raises(SchemaError, match=r"camera 'wrist' is missing; the observation has \['front'\]"):
        chunk_policy.infer([dataclasses.replace(observation, images=front)], [0])
    large = {**observation.images, "wrist": np.zeros((48, 64, 3), np.uint8)}
    with pytest.raises(SchemaError, match=r"camera 'wrist' is uint8\[48, 64, 3\], expected uint8\[32, 32, 3\]"):
        chunk_policy.infer([dataclasses.replace(observation, images=large)], [0])


def test_other_lerobot_policies_are_chunk_policies(act):
    spec = act.spec
    assert spec.horizon == 6 and spec.extras["type"] == "act"
    assert [c.name for c in spec.robot.cameras] == ["front"]
    assert (len(spec.robot.state), len(spec.robot.action)) == (STATES, ACTIONS)
    observations = make_observations(3)
    together = act.infer(observations, [0, 1, 2]).actions
    assert together.shape == (3, 6, ACTIONS)
    np.testing.assert_allclose(act.infer(observations[1:2], [1]).actions[0], together[1], atol=1e-5)


def test_a_repository_of_the_hub_is_fetched_without_anything_that_could_run(saved, tmp_path, monkeypatch):
    asked = []

    def snapshot(repository, allow_patterns):
        asked.append((repository, allow_patterns))
        if repository != "someone/policy":
            raise FileNotFoundError("not there")
        return str(saved)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    monkeypatch.chdir(tmp_path)
    assert load_policy("someone/policy").spec == load_policy(saved).spec
    assert all(not p.endswith((".py", ".bin", ".pt", ".pkl")) for p in asked[0][1])
    with pytest.raises(UserError, match="'someone/other' is no directory here, and config.json cannot be had"):
        resolve_policy("someone/other")
    with pytest.raises(UserError, match="holds no policy"):
        resolve_policy("/someone/policy")
    assert [repository for repository, _ in asked] == ["someone/policy", "someone/other"]


def test_directories_that_are_no_policy_are_named(saved, tmp_path):
    with pytest.raises(UserError, match="holds no policy .no config.json.*pretrained_model"):
        load_policy(tmp_path)
    (tmp_path / "config.json").write_text((saved / "config.json").read_text())
    with pytest.raises(UserError, match="holds no weights .model.safetensors is missing"):
        load_policy(tmp_path)
    config = json.loads((saved / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "type": "nonsense"}))
    (tmp_path / "model.safetensors").write_bytes((saved / "model.safetensors").read_bytes())
    with pytest.raises(UserError, match="'type' is 'nonsense'.*the types are act"):
        load_policy(tmp_path)


@pytest.mark.parametrize("kind", QUEUED)
def test_policies_without_chunks_are_refused_before_a_robot_waits_for_one(kind, tmp_path):
    assert is_known(kind)
    make_policy_config(kind, device="cpu", push_to_hub=False).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"policy '{kind}' gives one action a call.*lerobot-eval"):
        load_policy(tmp_path)


@pytest.mark.parametrize("device", ["gpu", "cuda:77"])
def test_a_device_that_is_not_there_is_named_first(device, tmp_path):
    with pytest.raises(UserError, match=f"device '{device}' is not available.*'cpu' runs anywhere"):
        load_policy(tmp_path, device)


def test_a_run_directory_is_a_name_of_its_policy(saved, tmp_path):
    (tmp_path / "checkpoints" / "last").mkdir(parents=True)
    (tmp_path / "checkpoints" / "last" / "pretrained_model").symlink_to(saved)
    assert load_policy(tmp_path, "auto").spec == load_policy(saved).spec


@pytest.mark.parametrize("name", ["lerobot/smolvla_base", "gpt2"])
def test_names_of_the_hub_stay_what_they_are(name):
    assert resolve_source(name) == name


@pytest.mark.parametrize("name", ["runs/pick/last", "./pick", "../pick", "/pick", "~/pick", "tests", "tests/policies"])
def test_what_can_be_no_name_of_the_hub_is_a_directory(name):
    with pytest.raises(UserError, match="holds no policy"):
        resolve_source(name)


def test_the_shipped_policy_says_what_it_said_when_it_was_trained():
    """Directories of one robot load and infer as ever, whatever is added to the code for others."""
    policy = load_policy(resolve_policy("shipped"))
    rng, robot = np.random.default_rng(0), policy.spec.robot
    state = rng.uniform(-0.5, 0.5, len(robot.state)).astype(np.float32)
    images = {c.name: rng.integers(0, 256, (c.height, c.width, 3), np.uint8) for c in robot.cameras}
    chunk = policy.infer([Observation(state, images, "pick up the red cube")], seeds=[3]).actions[0]
    np.testing.assert_allclose(chunk[0], [0.1397729, -0.2244374, -0.4371670, -0.4722870, 0.0023299], atol=1e-4)
    np.testing.assert_allclose(chunk[-1], [0.1425648, -0.2208626, -0.3696134, -0.4580518, 0.0081706], atol=1e-4)
    assert policy.spec.normalisation == "afacbb51f3fdd358"

"""Reinforcement learning on the features of a frozen policy."""

import numpy as np
import pytest
import torch
from lerobot.configs import FeatureType, PolicyFeature
from small_vla import make_config, make_stats

import sim
from vla_stack.envs.making import observe
from vla_stack.errors import UserError
from vla_stack.methods.off_policy.collecting import rows_of
from vla_stack.methods.off_policy.deployed import frozen_policy, measured
from vla_stack.methods.wsrl import Wsrl
from vla_stack.policies.chunk_policy import load_policy
from vla_stack.policies.modeling_vla import VlaPolicy
from vla_stack.policies.processor_vla import make_vla_pre_post_processors
from vla_stack.schema import ACTION, OBS_STATE, Observation, image_key
from vla_stack.training.recipe import TaskRecipe


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A small policy of the native arm's robot, one camera."""
    robot = sim.TASKS["pick"].arm.spec("ee_abs", ("wrist",), 32, 10.0, False)
    inputs = {OBS_STATE: PolicyFeature(FeatureType.STATE, (12,))}
    inputs[image_key("wrist")] = PolicyFeature(FeatureType.VISUAL, (3, 32, 32))
    names = [d.name for d in robot.action]
    config = make_config(input_features=inputs, robot=robot.to_json(), action_feature_names=names)
    stats = make_stats()
    stats[OBS_STATE] = {"mean": np.zeros(12, np.float32), "std": np.ones(12, np.float32)}
    assert len(stats[ACTION]["mean"]) == len(names)
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("policy")
    for part in (VlaPolicy(config), *make_vla_pre_post_processors(config, stats)):
        part.save_pretrained(path)
    return path


def test_observations_are_features_state_and_command(saved):
    frozen, policy = frozen_policy(str(saved)), load_policy(saved)
    rows = rows_of(TaskRecipe("sim/pick-v0"), Wsrl(), frozen)
    first = rows.reset([0], [3])[0]
    raw, task = first.observation, first.info["task"]
    obs = measured([observe(raw, rows.robot, task, 0)], frozen)[0]
    seen = Observation(raw["agent_pos"][:12], {"wrist": raw["pixels"]["wrist"]}, task)
    with torch.inference_mode():
        wanted = policy.policy.features(policy.policy.encode(policy.preprocess([seen])))[0].numpy()
    np.testing.assert_allclose(obs[: len(wanted)], wanted, atol=1e-5)
    np.testing.assert_array_equal(obs[len(wanted) :], raw["agent_pos"])
    assert len(raw["agent_pos"]) == 12 + 5
    after = rows.step([0], np.ones((1, 5), np.float32))[0].observation
    assert not np.allclose(measured([observe(after, rows.robot, task, 1)], frozen)[0], obs)


def test_a_folder_without_a_policy_is_refused(tmp_path):
    with pytest.raises(UserError, match="holds no policy"):
        frozen_policy(str(tmp_path))

"""Reinforcement learning in a world model: steered as the simulator is, evaluated in the simulator."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from lerobot.configs import FeatureType, PolicyFeature
from small_vla import make_config, make_stats

import sim
from sim.arm import ARM7
from vla_stack import envs
from vla_stack.errors import UserError
from vla_stack.evaluation.evaluate import evaluate
from vla_stack.methods.off_policy.collecting import options_of, practised
from vla_stack.methods.off_policy.loop import OffPolicyLoop
from vla_stack.methods.practice import simulated, time_limit
from vla_stack.methods.reinflow.loop import ReinFlowLoop
from vla_stack.policies.chunk_policy import load_policy
from vla_stack.policies.modeling_vla import VlaPolicy
from vla_stack.policies.processor_vla import make_vla_pre_post_processors
from vla_stack.runtime.executor import ExecutorConfig
from vla_stack.schema import OBS_STATE, image_key
from vla_stack.training.recipe import TaskRecipe, make
from vla_stack.world_model.dynamics import DynamicsConfig
from vla_stack.world_model.heads import HeadsConfig
from vla_stack.world_model.model import Limits, WorldConfig, WorldModel
from vla_stack.world_model.model import load as load_world
from vla_stack.world_model.poses import PoseScale
from vla_stack.world_model.steered import SteeredEnv
from vla_stack.world_model.vae import VaeConfig

SIZE, HZ = 32, 20.0  # not the rate that the task has of its own


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random world model of picking."""
    torch.manual_seed(0)
    config = WorldConfig(
        "sim/pick-v0",
        tuple(sim.TASKS["pick"].instructions),
        PoseScale((0.2, -0.3, 0.0), (0.7, 0.3, 0.3)),
        VaeConfig(channels=3, stem=2, widths=(8, 8)),
        DynamicsConfig(history=2, future=3, width=8, blocks=1, heads=2, patch=2, members=2),
        HeadsConfig(width=8, judges=1),
        limits=Limits(success=2.0),
    )
    path = tmp_path_factory.mktemp("world")
    WorldModel(config, ARM7.spec("ee_abs", ("front", "wrist"), SIZE, HZ)).save(path)
    return f"imagined:{path}"


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random flow policy that looks through the wrist's camera."""
    robot = ARM7.spec("ee_abs", ("wrist",), SIZE, HZ)
    inputs = {OBS_STATE: PolicyFeature(FeatureType.STATE, (12,))}
    inputs[image_key("wrist")] = PolicyFeature(FeatureType.VISUAL, (3, SIZE, SIZE))
    names = [d.name for d in robot.action]
    config = make_config(input_features=inputs, robot=robot.to_json(), action_feature_names=names)
    stats = make_stats() | {OBS_STATE: {"mean": np.zeros(12, np.float32), "std": np.ones(12, np.float32)}}
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("policy")
    for part in (VlaPolicy(config), *make_vla_pre_post_processors(config, stats)):
        part.save_pretrained(path)
    return str(path)


def test_the_same_actions_are_the_same_commands_in_both(world: str) -> None:
    imagined = SteeredEnv(world, ("wrist",), SIZE)
    simulated = gym.make("sim/pick-v0", control_mode="ee_delta", cameras=(), control_hz=HZ).unwrapped
    assert imagined.action_space == simulated.action_space and imagined.spec_robot.rate_hz == HZ
    imagined.reset(seed=3)
    simulated.reset(seed=3)
    rng = np.random.default_rng(0)
    for _ in range(6):
        action = rng.uniform(-1.5, 1.5, 5).astype(np.float32)  # clipped
        imagined.step(action)
        simulated.step(action)
        np.testing.assert_allclose(imagined.tool_command, simulated.tool_command, atol=1e-4)


def test_practice_is_imagined_and_evaluations_are_not(world: str, policy: str, tmp_path: Path) -> None:
    sac = {"actor": [8], "critic": [8], "num_critics": 2, "batch": 8, "utd": 1, "layer_norm": True}
    expo = {"sac": sac, "base": [8], "base_steps": 2, "samples": 2, "edits": 1}
    own = {"name": "expo", **expo, "features": policy, "offline": {"episodes": 1}, "steps": 8, "horizon": 2}
    task = {"id": world, "options": {"max_episode_steps": 4}}
    where = {"task": task, "eval": {"every": 8, "episodes": 1, "num_envs": 1}, "device": "cpu"}
    loop = OffPolicyLoop(make({**where, "method": own}, "test"), tmp_path / "run")
    loop.run()
    assert loop.step == 8
    saved = load_policy(tmp_path / "run" / "checkpoints" / "last" / "pretrained_model")
    assert saved.policy.config.base.encoder.type == "vla" and saved.spec.robot.rate_hz == HZ
    seed, options = loop.recipe.eval.seed, options_of(loop.task, loop.method)
    again = evaluate(saved, "sim/pick-v0", 1, seed, ExecutorConfig("sync"), env_options=options)
    assert again.success_rate == loop.evaluate()["success"]

    imagined = envs.make(practised(make({"task": world, "method": {**own}, "eval": {"every": 40}}, "test")).id)
    assert imagined.robot.state == loop.seen.robot.state and imagined.robot.action == loop.seen.robot.action
    assert time_limit(imagined.row(0)) == sim.TASKS["pick"].limit(HZ) == 2 * sim.TASKS["pick"].limit(10)


def test_reinflow_practises_in_the_world_model(world: str, policy: str, tmp_path: Path) -> None:
    given = {"task": world, "policy": policy, "device": "cpu", "threads": 1, "eval": {"episodes": 2}}
    loop = ReinFlowLoop(make({**given, "method": {"name": "reinflow", "num_envs": 2}}, "test"), tmp_path)
    assert loop.plan.env_id == world and len(loop.practise([0, 1]).success) == 2
    assert len(loop.evaluate()["eval_success"]) == 2  # in the task itself
    with pytest.raises(UserError, match="has judges of its own"):
        make({**given, "method": {"name": "reinflow", "judge": "run"}}, "test")


def test_what_does_not_go_together_is_said(world: str, policy: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no world model"):
        simulated(TaskRecipe(f"imagined:{tmp_path}"))
    model = load_world(world.removeprefix("imagined:"))
    model.config = replace(model.config, env="")
    model.save(tmp_path / "real")
    for of in (simulated, lambda task: envs.make(task.id.replace("imagined", "steered"))):
        with pytest.raises(UserError, match="the world model is of ''"):  # a real robot's has no simulated task
            of(TaskRecipe(f"imagined:{tmp_path / 'real'}"))
    with pytest.raises(UserError, match="front in 32 pixels, wrist in 32 pixels.*looks at wrist in 64"):
        SteeredEnv(world, ("wrist",), 64)

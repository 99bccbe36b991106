"""Vector environments, and the tasks as LeRobot environments."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from vla_stack.errors import UserError


def make_pick():
    return gym.make("sim/pick-v0", image_size=32, max_episode_steps=4)


@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
def test_vector_environments_in_every_autoreset_mode(kind, mode):
    envs = kind([make_pick] * 2, autoreset_mode=mode)
    try:
        obs, _ = envs.reset(seed=[1, 2])
        start = obs["agent_pos"][:, :5].copy()
        for step in range(1, 5):
            obs, _, _, truncated, info = envs.step(start)
            assert truncated.all() == (step == 4)
        assert obs["pixels"]["wrist"].shape == (2, 32, 32, 3)
        if mode is AutoresetMode.DISABLED:
            obs, info = envs.reset(options={"reset_mask": np.array([True, False])})
        else:
            obs, _, _, truncated, info = envs.step(start)
        assert obs["agent_pos"].shape == (2, 12) and len(envs.call("task_description")) == 2
    finally:
        envs.close()


def test_vector_and_single_environments_agree():
    envs = SyncVectorEnv([make_pick] * 2)
    obs, _ = envs.reset(seed=[5, 6])
    alone, _ = make_pick().reset(seed=6)
    assert (obs["pixels"]["front"][1] == alone["pixels"]["front"]).all()
    envs.close()


@pytest.mark.slow
def test_lerobot_environment_speaks_its_names():
    import draccus
    from lerobot.envs.configs import EnvConfig
    from lerobot.envs.utils import preprocess_observation

    import sim.lerobot_env

    config = draccus.decode(EnvConfig, {"type": "vla_sim", "task": "place", "episode_length": 7})
    envs = config.create_envs(n_envs=2)["vla_sim"][0]
    obs, _ = envs.reset(seed=[0, 1])
    batch = preprocess_observation(obs)
    assert {k: tuple(v.shape) for k, v in batch.items()} == {
        "observation.images.front": (2, 3, 64, 64),
        "observation.images.wrist": (2, 3, 64, 64),
        "observation.state": (2, 12),
    }
    assert set(envs.call("task_description")) <= set(sim.TASKS["place"].instructions)
    assert envs.call("_max_episode_steps") == (7, 7) and envs.unwrapped.metadata["render_fps"] == 10
    assert "is_success" in envs.step(obs["agent_pos"][:, :5])[4]
    envs.close()


@pytest.mark.parametrize(("fps", "length", "steps"), [(10, None, 80), (20, None, 160), (20, 7, 7)])
def test_lerobot_environment_has_the_tasks_seconds(fps, length, steps):
    from sim.lerobot_env import VlaSimEnv

    assert VlaSimEnv(task="place", fps=fps, episode_length=length).gym_kwargs["max_episode_steps"] == steps


def test_lerobot_environment_refuses_an_unknown_task():
    from sim.lerobot_env import VlaSimEnv

    with pytest.raises(UserError, match="env.task='fly'"):
        VlaSimEnv(task="fly")

"""State observations: what they say is what the simulator knows, and nothing else changes."""

import gymnasium as gym
import numpy as np
import pytest

import sim
from sim.privileged import DIMS


def make(task, **kwargs):
    return gym.make(sim.TASKS[task].id, cameras=(), **kwargs).unwrapped


@pytest.mark.parametrize("task", list(sim.TASKS))
def test_poses_follow_the_robots_own_state(task):
    env, plain = make(task, privileged=True), make(task)
    obs, own = env.reset(seed=5)[0]["agent_pos"], plain.reset(seed=5)[0]["agent_pos"]
    np.testing.assert_array_equal(obs[: len(own)], own)
    assert [d.name for d in env.spec_robot.state[len(own) :]] == [d.name for d in DIMS]
    assert env.observation_space["agent_pos"].shape == obs.shape == (len(own) + len(DIMS),)

    for row, body in zip(obs[len(own) : -1].reshape(2, 5), env.subjects, strict=True):
        np.testing.assert_allclose(row[:3] + env.tool[:3], env.position(body), atol=1e-6)
        assert np.arctan2(row[3], row[4]) == pytest.approx(env.yaw(body, np.pi / 2), abs=1e-6)
    assert obs[-1] == 0.0


def test_the_drawers_opening_is_its_goals_joint():
    env = make("drawer", privileged=True, control_mode="joint_abs")
    env.reset(seed=0)
    env.data.joint("drawer").qpos[0] = 0.07
    obs = env.step(np.append(env.joint_command, 1.0).astype(np.float32))[0]["agent_pos"]
    assert env.spec_robot.state[-1].name == "goal_joint"
    assert obs[-1] == pytest.approx(env.opening, abs=1e-6) and obs[-1] > 0.05


def test_subjects_are_those_that_the_instruction_names():
    env = make("stack", privileged=True)
    env.reset(seed=0, options={"variant": {"colour": "blue", "base": "red"}})
    assert env.subjects == ("cube_blue", "cube_red")

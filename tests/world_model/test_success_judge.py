"""Success by the judges of a world model: they see every picture in order, and the task's own success is nothing."""

from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
import torch
from world_toys import ROBOT, SIZE, TASKS

from sim.tasks.pick import Pick
from vla_stack.errors import UserError
from vla_stack.methods.off_policy.state_env import EnvRecipe, StateEnv
from vla_stack.world_model.dynamics import DynamicsConfig
from vla_stack.world_model.heads import HeadsConfig
from vla_stack.world_model.model import Limits, WorldConfig, WorldModel
from vla_stack.world_model.poses import PoseScale
from vla_stack.world_model.success import Judged, showing
from vla_stack.world_model.vae import VaeConfig


def saved(directory, tasks=TASKS, robot=ROBOT, limits=Limits()):
    """A world model with random judges."""
    config = WorldConfig(
        env="sim/pick-v0",
        tasks=tasks,
        poses=PoseScale((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
        vae=VaeConfig(stem=2, widths=(8,), channels=4),
        dynamics=DynamicsConfig(history=2, future=2, width=8, blocks=1, heads=2, patch=2, members=1),
        heads=HeadsConfig(width=8, judges=2, window=4),
        limits=limits,
    )
    torch.manual_seed(0)
    model = WorldModel(config, robot)
    model.save(directory)
    return model


class Film(gym.Env):
    """Noise, whatever one does; done by its own account at the second step, and failed at the eighth."""

    spec_robot, task_variants, task = ROBOT, TASKS, TASKS[1]
    action_space = gym.spaces.Box(-1.0, 1.0, (1,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.k, self.frames = 0, []
        return self.shot(), {"task": self.task, "is_success": False}

    def step(self, action):
        self.k += 1
        return self.shot(), 7.0, self.k in (2, 8), False, {"task": self.task, "is_success": self.k == 2}

    def shot(self):
        self.frames.append(self.np_random.integers(0, 255, (2, SIZE, SIZE, 3), dtype=np.uint8))
        return {
            "agent_pos": np.zeros(12, np.float32),
            "pixels": dict(zip(("front", "wrist"), self.frames[-1], strict=True)),
        }


def lived(env):
    env.reset(seed=4)
    steps = []
    while not steps or not (steps[-1][2] or steps[-1][3]):
        steps.append(env.step(np.zeros(1)))
    return [(reward, info["is_success"]) for _, reward, _, _, info in steps]


def test_success_is_the_judges_threshold_over_the_film_so_far(tmp_path):
    model = saved(tmp_path / "never", limits=Limits(success=1.1))
    env = Film()
    assert lived(Judged(env, str(tmp_path / "never"))) == [(0.0, False)] * 8  # its own success ends nothing
    with torch.inference_mode():
        p, _ = model.heads.success(torch.from_numpy(np.stack(env.frames))[None], torch.tensor([1]))
    film = p[0, 1:].numpy()
    at = int(film.argmax())
    saved(tmp_path / "once", limits=Limits(success=float(film[at]) - 1e-6))
    steps = lived(Judged(env, str(tmp_path / "once")))
    assert steps == [(0.0, False)] * at + [(1.0, True)]


def test_a_recipe_names_the_judges_and_shows_the_policy_nothing_of_them(tmp_path):
    saved(tmp_path / "yes", tuple(Pick.instruct(v) for v in Pick.variants), limits=Limits(success=-1.0))
    recipe = EnvRecipe("sim/pick-v0", reward="step", judge=str(tmp_path / "yes"))
    judged, plain = StateEnv(recipe), StateEnv(replace(recipe, judge=""))
    np.testing.assert_array_equal(judged.reset(3), plain.reset(3))
    action = np.zeros(judged.action_dim, np.float32)
    a, b = judged.step(action), plain.step(action)
    np.testing.assert_array_equal(a[0], b[0])
    assert a[1:] == (0.0, True, False) and b[1:] == (-1.0, False, False) and judged.success
    with pytest.raises(UserError, match="method.reward=own pays none"):
        StateEnv(replace(recipe, reward="own"))
    with pytest.raises(UserError, match="CartPole-v1 is none"):
        StateEnv(replace(recipe, id="CartPole-v1"))
    with pytest.raises(UserError, match="see pictures of 16 pixels, the policy such of 32"):
        showing(recipe.judge, {"cameras": ("wrist",), "image_size": 32})


def test_judges_of_something_else_are_refused(tmp_path):
    saved(tmp_path / "red", TASKS[:1])
    with pytest.raises(UserError, match="do not know 'pick up the blue cube' -- they know 'pick up the red cube'"):
        Judged(Film(), str(tmp_path / "red"))
    saved(tmp_path / "slow", robot=replace(ROBOT, rate_hz=5.0))
    with pytest.raises(UserError, match="learnt at 5 Hz, the task runs at 10 Hz -- make it with control_hz=5"):
        Judged(Film(), str(tmp_path / "slow"))
    with pytest.raises(UserError, match="holds no world model"):
        Judged(Film(), str(tmp_path))

"""Success by the judges of a world model: they see every picture in order, and the task's own success is nothing."""

from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
import torch
from world_toys import ROBOT, SIZE, TASKS

from sim.tasks.pick import Pick
from vla_stack import envs
from vla_stack.envs.making import observe
from vla_stack.errors import UserError
from vla_stack.methods.off_policy.collecting import plan_of, practised, rows_of
from vla_stack.methods.practice import paid
from vla_stack.training.recipe import Recipe, make
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


def recipe(task, **method) -> Recipe:
    return make({"task": task, "method": {"name": "wsrl", **method}, "eval": {"every": 1}}, "test")


def test_a_recipe_names_the_judges_and_shows_the_policy_nothing_of_them(tmp_path):
    saved(tmp_path / "yes", tuple(Pick.instruct(v) for v in Pick.variants), limits=Limits(success=-1.0))
    judge, shown = str(tmp_path / "yes"), []
    for name in (judge, ""):
        made = recipe("sim/pick-v0", judge=name)
        robot = rows_of(made.task, made.method, None).robot
        plan = plan_of(practised(made), made.method, robot)
        rows = envs.make(plan.env_id, 1, plan.policy, plan.options)
        first, after = rows.reset([0], [3])[0], rows.step([0], np.zeros((1, 5), np.float32))[0]
        shown.append(([observe(step.observation, robot, "", 0) for step in (first, after)], paid("step", after)))
    (a, paid_by_judges), (b, paid_by_task) = shown
    for seen, plain in zip(a, b, strict=True):
        np.testing.assert_array_equal(seen.state, plain.state)
        assert seen.images == plain.images == {}
    assert paid_by_judges == (0.0, True, False) and paid_by_task == (-1.0, False, False)
    with pytest.raises(UserError, match="method.reward=task pays none"):
        recipe("sim/pick-v0", judge=judge, reward="task")
    with pytest.raises(UserError, match="CartPole-v1 is none"):
        envs.make(practised(recipe("CartPole-v1", judge=judge)).id)
    with pytest.raises(UserError, match="see pictures of 16 pixels, the policy such of 32"):
        showing(judge, {"cameras": ("wrist",), "image_size": 32})


def test_judges_of_something_else_are_refused(tmp_path):
    saved(tmp_path / "red", TASKS[:1])
    with pytest.raises(UserError, match="do not know 'pick up the blue cube' -- they know 'pick up the red cube'"):
        Judged(Film(), str(tmp_path / "red"))
    saved(tmp_path / "slow", robot=replace(ROBOT, rate_hz=5.0))
    with pytest.raises(UserError, match="learnt at 5 Hz, the task runs at 10 Hz -- make it with control_hz=5"):
        Judged(Film(), str(tmp_path / "slow"))
    with pytest.raises(UserError, match="holds no world model"):
        Judged(Film(), str(tmp_path))

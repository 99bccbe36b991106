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
from vla_stack.world_model import success
from vla_stack.world_model.dynamics import DynamicsConfig
from vla_stack.world_model.heads import HeadsConfig
from vla_stack.world_model.model import FEATURES, Limits, WorldConfig, WorldModel
from vla_stack.world_model.poses import PoseScale
from vla_stack.world_model.success import Judged, SuccessDetector, showing
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
    tool = tool_command = np.zeros(5)

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


@pytest.mark.parametrize("limit", ["residual", "latent", "distance"])
def test_what_the_judges_have_never_seen_pays_nothing(tmp_path, limit):
    saved(tmp_path / "trusting", limits=Limits(success=-1.0))
    assert lived(Judged(Film(), str(tmp_path / "trusting"))) == [(1.0, True)]
    model = saved(tmp_path / "guarded", limits=replace(Limits(success=-1.0), **{limit: 0.0}))
    model.bank = torch.full((10, FEATURES), 7.0)
    model.save(tmp_path / "guarded")
    env = Judged(Film(), str(tmp_path / "guarded"))
    assert lived(env) == [(0.0, False)] * 8
    env.reset(seed=4)
    assert env.step(np.zeros(1))[4]["guards"] == (limit,)


def test_guards_look_at_as_many_frames_as_a_chunk_has(tmp_path, monkeypatch):
    model, asked = saved(tmp_path / "any", limits=Limits(success=-1.0)), []
    monkeypatch.setattr(success.guards, "doubts", lambda _, *args: asked.append(args) or [])
    detector, noise = SuccessDetector(model, TASKS[0]), np.random.default_rng(0)
    film = [dict(zip(model.cameras, noise.integers(0, 255, (2, SIZE, SIZE, 3), np.uint8), strict=True)) for _ in "abcd"]
    for k, shown in enumerate(film):
        pose = np.full(5, k, np.float32)
        assert detector.see(shown, pose, pose + 10 if k else None)[0] == (k > 0)
    pictures, told, commands, before = asked[-1]  # a chunk has two frames
    np.testing.assert_array_equal(pictures, np.stack([np.stack([*shown.values()]) for shown in film[2:]]))
    assert told[:, 0].tolist() == [2, 3] and commands[:, 0].tolist() == [12, 13] and before[0] == 1
    assert len(asked[0][0]) == 1 and asked[0][3][0] == 0


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
    with pytest.raises(UserError, match="CartPole-v1 has none"):
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

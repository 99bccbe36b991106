"""Collectors execute whole chunks, and keep an episode's final observation its own; experts and scenes beside them."""

import gymnasium as gym
import numpy as np
import pytest

from vla_stack import envs
from vla_stack.envs.vector import EnvStep
from vla_stack.errors import UserError
from vla_stack.methods.off_policy import stored
from vla_stack.methods.off_policy.collecting import Collector, rows_of
from vla_stack.methods.off_policy.deployed import Seen
from vla_stack.methods.off_policy.workers import SceneSampler
from vla_stack.methods.practice import paid, time_limit
from vla_stack.methods.replay_buffer import Source
from vla_stack.rollout.agents import PolicyAgent
from vla_stack.rollout.plan import Plan, Start
from vla_stack.runtime.executor import ExecutorConfig
from vla_stack.schema import Chunks, PolicySpec
from vla_stack.training.recipe import make


class Counter(gym.Env):
    """Ends after as many steps as its seed says; succeeds where that is even."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = gym.spaces.Box(-100.0, 100.0, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        self.length, self.steps = seed, 0
        return np.array([seed], np.float32), {}

    def step(self, action):
        self.steps += 1
        over = self.steps == self.length
        success = over and self.length % 2 == 0
        return np.array([self.length + self.steps / 100], np.float32), 1.0, over, False, {"is_success": success}


COUNTER = "toys/Counter-v0"
gym.register(COUNTER, Counter)
SEEN = Seen(envs.make(COUNTER).robot, np.zeros(1, np.float32), np.full(1, 10.0, np.float32))


class Planner:
    """Chunks that tell their number and the position of each action in them."""

    seen, source = SEEN, Source.ONLINE

    def __init__(self, horizon):
        self.spec, self.calls, self.version = PolicySpec(SEEN.robot, horizon), [], 0

    def infer(self, observations, seeds, continuations=()):
        self.calls.append(len(observations))
        steps = 10 * len(self.calls) + np.arange(self.spec.horizon, dtype=np.float32)
        return Chunks(steps[None, :, None].repeat(len(observations), 0))


def collect(planner, seeds, num_envs=1, reward="success"):
    extras = {"n_action_steps": planner.spec.horizon}
    spec = PolicySpec(SEEN.robot, planner.spec.horizon, extras=extras)
    plan = Plan(COUNTER, {}, spec, PolicyAgent, executor=ExecutorConfig("sync"))
    return Collector(planner, plan, reward, map(Start, seeds), num_envs)


def test_weights_never_change_inside_a_chunk_and_plans_are_batched():
    planner = Planner(4)
    episodes, steps = collect(planner, [3, 7, 5, 5, 5, 5], 2), []
    for planner.version in range(8):
        steps.append(episodes.step()[0])
    assert [int(s.chunk_index[1]) for s in steps] == [0, 1, 2, 3, 0, 1, 2, 0]
    assert [int(s.version[1]) for s in steps] == [0, 0, 0, 0, 4, 4, 4, 7]
    assert [int(s.chunk_index[0]) for s in steps] == [0, 1, 2, 0, 1, 2, 3, 0]  # the episode ended after three
    assert planner.calls[0] == 2 and all(n == 1 for n in planner.calls[1:3])
    for s in steps:  # actions are those of the version's plan, in order
        np.testing.assert_allclose(s.action[:, 0] * 100 % 10, s.chunk_index, atol=1e-4)


def test_final_observations_are_the_episodes_own():
    episodes = collect(Planner(1), [2, 4, 9])
    steps, finished = zip(*(episodes.step() for _ in range(3)), strict=True)
    assert steps[1].terminated[0] and steps[1].next_obs[0, 0] == pytest.approx(0.202)
    assert steps[2].obs[0, 0] == pytest.approx(0.4)
    assert [[(e.seed, e.success, e.steps) for e in ended] for ended in finished] == [[], [(2, True, 2)], []]


def test_rewards_are_of_success_and_what_ends_without_it_is_cut_off():
    def after(success, terminated=False, truncated=False):
        return EnvStep({}, 7.0, terminated, truncated, {"is_success": success})

    assert paid("step", after(False)) == (-1.0, False, False) and paid("success", after(False)) == (0.0, False, False)
    assert paid("step", after(True, True, True)) == (0.0, True, False)
    assert paid("success", after(True)) == (1.0, True, False)
    assert paid("step", after(False, True)) == (-1.0, False, True) == paid("step", after(False, truncated=True))
    assert paid("task", after(False, True, True)) == (7.0, True, False)


def test_a_limit_cuts_an_episode_off():
    env = envs.make("sim/pick-v0", 1, None, {"cameras": (), "control_mode": "ee_delta", "max_episode_steps": 3})
    env.reset([0], [0])
    rows = [paid("step", env.step([0], np.zeros((1, 5), np.float32))[0]) for _ in range(3)]
    assert rows == [(-1.0, False, False)] * 2 + [(-1.0, False, True)]
    assert time_limit(env.row(0)) == 3 and time_limit(envs.make(COUNTER).row(0)) is None


def recipe(task, **method):
    return make({"task": task, "method": {"name": "wsrl", **method}, "eval": {"every": 1}}, "test")


@pytest.mark.parametrize(("options", "steps"), [({}, 40), ({"control_hz": 20.0}, 80)])
def test_a_tasks_own_limit_is_the_same_seconds_at_every_rate(options, steps):
    made = recipe({"id": "sim/pick-v0", "options": options})
    assert time_limit(rows_of(made.task, made.method, None).row(0)) == steps


class Script:
    """An expert that does nothing, and succeeds in one episode of ``every``: its environment begins by that."""

    def __init__(self, every):
        self.every, self.episodes = every, 0

    def __call__(self, env, noise, seed):
        self.episodes += 1
        env.unwrapped.env.unwrapped.length = 2 if self.episodes % self.every == 0 else 1
        return self

    def act(self):
        return np.zeros(1, np.float32)

    def perturb(self, action):
        return action


def test_an_expert_that_hardly_ever_succeeds_is_not_asked_for_ever(monkeypatch):
    task = {"id": COUNTER, "options": {"max_episode_steps": 2}}
    script, made = Script(every=100), recipe(task, offline={"episodes": 2, "failures": False}, gamma=0.9)
    monkeypatch.setattr(stored, "_expert_of", lambda _: script)
    rows = rows_of(made.task, made.method, None)
    match = r"of toys/Counter-v0 succeeded in 0 of 40 episodes of 2 steps.* set method.offline.failures=true"
    with pytest.raises(UserError, match=match):
        stored.record(made.method, made.task, rows, None)
    assert script.episodes == 40
    monkeypatch.setattr(stored, "_expert_of", lambda _: Script(every=15))
    store = stored.record(made.method, made.task, rows, None)
    assert store.columns["terminated"][store.rows()].tolist() == [False, True] * 2
    assert store.columns["source"].tolist() == [Source.OFFLINE] * 4


def test_the_noises_take_turns_among_what_is_kept(monkeypatch):
    asked, script = [], Script(every=3)
    monkeypatch.setattr(
        stored, "_expert_of", lambda _: lambda env, noise, seed: asked.append(noise) or script(env, noise, seed)
    )
    made = recipe(COUNTER, offline={"episodes": 3, "noise": [0.5, 2.0], "failures": False})
    stored.record(made.method, made.task, rows_of(made.task, made.method, None), None)
    assert asked == [0.5] * 3 + [2.0] * 3 + [0.5] * 3


def test_who_has_no_expert_is_told_what_to_give():
    made = recipe("Pendulum-v1")
    with pytest.raises(UserError, match="there is no scripted expert for Pendulum-v1 -- give data.root=DIR"):
        stored.record(made.method, made.task, rows_of(made.task, made.method, None), None)


def test_scenes_are_drawn_by_the_variance_of_their_success():
    sampler = SceneSampler(3, seed=0)
    assert np.allclose(sampler.probabilities, 1 / 3)
    for i in range(40):
        sampler.record(0, True)
        sampler.record(1, bool(i % 2))
        sampler.record(2, False)
    p = sampler.probabilities
    assert p[1] > 2 * p[0] and p[1] > 2 * p[2] and p.min() > 0.05
    drawn = np.bincount([sampler.draw(i) for i in range(2000)], minlength=3) / 2000
    assert np.abs(drawn - p).max() < 0.05

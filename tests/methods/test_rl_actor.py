"""Actors execute whole chunks, hand over to a person, and meet every evaluation episode once."""

from types import SimpleNamespace

import numpy as np
import pytest

from vla_stack.envs.state_env import EnvRecipe, StateEnv
from vla_stack.errors import UserError
from vla_stack.methods.off_policy.actor import Actor, Plan, evaluate
from vla_stack.methods.off_policy.scene_sampling import SceneSampler
from vla_stack.methods.off_policy.scripted import OfflineRecipe, record
from vla_stack.methods.replay_buffer import Source


class Counter:
    """Ends after as many steps as its seed says; succeeds where that is even."""

    obs_dim = action_dim = 1

    def reset(self, seed):
        self.length, self.steps, self.success = seed, 0, False
        return np.array([seed], np.float32)

    def step(self, action):
        self.steps += 1
        over = self.steps == self.length
        self.success = over and self.length % 2 == 0
        return np.array([self.length + self.steps / 100], np.float32), 1.0, self.success, over and not self.success


class Scripted(Counter):
    """Ends after two steps; its expert succeeds in one episode of ``every``."""

    recipe, limit = SimpleNamespace(id="toy", tail=0), 2

    def __init__(self, every):
        self.every, self.episodes = every, 0

    def reset(self, seed):
        self.episodes += 1
        return super().reset(2 if self.episodes % self.every == 0 else 1)

    def expert(self, noise, seed):
        return lambda: np.zeros(1, np.float32)


def planner(horizon, log):
    def plan(obs):
        log.append(len(obs))
        first = 10 * len(log)
        return Plan(first + np.arange(horizon, dtype=np.float32)[None, :, None].repeat(len(obs), 0))

    return plan


def test_weights_never_change_inside_a_chunk_and_plans_are_batched():
    seeds, calls = iter([3, 7, 5, 5, 5, 5]), []
    actor, plan = Actor([Counter(), Counter()], seeds.__next__), planner(4, calls)
    steps = [actor.step(plan, version=v) for v in range(8)]
    assert [int(s.chunk_index[1]) for s in steps] == [0, 1, 2, 3, 0, 1, 2, 0]
    assert [int(s.version[1]) for s in steps] == [0, 0, 0, 0, 4, 4, 4, 7]
    assert [int(s.chunk_index[0]) for s in steps] == [0, 1, 2, 0, 1, 2, 3, 0]  # the episode ended after three
    assert calls[0] == 2 and all(n == 1 for n in calls[1:3])
    for s in steps:  # actions are those of the version's plan, in order
        np.testing.assert_array_equal(s.action[:, 0] % 10, s.chunk_index)


def test_final_observations_are_the_episodes_own():
    seeds = iter([2, 4, 9])
    actor = Actor([Counter()], seeds.__next__)
    steps = [actor.step(planner(1, [])) for _ in range(3)]
    assert steps[1].terminated[0] and steps[1].next_obs[0, 0] == pytest.approx(2.02)
    assert steps[2].obs[0, 0] == 4
    assert [(o.seed, o.success, o.steps, o.reward) for o in actor.finished] == [(2, True, 2, 2.0)]


def test_a_person_takes_the_rest_of_the_chunk():
    hand = {2: np.array([0.5], np.float32)}
    tick, calls = iter(range(99)), []
    actor = Actor([Counter()], iter([50]).__next__, lambda env, obs: hand.get(next(tick)))
    steps = [actor.step(planner(4, calls)) for _ in range(6)]
    assert [Source(s.source[0]) for s in steps] == [Source.ONLINE] * 2 + [Source.HUMAN] + [Source.ONLINE] * 3
    assert steps[2].action[0, 0] == 0.5
    assert [int(s.chunk_index[0]) for s in steps] == [0, 1, 0, 0, 1, 2]  # what was planned before is void


def test_evaluation_meets_each_seed_once_in_order():
    seeds = [4, 3, 9, 2, 6]
    out = evaluate([Counter(), Counter(), Counter()], planner(2, []), seeds)
    assert [(o.seed, o.success, o.steps) for o in out] == [(s, s % 2 == 0, s) for s in seeds]


def test_evaluation_steps_no_environment_without_an_episode():
    envs = [Counter(), Counter(), Counter()]
    calls = []
    evaluate(envs, planner(1, calls), [2, 2, 9])
    assert sum(calls) == 2 + 2 + 9


def test_a_limit_cuts_an_episode_off():
    env = StateEnv(EnvRecipe("sim/pick-v0", limit=3))
    env.reset(0)
    rows = [env.step(np.zeros(env.action_dim, np.float32))[1:] for _ in range(3)]
    assert rows == [(-1.0, False, False)] * 2 + [(-1.0, False, True)]


@pytest.mark.parametrize(("control_hz", "steps"), [(0.0, 40), (20.0, 80)])
def test_a_tasks_own_limit_is_the_same_seconds_at_every_rate(control_hz, steps):
    assert StateEnv(EnvRecipe("sim/pick-v0", control_hz=control_hz)).limit == steps


def test_an_expert_that_hardly_ever_succeeds_is_not_asked_for_ever():
    env, recipe = Scripted(every=100), OfflineRecipe(episodes=2, failures=False)
    with pytest.raises(UserError, match=r"of toy succeeded in 0 of 40 episodes .* set offline.failures=true"):
        record(env, recipe, 0.9)
    assert env.episodes == 40
    store = record(Scripted(every=15), recipe, 0.9)
    assert store.columns["terminated"][store.rows()].tolist() == [False, True] * 2


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

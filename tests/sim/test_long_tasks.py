"""Long tasks: what their sentences ask for is what counts, and their length is that of a long task."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest

import sim
from sim import library

LONG = ("open_put_close", "regrasp_insert", "set_table", "sort")


def finish(task: str, seed: int):
    """The environment at the end of the expert's episode, and how many steps it took."""
    env = gym.make(sim.TASKS[task].id, cameras=()).unwrapped
    env.reset(seed=seed)
    expert, done, steps = sim.make_expert(env), False, 0
    while not done and steps < sim.TASKS[task].max_episode_steps:
        *_, done, _, info = env.step(expert.act())
        steps += 1
    assert info["is_success"]
    return env, steps


@pytest.mark.parametrize("task", LONG)
def test_only_what_the_sentence_asks_for_was_achieved(task):
    env, steps = finish(task, 4)
    assert [text for text in env.task_variants if env.achieved(text)] == [env.task]
    assert len(env.stages) >= 4 and steps > 60


@pytest.mark.parametrize("task", LONG)
def test_the_expert_goes_on_from_a_state_that_another_environment_was_in(task):
    """It keeps nothing to itself, so chunk labels can be branched anywhere."""
    env, twin = (gym.make(sim.TASKS[task].id, cameras=()).unwrapped for _ in range(2))
    env.reset(seed=2)
    twin.reset(seed=9)
    expert, other = sim.make_expert(env, noise=0.3), sim.make_expert(twin)
    for step in range(45):
        action = expert.act()
        if step % 9 == 0:
            twin.set_state(env.get_state())
            np.testing.assert_array_equal(other.act(), action)
        env.step(expert.perturb(action))


def test_things_of_the_table_are_those_of_its_sentence():
    env = gym.make("sim/sort-v0", cameras=()).unwrapped
    for seed in range(10):
        env.reset(seed=seed)
        kinds = [library.KINDS[thing.kind] for thing in env.things]
        assert [kind.category for kind in kinds] == 3 * [env.variant["black"]] + 3 * [env.variant["white"]]
        assert not any(kind.held_out for kind in kinds) and len({kind.name for kind in kinds}) == 6

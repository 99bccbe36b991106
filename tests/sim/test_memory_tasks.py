"""Tasks of memory: once it is no longer shown, nothing that a policy is given tells what was shown."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest

import sim
from sim.tasks import covers, repeat


def swap_cubes(env) -> None:
    one, two = (env.model.body(f"cube_{colour}").mocapid[0] for colour in covers.COLOURS)
    env.data.mocap_pos[[one, two]] = env.data.mocap_pos[[two, one]]


def light_another(env) -> None:
    env.data.userdata[repeat.LIT] = (env.data.userdata[repeat.LIT] + 1) % len(repeat.BUTTONS)


HIDDEN = {"covers": swap_cubes, "repeat": light_another}
TOLD = {"covers": covers.SHOWN, "repeat": repeat.SHOWN}  # s


def seen(env) -> list[np.ndarray]:
    """Everything that a policy may be given now: state with poses, pictures, keypoints."""
    obs = env._observe()
    return [obs["agent_pos"], *obs["pixels"].values(), *env.keypoints().values()]


@pytest.mark.parametrize("task", list(HIDDEN))
@pytest.mark.parametrize("randomisation", [0, 2])
def test_two_starts_that_differ_in_what_was_shown_look_alike_when_the_choice_comes(task, randomisation):
    options = {"privileged": True, "randomisation": randomisation}
    one, two = (gym.make(sim.TASKS[task].id, **options).unwrapped for _ in range(2))
    for env in (one, two):
        env.reset(seed=3)
    HIDDEN[task](two)
    experts, alike, step = [sim.make_expert(env) for env in (one, two)], [], 0
    while True:
        actions = [expert.act() for expert in experts]
        if (actions[0] != actions[1]).any():
            break
        for env in (one, two):
            assert not env.step(actions[0])[2]
        step += 1
        alike.append(all(np.array_equal(a, b) for a, b in zip(seen(one), seen(two), strict=True)))
    told = int(TOLD[task] / one.spec_robot.dt) + 2
    assert not alike[0]  # it was shown
    assert step - told >= 10 and all(alike[told:])  # and then for long enough there was nothing to see of it
    # What is right in one is wrong in the other, so whoever decides by what is seen is right in one of them at most.
    for env, other in ((one, two), (two, one)):
        env.set_state(env.get_state())
        twin = gym.make(sim.TASKS[task].id, **options).unwrapped
        twin.reset(seed=3)
        twin.set_state(other.get_state())
        expert, done = sim.make_expert(env), False
        while not done:
            action = expert.act()
            _, _, done, _, info = env.step(action)
            _, _, failed, _, wrong = twin.step(action)
        assert info["is_success"] and failed and not wrong["is_success"]


@pytest.mark.parametrize("task", list(HIDDEN))
def test_what_was_shown_is_part_of_the_state(task):
    env, copy = (gym.make(sim.TASKS[task].id, cameras=()).unwrapped for _ in range(2))
    env.reset(seed=1)
    HIDDEN[task](env)
    copy.reset(seed=2)
    copy.set_state(env.get_state())
    expert, done = sim.make_expert(copy), False
    while not done:
        action = expert.act()
        _, _, done, _, info = env.step(action)
        copy.step(action)
    assert info["is_success"]


@pytest.mark.parametrize("task", list(HIDDEN))
def test_what_was_shown_does_not_follow_from_the_instruction(task):
    env = gym.make(sim.TASKS[task].id, cameras=()).unwrapped
    answers = []
    for seed in range(40):
        env.reset(seed=seed, options={"variant": env.variants[0]})
        answers.append(env.right if task == "covers" else env.lit)
    share = np.unique(answers, return_counts=True)[1] / len(answers)
    assert len(share) == {"covers": 2, "repeat": 3}[task] and share.min() > 0.15


def test_a_cover_that_is_lifted_before_the_bell_has_rung_ends_the_episode():
    env = gym.make("sim/covers-v0", cameras=()).unwrapped
    env.reset(seed=0)
    expert, done = sim.make_expert(env), False
    while not done:
        if env.data.time < 1.5:
            action = expert.towards(np.array([0.36, 0.0, 0.18]), 0.0, 1.0)
        else:
            env.data.userdata[covers.HELD] = covers.FULL
            action = expert.act()
            env.data.userdata[covers.HELD] = 0.0
        _, _, done, _, info = env.step(action)
    assert not info["is_success"] and env.lifted(env.right)

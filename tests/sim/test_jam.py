"""The task with slips and jams: they happen by themselves, in their shares, and only backing out gets out of a jam."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest

import sim
from sim.tasks.jam import COLOURS, CUBES, ENTRIES, GRASPS, JAMS, PUSHED, SLIPPING, SLIPS, WEDGED


def make(**options):
    return gym.make("sim/jam-v0", cameras=(), **options)


def counts(env) -> np.ndarray:
    """Of each cube: entries, whether inside, whether jammed, seconds of pushing; [4, 4]."""
    return env.data.userdata[CUBES : CUBES + 16].reshape(4, 4)


def roll(env, seed: int, until=lambda task: False) -> tuple[dict, int, int, int]:
    """The expert's episode: its last info, and how many slips, jams and grasps there were."""
    env.reset(seed=seed)
    task, expert, done = env.unwrapped, sim.make_expert(env), False
    slips, jams, slipping, jammed = 0, 0, 0.0, np.zeros(4)
    while not done and not until(task):
        _, _, terminated, truncated, info = env.step(expert.act())
        done = terminated or truncated
        slips += task.data.userdata[SLIPPING] > slipping
        jams += int(((counts(task)[:, 2] > 0) & (jammed == 0)).sum())
        slipping, jammed = task.data.userdata[SLIPPING], counts(task)[:, 2].copy()
    return info, slips, jams, int(task.data.userdata[GRASPS])


def test_slips_and_jams_come_in_their_shares_and_the_expert_gets_over_them():
    env, slips, jams, grasps, entries = make(), 0, 0, 0, 0
    for seed in range(12):
        info, slipped, jammed, grasped = roll(env, seed)
        assert info["is_success"], seed
        slips, jams, grasps, entries = slips + slipped, jams + jammed, grasps + grasped, entries + 4 + jammed
    assert abs(slips / grasps - SLIPS) < 3 * np.sqrt(SLIPS * (1 - SLIPS) / grasps)
    assert abs(jams / entries - JAMS) < 3 * np.sqrt(JAMS * (1 - JAMS) / entries)


def test_without_slips_and_jams_there_are_none():
    info, slips, jams, grasps = roll(make(slips=0.0, jams=0.0), 3)
    assert info["is_success"] and (slips, jams, grasps) == (0, 0, 4)


def test_who_only_advances_never_gets_out_of_a_jam():
    env, backing = make(slips=0.0, retreats=False), make(slips=0.0)
    for seed in range(6):
        info, _, jams, _ = roll(env, seed)
        assert info["is_success"] == (jams == 0)
        if jams:
            task = env.unwrapped
            assert counts(task)[:, PUSHED].max() > WEDGED  # it ended because it was pushed for too long
        assert roll(backing, seed)[0]["is_success"]


def test_pushing_makes_it_worse():
    """The further a jammed cube was pushed, the further it has to be backed out."""
    heights = []
    for pushes in (0, 12):
        env = make(slips=0.0, jams=1.0)
        roll(env, 0, until=lambda task: any(map(task.jammed, COLOURS)))
        task = env.unwrapped
        colour, expert = task.target, sim.make_expert(env)
        for _ in range(pushes):
            task.retreats = False
            env.step(expert.act())
        task.retreats = True
        while task.jammed(colour):
            lift = task.tool_command + [0.0, 0.0, 0.003, 0.0, 0.0]
            env.step(lift.astype(np.float32))
        heights.append(task.position(f"cube_{colour}")[2])
    assert heights[1] > heights[0] + 0.005


@pytest.mark.parametrize("seed", [0, 1])
def test_the_same_slips_and_jams_come_again(seed):
    env, copy = make().unwrapped, make().unwrapped
    env.reset(seed=seed)
    copy.reset(seed=seed + 10)
    expert = sim.make_expert(env)
    for _ in range(20):
        env.step(expert.act())
    copy.set_state(env.get_state())
    for _ in range(60):
        action = expert.act()
        env.step(action)
        copy.step(action)
    assert counts(env)[:, ENTRIES].sum() > 0 and np.array_equal(env.get_state(), copy.get_state())

"""The simulated operator where several objects go to their goals, one after another, and what is pushed may jam."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from rac_toys import play

import sim
from sim.tasks.jam import COLOURS
from vla_stack.intervention import Phase
from vla_stack.methods.rac.familiar import FamiliarStates
from vla_stack.methods.rac.operator import OperatorConfig, SimulatedOperator
from vla_stack.methods.rac.scene import Detector, Scene, Subtasks
from vla_stack.schema import Chunks

HORIZON = 8


def make(**options):
    id = sim.TASKS["jam"].id
    return gym.make(id, cameras=(), privileged=True, disable_env_checker=True, **options).unwrapped


def demonstration(env, seed):
    operator = SimulatedOperator(OperatorConfig(), sim.make_expert(env), None, env.spec_robot.dt, 0, seed)
    return play(env, seed, "teleop", 1000, operator=operator)


@pytest.fixture(scope="module")
def demo():
    env = make(slips=0.0, jams=0.0)
    yield demonstration(env, 0)
    env.close()


@pytest.fixture(scope="module")
def familiar(demo):
    features, subtask = (np.array([getattr(f, name) for f in demo.frames]) for name in ("features", "subtask"))
    return FamiliarStates(features, subtask, np.zeros(len(subtask), int))


def test_a_demonstration_takes_up_and_brings_one_object_after_another(demo, familiar) -> None:
    assert (
        demo.success and demo.phase is Phase.END_DEMO and len(demo.frames) > 150
    )  # longer than an intervention may be
    order = [f.subtask for f in demo.frames]
    assert order == sorted(order) and set(order) == set(range(8))
    first = next(f for f in demo.frames if f.subtask == 6)
    assert familiar.start_score(first.features, 6) <= 1.0 and familiar.start_score(first.features, 0) <= 1.0


def pushing(observations, seeds, commands):
    """Replays commands, the last one for ever."""
    rows = [[commands[min(o.step + i, len(commands) - 1)] for i in range(HORIZON)] for o in observations]
    return Chunks(np.array(rows, np.float32))


@pytest.mark.parametrize("recover", [True, False])
def test_who_backs_out_first_gets_out_of_a_jam_and_who_only_corrects_does_not(familiar, recover: bool) -> None:
    env = make(slips=0.0, jams=0.5, retreats=False)
    seed, commands = next(found for seed in range(20) if (found := until_jammed(env, seed)))
    operator = SimulatedOperator(OperatorConfig(recover=recover), sim.make_expert(env), familiar, 0.1, 3, 1)
    out = play(env, seed, "rac", 400, partial(pushing, commands=commands), operator, familiar, HORIZON, 4)
    assert out.takeovers == 1
    if recover:
        assert out.phase is Phase.END_INTERVENED and int(env.progress()[1]) == 1
    else:
        assert out.phase is not Phase.END_INTERVENED and int(env.progress()[1]) == 0
    env.close()


def until_jammed(env, seed):
    """Commands of an expert until its first cube jams and can be got out: at the next entry it does not."""
    env.reset(seed=seed)
    expert, commands = sim.make_expert(env), []
    colour = env.target
    while not env.jammed(colour) and len(commands) < 120:
        commands.append(expert.act())
        env.step(commands[-1])
    free = env._draw(1 + list(COLOURS).index(colour), 2) >= env.jams  # of the second entry
    return (seed, np.array(commands)) if env.jammed(colour) and free else None


ABOVE, HERE, THERE = np.array([0.4, 0, 0.1, 0, 1.0]), np.array([0.4, 0, 0.02]), np.array([0.5, 0.1, 0])
BLANK = Scene(ABOVE, HERE, THERE, False, False, True, False, False, 0, 3)
HELD = replace(BLANK, held=True, taken=True, tool=np.array([*HERE, 0, 0.4]))


def test_sub_tasks_of_three_objects() -> None:
    subtasks = Subtasks()
    seen = [
        (BLANK, 0),
        (HELD, 1),
        (BLANK, 0),  # it slipped
        (HELD, 1),
        (replace(BLANK, done=1), 2),
        (BLANK, 2),  # touched by the tool that retreats
        (replace(HELD, done=1), 3),
        (replace(BLANK, done=2), 4),
        (replace(HELD, done=2), 5),
        (replace(BLANK, done=3), 6),
    ]
    assert [subtasks.update(scene) for scene, _ in seen] == [number for _, number in seen] and BLANK.over == 6


def test_what_is_jammed_is_noticed_sooner_and_backing_out_is_progress() -> None:
    detector, stuck = Detector(0.1), replace(HELD, stuck=True)
    assert next(k for k in range(100) if detector.update(HELD, 1)) == 20
    detector.reset()
    assert next(k for k in range(100) if detector.update(stuck, 1)) == 10
    detector.reset()
    rising = [replace(stuck, object=HERE + [0, 0, 0.01 * k]) for k in range(30)]
    assert not any(detector.update(scene, 1) for scene in rising)

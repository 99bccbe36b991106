"""The simulated operator over a policy that fails: what it does, what is recorded, and that both can be replayed."""

from __future__ import annotations

import re
from functools import partial
from itertools import pairwise

import gymnasium as gym
import numpy as np
import pytest
from rac_toys import play

import sim
from vla_stack.intervention import Intervention, Phase
from vla_stack.methods.rac.episode import RolledOut, _finish
from vla_stack.methods.rac.familiar import FamiliarStates
from vla_stack.methods.rac.operator import Decision, OperatorConfig, SimulatedOperator
from vla_stack.schema import Chunks

HORIZON = 8


@pytest.fixture(scope="module")
def env():
    env = gym.make(sim.TASKS["stack"].id, cameras=(), privileged=True, disable_env_checker=True).unwrapped
    yield env
    env.close()


@pytest.fixture(scope="module")
def demos(env):
    outs = []
    for e in range(4):
        operator = SimulatedOperator(OperatorConfig(), sim.make_expert(env), None, env.spec_robot.dt, 0, e)
        outs.append(play(env, e, "teleop", 200, operator=operator))
    return outs


@pytest.fixture(scope="module")
def familiar(demos):
    frames = [(f.features, f.subtask, e) for e, out in enumerate(demos) for f in out.frames]
    features, subtask, episode = (np.array(column) for column in zip(*frames, strict=True))
    return FamiliarStates(features, subtask, episode)


def clumsy(observations, seeds, opening=0.0):
    """Creeps about, each step another command, and closes the gripper, or keeps it as it is: never succeeds."""
    chunks = []
    for o, seed in zip(observations, seeds, strict=True):
        aim = np.append(o.state[:4], opening)
        drift = np.random.default_rng(seed).normal(0, 0.004, (HORIZON, 5))
        drift[:, 3:] = 0
        chunks.append(aim + drift.cumsum(0))
    return Chunks(np.array(chunks, np.float32))


def episode(env, familiar, seed, number=1, mode="rac", opening=0.0, **config):
    operator = SimulatedOperator(
        OperatorConfig(end=mode == "rac", **config), sim.make_expert(env), familiar, env.spec_robot.dt, 3, number
    )
    out = play(env, seed, mode, 80, partial(clumsy, opening=opening), operator, familiar, HORIZON, 4)
    return out, env.data.qpos.copy()


def test_demonstrations_succeed_and_are_labelled_as_such(demos) -> None:
    assert all(out.success and out.phase is Phase.END_DEMO for out in demos)
    assert {f.labels["segment_type"] for out in demos for f in out.frames} == {0}
    assert all(out.human_frames == len(out.frames) for out in demos)


@pytest.mark.parametrize("recover", [True, False])
def test_an_intervention_recovers_then_corrects_then_ends(env, familiar, recover: bool) -> None:
    ended = 0
    for seed in range(5):
        out, _ = episode(env, familiar, seed, number=seed, recover=recover)
        types = "".join(str(f.labels["segment_type"]) for f in out.frames)
        if out.phase is Phase.END_INTERVENED:
            ended += 1
            assert re.fullmatch("1*(2+3+)+", types), types
            assert max(f.subtask for f in out.frames) <= 1
    assert ended >= 3  # the rest are misses of the simulated person, who lets the episode fail, or were given up


def dropping(observations, seeds, commands):
    """Replays commands, then opens the gripper where it is."""
    rows = [[commands[min(o.step + i, len(commands) - 1)] for i in range(HORIZON)] for o in observations]
    return Chunks(np.array(rows, np.float32))


@pytest.mark.parametrize("mode", ["rac", "hg_dagger"])
def test_what_the_policy_dropped_is_picked_up_and_brought_to_its_goal(env, familiar, demos, mode: str) -> None:
    lifted = next(f.observation.step for f in demos[0].frames if f.subtask == 1) + 4
    commands = np.array(demos[0].sent[: lifted + 1])
    commands[-1, 4] = 1.0
    operator = SimulatedOperator(OperatorConfig(end=mode == "rac"), sim.make_expert(env), familiar, 0.1, 3, 1)
    out = play(env, 0, mode, 150, partial(dropping, commands=commands), operator, familiar, HORIZON, 4)
    human = [f for f in out.frames if f.labels["control_source"] == 1]
    assert human[0].subtask == 0 and out.success  # taken over with the cube dropped, ended with it on the other
    assert {0, 1} <= {f.subtask for f in human if f.labels["segment_type"] == 3}
    assert "hand_back" not in [event for _, event in out.log]


def test_logs_are_a_function_of_seed_and_episode_and_replay_reproduces_the_physics(env, familiar) -> None:
    (first, qpos), (again, _) = episode(env, familiar, 11), episode(env, familiar, 11)
    assert first.log == again.log and len(first.log) >= 3
    assert np.array(first.sent).tobytes() == np.array(again.sent).tobytes()
    other, _ = episode(env, familiar, 11, number=2)
    assert np.array(other.sent).tobytes() != np.array(first.sent).tobytes()
    env.reset(seed=11)
    for command in first.sent:
        env.step(command)
    assert env.data.qpos.tobytes() == qpos.tobytes()


def test_the_stored_action_is_the_command_that_was_sent_within_the_rates(env, familiar) -> None:
    out, _ = episode(env, familiar, 11)
    for frame in out.frames:
        assert frame.action.tobytes() == out.sent[frame.observation.step].tobytes()
    human = [f for f in out.frames if f.labels["control_source"] == 1]
    step = np.array([d.max_rate for d in env.spec_robot.action[:4]]) * env.spec_robot.dt
    for a, b in pairwise(human):
        assert (np.abs(b.action - a.action)[:4] <= step + 1e-6).all()


def test_after_a_takeover_nothing_of_the_policy_is_executed(env, familiar) -> None:
    out, _ = episode(env, familiar, 11)
    takeover = next(tick for tick, event in out.log if event == "takeover")
    engage = next(tick for tick, event in out.log if event == "engage")
    assert engage > takeover
    held = {out.sent[k].tobytes() for k in range(takeover - 1, engage)}
    assert len(held) == 1  # a clumsy chunk has another command at each step: none of them was sent
    assert not [f for f in out.frames if takeover <= f.observation.step < engage]  # nor was the hold recorded
    assert all(f.labels["control_source"] == 1 for f in out.frames if f.observation.step >= engage)


class Hesitant(SimulatedOperator):
    """Takes over at tick 5 and never moves."""

    def step(self, tick, phase, scene, last_command):
        return Decision(("takeover",) if tick == 5 else ())


@pytest.mark.parametrize("mode", ["rac", "hg_dagger"])
def test_a_success_while_a_takeover_is_held_is_the_policy_s(env, familiar, monkeypatch, mode: str) -> None:
    step, ticks = env.step, iter(range(100))

    def settling(command):  # what the policy had let go of comes to rest after tick 7
        *out, info = step(command)
        return *out, {**info, "is_success": next(ticks) >= 7}

    monkeypatch.setattr(env, "step", settling)
    operator = Hesitant(OperatorConfig(), sim.make_expert(env), familiar, env.spec_robot.dt, 3, 1)
    out = play(env, 0, mode, 80, clumsy, operator, familiar, HORIZON, 4)
    assert out.log == [(5, "takeover"), (8, "cancel"), (8, "success")]
    assert out.success and out.phase is Phase.END_AUTO_SUCCESS and out.takeovers == 0
    assert [f.observation.step for f in out.frames] == list(range(5))
    assert {f.labels["segment_type"] for f in out.frames} == {1}


def test_a_success_after_somebody_has_moved_is_discarded_in_a_hold() -> None:
    machine, out = Intervention("rac"), RolledOut(0)
    for event in ("start", "takeover", "engage", "lost"):
        machine.apply(event, 0)
    _finish(machine, out, 1)
    assert machine.phase is Phase.END_DISCARDED and out.log == [(1, "discard")]


def test_hg_dagger_differs_only_in_handing_back(env, familiar) -> None:
    (rac, _), (hg, _) = episode(env, familiar, 11), episode(env, familiar, 11, mode="hg_dagger")
    done = next(tick for tick, event in rac.log if event == "subtask_done")
    assert [x for x in hg.log if x[0] < done] == [x for x in rac.log if x[0] < done]
    assert (done, "hand_back") in hg.log or (done, "subtask_done") in hg.log
    assert np.array(hg.sent[:done]).tobytes() == np.array(rac.sent[:done]).tobytes()


@pytest.mark.parametrize("opening", [0.0, 1.0])
def test_auto_rewind_is_executed_motion_that_the_guards_allow(env, familiar, opening: float) -> None:
    out, _ = episode(env, familiar, 11, opening=opening, rewind=True)
    events, sources = [event for _, event in out.log], [f.labels["control_source"] for f in out.frames]
    rewound = [f for f in out.frames if f.labels["control_source"] == 2]
    assert ("rewind" in events) == bool(rewound) == (opening == 1.0)  # a gripper that was switched forbids it
    assert ("engage" in events) == (opening == 0.0) and (opening == 1.0 or "a gripper was switched" in out.refusals)
    assert all(f.labels["segment_type"] == 2 for f in rewound) and sources[-1] == 1
    speed = np.diff([f.action[:3] for f in rewound], axis=0) / env.spec_robot.dt if rewound else np.zeros((0, 3))
    assert (np.linalg.norm(speed, axis=1) <= 0.10 + 1e-6).all()
    assert len({float(f.action[4]) for f in rewound}) <= 1  # grippers are never reversed

"""Rollouts by actors are those of this process, though actors are killed; Ray itself is played by ``ray_fake``."""

import sys

import numpy as np
import pytest
import ray_fake

import sim
from vla_stack.errors import UserError
from vla_stack.evaluation.evaluate import evaluate
from vla_stack.rollout import collect
from vla_stack.rollout.workers import RayGroup
from vla_stack.schema import Chunks, PolicySpec


class Wanderer:
    """Draws by its seed, and reacts to what it sees."""

    robot = sim.TASKS["pick"].arm.spec("ee_delta", (), 64, 10.0, True)
    spec = PolicySpec(robot, 4)

    def infer(self, observations, seeds):
        pairs = zip(observations, seeds, strict=True)
        return Chunks(
            np.array([np.random.default_rng(s).normal(o.state[:5], 1.0, (4, 5)) for o, s in pairs], np.float32)
        )


@pytest.fixture(autouse=True)
def begun(monkeypatch):
    """Groups, once for each time that their actor was made."""
    monkeypatch.setitem(sys.modules, "ray", ray_fake)
    groups, start = [], RayGroup._start
    monkeypatch.setattr(RayGroup, "_start", lambda group: (start(group), groups.append(group)))
    return groups


def test_episodes_of_a_killed_actor_begin_anew_elsewhere(begun):
    def kill(record):
        if len(begun) == 2:
            ray_fake.kill(begun[0].actor)

    how = {"num_envs": 2, "env_options": {"max_episode_steps": 8}}
    local = evaluate(Wanderer(), "sim/pick-v0", 5, **how)
    remote = evaluate(Wanderer(), "sim/pick-v0", 5, **how, workers=2, rollouts="ray", on_episode=kill)
    assert len(begun) == 3 and begun[2] is begun[0]
    assert [(e.seed, e.success, e.steps) for e in remote.episodes] == [(e.seed, False, 8) for e in local.episodes]
    for a, b in zip(remote.episodes, local.episodes, strict=True):
        np.testing.assert_array_equal(a.actions, b.actions)


def test_actors_that_keep_dying_are_given_up(begun, monkeypatch):
    monkeypatch.setattr(ray_fake, "get", lambda call: (_ for _ in ()).throw(ray_fake.RayActorError("killed")))
    with pytest.raises(UserError, match="keeps dying .killed. -- try --workers 0"):
        evaluate(Wanderer(), "sim/pick-v0", 2, num_envs=1, workers=1, rollouts="ray")
    assert len(begun) == 3
    with pytest.raises(UserError, match="at least one worker"):
        evaluate(Wanderer(), "sim/pick-v0", 2, rollouts="ray")


def test_attempts_of_a_killed_actor_are_repeated(begun):
    config = collect.CollectConfig("pick", seed=3, noise=0.3, privileged=True)
    there, here = collect.attempts(config, 0, 2, "ray"), collect.attempts(config, 0, 0)
    for i in range(4):
        remote, local = next(there), next(here)
        assert (remote.seed, remote.success) == (local.seed, local.success) == (config.env_seed(i), local.success)
        np.testing.assert_array_equal(remote.actions, local.actions)
        if i == 0:
            ray_fake.kill(begun[1].actor)
    there.close()
    assert len(begun) == 3

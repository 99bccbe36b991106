"""Evaluation and collection on Ray itself: the episodes of this process, though an actor is killed."""

import numpy as np
import pytest
import ray
from test_ray_rollouts import Wanderer

from vla_stack.evaluation.evaluate import evaluate
from vla_stack.ray_cluster import cluster
from vla_stack.rollout import collect
from vla_stack.rollout.workers import RayGroup


@pytest.mark.flaky(reruns=1)  # Ray has deadlines of its own, see conftest.py
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_episodes_are_those_of_this_process(monkeypatch):
    groups, begin, killed = [], RayGroup._start, []
    monkeypatch.setattr(RayGroup, "_start", lambda group: (begin(group), groups.append(group)))

    def kill(record):
        if not killed:
            killed.append(record)
            ray.kill(groups[0].actor)

    local = evaluate(Wanderer(), "sim/pick-v0", 6, num_envs=2)
    config = collect.CollectConfig("pick", seed=3, noise=0.3, privileged=True)
    with cluster(2):
        remote = evaluate(Wanderer(), "sim/pick-v0", 6, num_envs=2, workers=2, rollouts="ray", on_episode=kill)
        attempts = collect.attempts(config, 0, 2, "ray")
        collected = [next(attempts) for _ in range(2)]
        attempts.close()
    assert len(groups) == 5  # two, the one in place of the one that was killed, and the two that collect
    for a, b in zip(remote.episodes, local.episodes, strict=True):
        assert (a.seed, a.success, a.steps) == (b.seed, b.success, b.steps)
        np.testing.assert_array_equal(a.actions, b.actions)
    for rollout, here in zip(collected, collect.attempts(config, 0, 0), strict=False):
        np.testing.assert_array_equal(rollout.actions, here.actions)

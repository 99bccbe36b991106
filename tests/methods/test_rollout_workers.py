"""Rollout actors that cannot be made, or die again and again, end a run with a reason. Ray is played."""

from types import SimpleNamespace

import numpy as np
import pytest

from vla_stack.errors import UserError
from vla_stack.methods.off_policy import workers as rollout_workers
from vla_stack.methods.off_policy.collecting import Fragment
from vla_stack.methods.off_policy.workers import DEATHS, RayRollouts
from vla_stack.rollout.records import EpisodeRecord


class RayActorError(Exception):
    def __init__(self, told, actor_init_failed=False):
        super().__init__(told)
        self.actor_init_failed = actor_init_failed


class Ray:
    """Each request's answer is the next of ``answers``: a death, or of how many episodes a fragment holds the end."""

    exceptions = SimpleNamespace(RayActorError=RayActorError)

    def __init__(self, answers):
        self.answers, self.requests, self.seeds = iter(answers), 0, []

    @property
    def made(self):
        return len(self.seeds)

    def remote(self, num_cpus):
        def make(_, first_seed):
            self.seeds.append(first_seed)
            return SimpleNamespace(run=SimpleNamespace(remote=self.request))

        return lambda cls: SimpleNamespace(remote=make)

    def request(self, *_):
        self.requests += 1
        return self.requests

    def put(self, arrays):
        return arrays

    def wait(self, refs, num_returns):
        return refs[:num_returns], refs[num_returns:]

    def get(self, ref):
        answer = next(self.answers)
        if isinstance(answer, Exception):
            raise answer
        return Fragment((), [], [EpisodeRecord(0, "", "", True, 1)] * answer)


@pytest.fixture
def rollouts(monkeypatch):
    monkeypatch.setattr(rollout_workers, "weights", lambda modules: {})

    def made(answers):
        ray = Ray(answers)
        monkeypatch.setattr(rollout_workers, "connect", lambda workers: (ray, False))
        return ray, RayRollouts(
            lambda: (None, None), workers=1, envs=1, seed_of=lambda n: n, first_episode=0, fragment=1, max_lag=0
        )

    return made


LEARNER = SimpleNamespace(acting={}, source=np.int8(0), store=SimpleNamespace(cut=lambda slots: None))


def test_an_actor_that_cannot_be_made_is_not_made_again(rollouts):
    ray, actors = rollouts(
        [RayActorError("The actor died in its creation task, \n  File ...\nOSError: no display", True)]
    )
    with pytest.raises(UserError, match=r"^a rollout actor cannot be made: OSError: no display -- try rollouts=local"):
        actors.collect(LEARNER, 0)
    assert ray.made == 1 and actors.lost == 1


def test_an_actor_is_replaced_until_its_successors_die_in_a_row(rollouts):
    death = RayActorError("The actor died unexpectedly.\n\tclass_name: Worker")
    ray, actors = rollouts([*[death] * (DEATHS - 1), 0, *[death] * DEATHS])
    for _ in range(2 * DEATHS - 1):  # a fragment in between: it goes on
        actors.collect(LEARNER, 0)
    with pytest.raises(
        UserError, match=rf"actor 0 died {DEATHS} times without a fragment: The actor died unexpect"
    ) as e:
        actors.collect(LEARNER, 0)
    assert "\n" not in str(e.value)
    assert actors.lost == 2 * DEATHS - 1 and ray.made == 2 * DEATHS - 1


def test_a_successor_begins_no_episode_that_was_begun_before(rollouts):
    death = RayActorError("killed")
    ray, actors = rollouts([3, 700, death, 2, death])  # one environment, fragments of one step
    for _ in range(5):
        actors.collect(LEARNER, 0)
    # Those that ended, the one under way, and one that may have ended in the lost fragment.
    assert ray.seeds == [0, 705, 709] and actors.episodes == 1 + 705

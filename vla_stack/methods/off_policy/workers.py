"""Which episodes are practised, and where rollouts come from: this process, or actors on Ray.

Both give fragments of transitions to the one learner, which updates in proportion to what it got and publishes its
weights as a version. An actor on Ray holds a copy of the acting networks; weights go to it through the object store,
one reference a version. How many versions behind a fragment may be is bounded: the learner waits for an actor that is
further behind. With no lag allowed and one actor the learner sees exactly what it would see of this process.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from vla_stack.errors import UserError
from vla_stack.methods.off_policy.collecting import Collector, Fragment
from vla_stack.methods.off_policy.learner import Learner, load_weights, weights
from vla_stack.methods.replay_buffer import Source
from vla_stack.ray_cluster import connect
from vla_stack.rollout.plan import Start
from vla_stack.rollout.workers import DEATHS

SEEDS = 1_000_000  # episode seeds of a run; of each worker a share
FORGET = 0.9  # what an episode's outcome still counts after the scene's next one
Begin = Callable[[Iterable[Start]], Collector]


class SceneSampler:
    """Draws of N scenes by the variance of their success, p (1 - p).

    A scene that always succeeds or always fails teaches little; one of either kind is still drawn now and then, since p
    is estimated with a uniform prior and old outcomes fade.

    Args:
        scenes: N.
        seed: Of the draws.
    """

    def __init__(self, scenes: int, seed: int) -> None:
        self._seed = seed
        self.counts: NDArray[np.float64] = np.zeros((scenes, 2))  # faded failures and successes

    @property
    def probabilities(self) -> NDArray[np.float64]:
        """How often each scene is drawn, [N]."""
        p = (self.counts[:, 1] + 1.0) / (self.counts.sum(1) + 2.0)
        variance = p * (1.0 - p)
        return variance / variance.sum()

    def draw(self, episode: int) -> int:
        """Scene of an episode, by its number."""
        return int(np.random.default_rng((self._seed, episode)).choice(len(self.counts), p=self.probabilities))

    def record(self, scene: int, success: bool) -> None:
        self.counts[scene] *= FORGET
        self.counts[scene, int(success)] += 1.0


class Rollouts(Protocol):
    """A source of fragments.

    Attributes:
        lost: Actors that died and were replaced.
        lag: Versions that the last fragment was behind.
        episodes: Number of the next episode: all before it have begun.
    """

    lost: int
    lag: int
    episodes: int

    def collect(self, learner: Learner, version: int) -> list[Fragment]: ...
    def restart(self) -> None: ...
    def close(self) -> None: ...


class LocalRollouts:
    """The engine in this process.

    Args:
        begin: Begins episodes in all environments.
        num_envs: How many these are; one slot of the buffer each.
        next_seed: Seed of the episode of a number.
        first_episode: Number of the first.
    """

    def __init__(self, begin: Begin, num_envs: int, next_seed: Callable[[int], int], first_episode: int) -> None:
        self._begin, self._slots, self._seed_of = begin, range(num_envs), next_seed
        self.lost = self.lag = 0
        self.episodes = first_episode
        self._collector = begin(self._starts())

    def restart(self) -> None:
        """Begin new episodes everywhere: what was open is left."""
        self._collector.close()
        self._collector = self._begin(self._starts())

    def collect(self, learner: Learner, version: int) -> list[Fragment]:
        """One control step, by the learner's policy as it is."""
        acting = self._collector.acting
        acting.version, acting.source = version, learner.source
        step, finished = self._collector.step()
        return [Fragment(self._slots, [step], finished)]

    def close(self) -> None:
        self._collector.close()

    def _starts(self) -> Iterator[Start]:
        while True:
            self.episodes += 1
            yield Start(self._seed_of(self.episodes - 1))


class Worker:
    """An actor on Ray: the engine, and a copy of what acts.

    Args:
        make: A learner whose buffer is not used, and what begins episodes with it.
        first_seed: Seed of its first episode; the next ones count on.
    """

    def __init__(self, make: Callable[[], tuple[Learner, Begin]], first_seed: int) -> None:
        torch.set_num_threads(1)
        self.learner, begin = make()
        self._collector, self._version = begin(map(Start, itertools.count(first_seed))), -1

    def run(self, published: dict[str, np.ndarray], version: int, source: int, steps: int) -> Fragment:
        """A fragment, planned with the published weights; its slots are the caller's to say."""
        acting = self._collector.acting
        if version != self._version:
            load_weights(self.learner.acting, {k: torch.from_numpy(v.copy()) for k, v in published.items()})
            self._version = version
        acting.version, acting.source = version, Source(source)
        made = [self._collector.step() for _ in range(steps)]
        return Fragment((), [step for step, _ in made], [record for _, records in made for record in records])


class RayRollouts:
    """Actors on Ray, which is started here where it does not run.

    Args:
        make: See :class:`Worker`; has to be importable where the actors are.
        workers: Actors.
        envs: Environments of each.
        seed_of: Seed of the episode of a number.
        first_episode: Number of the first.
        fragment: Control steps a request.
        max_lag: Versions that a fragment may be behind.

    Raises:
        UserError: Ray is not installed.
    """

    def __init__(
        self,
        make: Callable[[], tuple[Learner, Begin]],
        workers: int,
        envs: int,
        seed_of: Callable[[int], int],
        first_episode: int,
        fragment: int,
        max_lag: int,
    ) -> None:
        self._ray, self._own = connect(workers)
        self._make, self._envs, self._seed = make, envs, seed_of(first_episode)
        self.episodes = first_episode + workers * envs
        self._fragment, self._max_lag = fragment, max_lag
        self._begun = [0] * workers  # episodes that an actor's place has begun with those that died there
        self._finished = [0] * workers  # of the present actor
        self.actors = [self._start(w) for w in range(workers)]
        self._flying: dict[Any, tuple[int, int]] = {}  # request -> actor, version
        self._version, self._published = -1, None
        self.lost = self.lag = 0
        self._losses = [0] * workers  # of each place since its last fragment

    def _start(self, w: int) -> Any:
        share = SEEDS // len(self._begun)
        first = self._seed + w * share + self._begun[w]
        return self._ray.remote(num_cpus=1)(Worker).remote(self._make, first)

    def restart(self) -> None:
        """Actors go on with their episodes: nothing of them is saved."""

    def collect(self, learner: Learner, version: int) -> list[Fragment]:
        """Fragments that are due or ready; actors that died are replaced, and what they had under way is left.

        Raises:
            UserError: An actor cannot be made, or its successors die as it did.
        """
        ray = self._ray
        if version != self._version:
            arrays = {name: p.cpu().numpy().copy() for name, p in weights(learner.acting).items()}
            self._version, self._published = version, ray.put(arrays)
        busy = {w for w, _ in self._flying.values()}
        for w, actor in enumerate(self.actors):
            if w not in busy:
                ref = actor.run.remote(self._published, version, int(learner.source), self._fragment)
                self._flying[ref] = (w, version)
        due = [ref for ref, (_, v) in self._flying.items() if v + self._max_lag <= version]
        ready, _ = ray.wait([*self._flying], num_returns=1)
        fragments = []
        for ref in dict.fromkeys([*due, *ready]):
            w, planned = self._flying.pop(ref)
            slots = range(w * self._envs, (w + 1) * self._envs)
            try:
                made: Fragment = ray.get(ref)
            except ray.exceptions.RayActorError as e:
                self._replace(w, e)
                learner.store.cut(slots)
                continue
            self._losses[w], self.lag = 0, version - planned
            self.episodes += len(made.finished)
            self._finished[w] += len(made.finished)
            fragments.append(made._replace(slots=slots))
        return fragments

    def _replace(self, w: int, death: Exception) -> None:
        self.lost += 1
        self._losses[w] += 1
        told = (str(death).strip() or type(death).__name__).splitlines()
        if getattr(death, "actor_init_failed", False):  # its successor would fail as it did
            raise UserError(
                f"a rollout actor cannot be made: {told[-1].strip()}", "try rollouts=local, which shows where"
            ) from death
        if self._losses[w] == DEATHS:
            raise UserError(
                f"rollout actor {w} died {DEATHS} times without a fragment: {told[0].strip()}",
                "look at Ray's log for memory, or try rollouts=local",
            ) from death
        # A successor repeats no episode: not those that were under way, nor any of the fragment that is lost.
        self._begun[w] += self._finished[w] + self._envs * (1 + self._fragment)
        self._finished[w] = 0
        self.actors[w] = self._start(w)

    def close(self) -> None:
        for actor in self.actors:
            self._ray.kill(actor)
        if self._own:
            self._ray.shutdown()

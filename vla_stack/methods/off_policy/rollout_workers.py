"""Where rollouts come from: this process, or actors on Ray.

Both give fragments of transitions to the one learner, which updates in proportion to what it got and publishes its
weights as a version. An actor on Ray holds a copy of the acting networks; weights go to it through the object store,
one reference a version. How many versions behind a fragment may be is bounded: the learner waits for an actor that is
further behind. With no lag allowed and one actor the learner sees exactly what it would see of this process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from vla_stack.envs.state_env import StateEnv
from vla_stack.errors import UserError
from vla_stack.methods.off_policy.actor import Actor, Hand, Outcome
from vla_stack.methods.off_policy.learner import Learner, load_weights, weights
from vla_stack.methods.replay_buffer import Source, Transition
from vla_stack.ray_cluster import connect

SEEDS = 1_000_000  # episode seeds of a run; of each worker a share
LOSSES = 5  # actors that die one after the other in one place, none of them having given a fragment


class Fragment(NamedTuple):
    """Consecutive control steps of some of the store's slots."""

    slots: Sequence[int]
    steps: list[Transition]
    finished: list[Outcome]


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
    """Environments in this process.

    Args:
        envs: The environments; one slot of the store each.
        next_seed: Seed of the episode of a number.
        first_episode: Number of the first.
        hand: A person's actions, see :class:`Actor`.
    """

    def __init__(
        self, envs: Sequence[StateEnv], next_seed: Callable[[int], int], first_episode: int, hand: Hand | None = None
    ) -> None:
        self._envs, self._seed_of, self._hand = envs, next_seed, hand
        self.lost = self.lag = 0
        self.episodes = first_episode
        self.restart()

    def restart(self) -> None:
        """Begin new episodes everywhere: what was open is left."""

        def next_seed() -> int:
            self.episodes += 1
            return self._seed_of(self.episodes - 1)

        self._actor = Actor(self._envs, next_seed, self._hand)

    def collect(self, learner: Learner, version: int) -> list[Fragment]:
        """One control step, by the learner's policy as it is."""
        source = learner.source
        step = self._actor.step(partial(learner.policy, source=source), source, version)
        finished, self._actor.finished = self._actor.finished, []
        return [Fragment(range(len(self._envs)), [step], finished)]

    def close(self) -> None:
        for env in self._envs:
            env.close()


class Worker:
    """An actor on Ray: environments, and a copy of what acts.

    Args:
        make: The environments, and a learner whose buffer is not used.
        first_seed: Seed of its first episode; the next ones count on.
        explorer: State of the generator that acting draws from; None draws by ``first_seed``.
    """

    def __init__(self, make: Callable[[], tuple[list[StateEnv], Learner]], first_seed: int, explorer: Any) -> None:
        torch.set_num_threads(1)
        envs, self.learner = make()
        self.learner.agent.explorer.manual_seed(first_seed)
        if explorer is not None:
            self.learner.agent.explorer.set_state(torch.from_numpy(explorer.copy()))
        self._next = first_seed
        self._actor = Actor(envs, self._seed)
        self._version = -1

    def run(self, published: dict[str, np.ndarray], version: int, source: int, steps: int) -> Any:
        """A fragment's steps and outcomes, planned with the published weights."""
        if version != self._version:
            load_weights(self.learner.acting, {k: torch.from_numpy(v.copy()) for k, v in published.items()})
            self._version = version
        act = partial(self.learner.policy, source=Source(source))
        out = [self._actor.step(act, Source(source), version) for _ in range(steps)]
        finished, self._actor.finished = self._actor.finished, []
        return [tuple(t) for t in out], [tuple(o) for o in finished]

    def _seed(self) -> int:
        self._next += 1
        return self._next - 1


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
        explorer: State of the acting generator of the only actor, where there is one; see :class:`Worker`.

    Raises:
        UserError: Ray is not installed.
    """

    def __init__(
        self,
        make: Callable[[], tuple[list[StateEnv], Learner]],
        workers: int,
        envs: int,
        seed_of: Callable[[int], int],
        first_episode: int,
        fragment: int,
        max_lag: int,
        explorer: np.ndarray | None = None,
    ) -> None:
        self._ray, self._own = connect(workers)
        self._make, self._envs, self._seed = make, envs, seed_of(first_episode)
        self.episodes = first_episode + workers * envs
        self._fragment, self._max_lag, self._explorer = fragment, max_lag, explorer
        self._begun = [0] * workers  # episodes that an actor's place has begun with those that died there
        self._finished = [0] * workers  # of the present actor
        self.actors = [self._start(w) for w in range(workers)]
        self._flying: dict[Any, tuple[int, int]] = {}  # request -> actor, version
        self._version, self._published = -1, None
        self.lost = self.lag = 0
        self._losses = [0] * workers  # of each place since its last fragment

    def _start(self, w: int) -> Any:
        share = SEEDS // len(self._begun)
        explorer = None if self._begun[w] else self._explorer
        first = self._seed + w * share + self._begun[w]
        return self._ray.remote(num_cpus=1)(Worker).remote(self._make, first, explorer)

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
                steps, finished = ray.get(ref)
            except ray.exceptions.RayActorError as e:
                self._replace(w, e)
                learner.store.cut(slots)
                continue
            self._losses[w], self.lag = 0, version - planned
            self.episodes += len(finished)
            self._finished[w] += len(finished)
            fragments.append(Fragment(slots, [Transition(*t) for t in steps], [Outcome(*o) for o in finished]))
        return fragments

    def _replace(self, w: int, death: Exception) -> None:
        self.lost += 1
        self._losses[w] += 1
        told = (str(death).strip() or type(death).__name__).splitlines()
        if getattr(death, "actor_init_failed", False):  # its successor would fail as it did
            raise UserError(
                f"a rollout actor cannot be made: {told[-1].strip()}", "try rollouts=local, which shows where"
            ) from death
        if self._losses[w] == LOSSES:
            raise UserError(
                f"rollout actor {w} died {LOSSES} times without a fragment: {told[0].strip()}",
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

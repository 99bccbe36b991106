"""The acting half of reinforcement learning: environments side by side, each executing the chunk planned for it.

A plan is asked for where the last chunk has been executed or its episode has ended, for all such environments in one
batch, so weights never change inside a chunk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vla_stack.envs.state_env import StateEnv
from vla_stack.methods.replay_buffer import Source, Transition

Vector = NDArray[np.float32]


class Plan(NamedTuple):
    """Chunks for n observations.

    Attributes:
        actions: float32 [n, h, a] in [-1, 1].
        extras: What the store keeps beside them, [n, ...]; recorded at the chunk's first step, 0 at the others.
    """

    actions: NDArray
    extras: dict[str, NDArray] = {}


class Outcome(NamedTuple):
    """A finished episode."""

    seed: int
    success: bool
    steps: int
    reward: float  # undiscounted sum


Policy = Callable[[NDArray], Plan]  # float32 [n, o] -> Plan
Hand = Callable[[int, NDArray], NDArray | None]  # environment, observation [o] -> a person's action [a]; None: go on


class Actor:
    """Environments that act at the same time.

    Args:
        envs: The environments.
        next_seed: Seed of the next episode.
        hand: A person's action for an environment where there is one; it is executed in place of the plan's, and what
            is left of the plan is void.
    """

    def __init__(self, envs: Sequence[StateEnv], next_seed: Callable[[], int], hand: Hand | None = None) -> None:
        self.envs, self._next_seed, self._hand = list(envs), next_seed, hand
        n, action = len(envs), envs[0].action_dim
        self._seeds = [next_seed() for _ in envs]
        self.obs = np.stack([env.reset(seed) for env, seed in zip(envs, self._seeds, strict=True)])
        self._queues: list[Vector] = [np.zeros((0, action), np.float32) for _ in envs]
        self._at = np.zeros(n, np.int32)
        self._versions = np.zeros(n, np.int64)
        self._earned = np.zeros(n)
        self.finished: list[Outcome] = []  # of episodes that ended since the caller last emptied it

    def step(self, policy: Policy, source: Source = Source.ONLINE, version: int = 0) -> Transition:
        """Advance every environment by one control step."""
        n = len(self.envs)
        wanted = [i for i in range(n) if self._at[i] >= len(self._queues[i])]
        extras: dict[str, NDArray] = {}
        if wanted:
            plan = policy(self.obs[wanted])
            for i, chunk in zip(wanted, plan.actions, strict=True):
                self._queues[i], self._at[i], self._versions[i] = chunk, 0, version
            for name, values in plan.extras.items():
                extras[name] = np.zeros((n, *values.shape[1:]), np.float32)
                extras[name][wanted] = values
        actions = np.stack([q[k] for q, k in zip(self._queues, self._at, strict=True)])
        sources = np.full(n, source, np.int8)
        index = self._at.copy()
        if self._hand is not None:
            for i in range(n):
                if (action := self._hand(i, self.obs[i])) is not None:
                    actions[i], sources[i], index[i] = action, Source.HUMAN, 0
                    self._at[i] = len(self._queues[i])
        before, after = self.obs, np.empty_like(self.obs)
        reward = np.empty(n, np.float32)
        over = np.zeros((2, n), np.bool_)
        versions = self._versions.copy()
        self.obs = after.copy()
        for i, env in enumerate(self.envs):
            after[i], reward[i], over[0, i], over[1, i] = env.step(actions[i])
            self._earned[i] += reward[i]
            self._at[i] += 1
            self.obs[i] = self._end(i) if over[:, i].any() else after[i]
        return Transition(before, actions, reward, over[0], over[1], after, index, versions, sources, extras)

    def _end(self, i: int) -> Vector:
        env = self.envs[i]
        self.finished.append(Outcome(self._seeds[i], env.success, env.steps, float(self._earned[i])))
        self._earned[i], self._queues[i], self._at[i] = 0.0, self._queues[i][:0], 0
        self._seeds[i] = self._next_seed()
        return env.reset(self._seeds[i])


def evaluate(envs: Sequence[StateEnv], policy: Policy, seeds: Sequence[int]) -> list[Outcome]:
    """Outcomes of the episodes of ``seeds``, in their order; as many at a time as there are environments."""
    todo, out = deque(enumerate(seeds)), {}
    running: dict[
        int, tuple[int, Vector, deque[Vector], float]
    ] = {}  # env -> episode, observation, plan, reward so far
    while todo or running:
        for i in set(range(len(envs))) - set(running):
            if todo:
                episode, seed = todo.popleft()
                running[i] = episode, envs[i].reset(seed), deque(), 0.0
        wanted = [i for i, (_, _, plan, _) in running.items() if not plan]
        if wanted:
            chunks = policy(np.stack([running[i][1] for i in wanted])).actions
            for i, chunk in zip(wanted, chunks, strict=True):
                running[i][2].extend(chunk)
        for i, (episode, _, plan, earned) in list(running.items()):
            obs, reward, terminated, truncated = envs[i].step(plan.popleft())
            running[i] = episode, obs, plan, earned + reward
            if terminated or truncated:
                out[episode] = Outcome(seeds[episode], envs[i].success, envs[i].steps, earned + reward)
                del running[i]
    return [out[i] for i in range(len(seeds))]

"""The acting half of reinforcement learning: the engine's control steps as transitions.

The engine executes whole chunks and asks for the next one where the last has been executed or its episode has ended,
for all such rows in one batch, so weights never change inside a chunk. Noise follows from the seed of the episode and
the control step alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vla_stack.envs.making import observe
from vla_stack.envs.vector import EnvStep
from vla_stack.methods.off_policy.deployed import Seen, deployed
from vla_stack.methods.off_policy.learner import Learner
from vla_stack.methods.replay_buffer import Source, Transition
from vla_stack.rollout.engine import ChunkPolicy, stream
from vla_stack.rollout.plan import Plan, Start, StepEvent
from vla_stack.rollout.records import IDLE, EpisodeRecord
from vla_stack.schema import Chunks, Continuation, Observation, PolicySpec

Reward = Literal["step", "success", "own"]


def paid(reward: Reward, after: EnvStep) -> tuple[float, bool, bool]:
    """Reward, terminated and truncated of a control step; never both of the latter.

    Success ends an episode. What ended otherwise has failed for good: that is cut off, so that a failure never looks
    like relief.
    """
    if reward == "own":
        return after.reward, after.terminated, after.truncated and not after.terminated
    success = bool(after.info["is_success"])
    return float(success) - (reward == "step"), success, (after.truncated or after.terminated) and not success


class Uniform:
    """Chunks anywhere in the robot's range."""

    def __init__(self, spec: PolicySpec) -> None:
        self.spec = spec

    def infer(
        self,
        observations: Sequence[Observation],
        seeds: Sequence[int],
        continuations: Sequence[Continuation | None] = (),
    ) -> Chunks:
        robot, shape = self.spec.robot, (self.spec.horizon, len(self.spec.robot.action))
        drawn = [np.random.default_rng(s).uniform(robot.action_low, robot.action_high, shape) for s in seeds]
        return Chunks(np.stack(drawn).astype(np.float32))


class Acting:
    """A learner's policy as it explores, which the engine asks; with the learner's weights as they are when it does.

    Args:
        learner: The learner.
        seen: What it observes.

    Attributes:
        spec: What it consumes and gives.
        version: Of the weights.
        source: What the transitions of now are.
    """

    def __init__(self, learner: Learner, seen: Seen) -> None:
        self.learner, self.seen, self.version = learner, seen, 0
        self.spec = deployed(learner, seen, Source.ONLINE).spec
        self._policies: dict[Source, ChunkPolicy] = {}
        self.source = Source.ONLINE

    def infer(
        self,
        observations: Sequence[Observation],
        seeds: Sequence[int],
        continuations: Sequence[Continuation | None] = (),
    ) -> Chunks:
        """One chunk an observation; plans are not continued."""
        if self.source not in self._policies:
            random = self.learner.random_in(self.source)
            self._policies[self.source] = (
                Uniform(self.spec) if random else deployed(self.learner, self.seen, self.source)
            )
        return self._policies[self.source].infer(observations, seeds)


class Fragment(NamedTuple):
    """Consecutive control steps of some of the buffer's slots.

    Attributes:
        slots: Which.
        steps: One a control step, of all of them.
        finished: Episodes that ended.
    """

    slots: Sequence[int]
    steps: list[Transition]
    finished: list[EpisodeRecord]


class Collector:
    """Episodes under way, side by side.

    Args:
        acting: Who acts.
        plan: What is run.
        reward: What is paid.
        starts: Which episodes, without end.
        num_envs: Rows.
    """

    def __init__(self, acting: Acting, plan: Plan, reward: Reward, starts: Iterable[Start], num_envs: int) -> None:
        self.acting, self._reward, self._robot = acting, reward, plan.policy.robot
        self._stream = stream(acting, plan, starts, num_envs)
        self._vectors: dict[int, NDArray[np.float32]] = {}  # what each row showed last
        self._chunks: dict[int, tuple[int, int, int]] = {}  # of each row: request, version, actions executed

    def step(self) -> tuple[Transition, list[EpisodeRecord]]:
        """One control step of every row."""
        events, records = next(self._stream)
        events = sorted(events, key=lambda pair: pair[0])
        first = [(row, event.observation) for row, event in events if event.k == 0]
        after = [observe(e.after.observation, self._robot, e.observation.task, e.k + 1) for _, e in events]
        seen = self.acting.seen.vectors([*(observation for _, observation in first), *after])
        self._vectors |= {row: vector for (row, _), vector in zip(first, seen, strict=False)}
        obs, next_obs = np.stack([self._vectors[row] for row, _ in events]), seen[len(first) :]
        self._vectors |= {row: vector for (row, _), vector in zip(events, next_obs, strict=True)}
        commands = np.stack([event.decision.command for _, event in events])
        reward, terminated, truncated = zip(*(paid(self._reward, e.after) for _, e in events), strict=True)
        index, version, source = zip(*(self._planned(row, event) for row, event in events), strict=True)
        columns = (np.array(reward, np.float32), np.array(terminated), np.array(truncated), next_obs)
        counts = (np.array(index, np.int32), np.array(version, np.int64), np.array(source, np.int8))
        return Transition(obs, self.acting.seen.actions(commands), *columns, *counts), records

    def close(self) -> None:
        """Leave the episodes that are open, and close the environments."""
        self._stream.close()

    def _planned(self, row: int, event: StepEvent) -> tuple[int, int, int]:
        """Position of an action in its chunk, the version that planned it, and who acted."""
        if event.decision.chunk == IDLE:  # a person, by whom what was planned is void
            return 0, self.acting.version, int(event.decision.label)
        request, version, done = self._chunks.get(row, (IDLE, 0, 0))
        if event.k == 0 or event.decision.chunk != request:
            version, done = self.acting.version, 0
        self._chunks[row] = event.decision.chunk, version, done + 1
        return done, version, int(self.acting.source)

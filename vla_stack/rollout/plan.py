"""What an episode of the engine is: where it happens, who acts, who watches, and when it is over."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from vla_stack.envs.vector import EnvStep
from vla_stack.rollout.latency import Latency
from vla_stack.rollout.records import IDLE
from vla_stack.runtime.executor import ExecutorConfig
from vla_stack.schema import Continuation, Observation, PolicySpec, RobotSpec

NO_COMMANDS = np.zeros((0, 0), np.float32)
Instruct = Literal["swap"] | None


class Start(NamedTuple):
    """Which episode.

    Attributes:
        seed: Of the environment.
        number: Tells several rollouts of one start apart; the policy's noise depends on it.
    """

    seed: int
    number: int = 0


@dataclass(frozen=True)
class Attempts:
    """Endless starts, for who stops when there are enough successes.

    Attributes:
        seed_of: Seed of an attempt's number; travels to workers.
        first: Number of the first attempt.
        step: Distance between numbers.
    """

    seed_of: Callable[[int], int]
    first: int = 0
    step: int = 1

    def __iter__(self) -> Iterator[Start]:
        return (Start(self.seed_of(number)) for number in itertools.count(self.first, self.step))

    def __getitem__(self, share: slice) -> Attempts:
        """Every so manieth, as lists are sliced; endless too."""
        return Attempts(self.seed_of, self.first + self.step * (share.start or 0), self.step * (share.step or 1))


@dataclass(frozen=True, slots=True)
class Query:
    """A chunk is wanted for this observation, with this seed for the policy's noise."""

    observation: Observation
    seed: int
    continuation: Continuation | None = None


Reply = tuple[NDArray[np.float32], int]  # float32 [H, A], and how many of them to execute (0: as configured)


class Decision(NamedTuple):
    """What is done in one control step.

    Attributes:
        command: float32 [A], as it is sent.
        chunk: Request id of the chunk that it came from; ``IDLE`` where it came from none.
        noise: Seed of the policy's noise in that chunk.
        label: Whatever else the agent tells recorders of this step: a clean label, say.
        ahead: float32 [m, A], the commands that it means to send next, as far as it knows. A world model imagines all
            of them at once; what is sent in the end may differ.
    """

    command: NDArray[np.float32]
    chunk: int = IDLE
    noise: int = 0
    label: Any = None
    ahead: NDArray[np.float32] = NO_COMMANDS


class StepEvent(NamedTuple):
    """One control step, as recorders see it.

    Attributes:
        k: The step, from 0.
        observation: What the agent knew.
        decision: What it did.
        after: What came of it.
    """

    k: int
    observation: Observation
    decision: Decision
    after: EnvStep


class Agent(Protocol):
    """Who acts in one episode. Asks the engine's policy for chunks by yielding queries; needs none if it does not."""

    def act(self, k: int, observation: Observation, now: EnvStep) -> Generator[Query, Reply, Decision | None]:
        """The decision of control step ``k``; None ends the episode."""
        ...

    def result(self) -> Any:
        """What is kept, in :attr:`EpisodeRecord.outcome`; asked for once, at the end."""
        ...


class Recorder(Protocol):
    """Who watches one episode."""

    def step(self, event: StepEvent) -> None: ...

    def result(self) -> Any:
        """What is kept, in :attr:`EpisodeRecord.attached`; asked for once, at the end."""
        ...


class Episode(NamedTuple):
    """What agents and recorders are made from when an episode begins.

    Attributes:
        env: The row's own environment.
        robot: The environment's embodiment.
        start: Which episode.
        plan: What all episodes share.
        first: What the environment showed after its reset.
        row: Which of the rows that advance together; for who acts in one of them alone.
    """

    env: Any
    robot: RobotSpec
    start: Start
    plan: Plan
    first: EnvStep
    row: int = 0


@dataclass(frozen=True)
class Plan:
    """What all episodes of one run share; travels to workers, so whatever makes agents or recorders can be pickled.

    Attributes:
        env_id: See :func:`vla_stack.envs.make`.
        options: Keyword arguments of the environment beyond those that follow from ``policy``.
        policy: What the policy consumes and produces; of an expert, the environment's robot.
        agent: Makes who acts, see :mod:`vla_stack.rollout.agents`.
        recorders: Name -> makes who watches.
        executor: The timeline's rules, where a policy acts.
        latency: A reply to the request of step k is there before step ``k + latency.ticks()`` is dispatched.
        instruct: ``swap`` tells the agent another of the task's instructions than the one that success refers to.
        linger: Steps that an episode goes on after success; None leaves its end to the agent and the time limit.
    """

    env_id: str
    options: dict[str, Any]
    policy: PolicySpec
    agent: Callable[[Episode], Agent]
    recorders: Mapping[str, Callable[[Episode], Recorder]] = field(default_factory=dict)
    executor: ExecutorConfig = ExecutorConfig()
    latency: Latency = Latency()
    instruct: Instruct = None
    linger: int | None = 0

"""The acting half of reinforcement learning: the engine's control steps as transitions, offline and online.

The engine executes whole chunks and asks for the next one where the last has been executed or its episode has ended,
for all such rows in one batch, so weights never change inside a chunk. Noise follows from the seed of the episode and
the control step alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vla_stack import envs
from vla_stack.envs.making import IMAGINED, is_benchmark, is_task, observe
from vla_stack.envs.vector import VectorEnv
from vla_stack.errors import UserError
from vla_stack.methods.off_policy.deployed import Seen, Vector, deployed, in_range, measured
from vla_stack.methods.off_policy.learner import Learner
from vla_stack.methods.practice import Reward, is_imagined, judged, paid
from vla_stack.methods.replay_buffer import Source, Transition
from vla_stack.policies.chunk_policy import ChunkPolicy
from vla_stack.rollout import engine
from vla_stack.rollout.agents import PolicyAgent
from vla_stack.rollout.plan import Agent, Episode, Plan, Recorder, Start, StepEvent
from vla_stack.rollout.records import IDLE, EpisodeRecord
from vla_stack.runtime.executor import ExecutorConfig
from vla_stack.schema import Chunks, Continuation, Observation, PolicySpec, RobotSpec
from vla_stack.training.recipe import Recipe, TaskRecipe

if TYPE_CHECKING:
    from vla_stack.methods.off_policy.recipe import OffPolicy

EXECUTOR = ExecutorConfig("sync")  # whole chunks


def practised(recipe: Recipe) -> TaskRecipe:
    """The environment that is learnt in; an imagined robot is steered by moves of the tool, as the simulated one is."""
    task = recipe.task
    if is_imagined(task):
        return replace(task, id=f"steered:{task.id.removeprefix(IMAGINED)}")
    return replace(task, id=judged(task.id, recipe.method.judge))


def rows_of(task: TaskRecipe, method: OffPolicy, frozen: ChunkPolicy | None) -> VectorEnv:
    """One row of a task as its learner sees it: its encoder's cameras, or the poses of the objects and no cameras.

    Raises:
        UserError: There is no such environment, or it is none with a vector of actions and of observations.
    """
    shown: dict[str, Any] = {}
    cameras = () if frozen is None else frozen.spec.robot.cameras
    looks = {"cameras": tuple(c.name for c in cameras)} | ({"image_size": cameras[0].height} if cameras else {})
    if is_task(task.id):
        shown = {"control_mode": "ee_delta", "privileged": frozen is None, "tool_target": True, **looks}
    elif is_benchmark(task.id):
        full = {"full_state": frozen is None} if task.id.startswith("metaworld/") else {}
        shown = {"control_mode": "ee_delta", **looks, **full}
    rows = envs.make(task.id, 1, None, shown | options_of(task, method))
    if rows.robot is None:
        rows.close()
        raise UserError(f"{task.id} does not describe its robot", "give it a `spec_robot`")
    return rows


def options_of(task: TaskRecipe, method: OffPolicy) -> dict[str, Any]:
    """Keyword arguments of an environment beyond those that follow from a policy's robot."""
    return task.options | ({"goalless": True} if method.reward == "task" else {})


def plan_of(
    task: TaskRecipe,
    method: OffPolicy,
    robot: RobotSpec,
    agent: Callable[[Episode], Agent] = PolicyAgent,
    recorders: Mapping[str, Callable[[Episode], Recorder]] | None = None,
) -> Plan:
    """Episodes of whole chunks, as they are one action to the critics."""
    spec = PolicySpec(robot, method.horizon, extras={"n_action_steps": method.horizon})
    return Plan(task.id, options_of(task, method), spec, agent, recorders or {}, EXECUTOR)


def transition(
    events: Sequence[StepEvent],
    obs: Vector,
    next_obs: Vector,
    robot: RobotSpec,
    reward: Reward,
    planned: Iterable[tuple[int, int, int]],
) -> Transition:
    """Control steps [n] of the engine, side by side or of one episode, as transitions.

    Args:
        events: The steps.
        obs: What was observed before each, [n, o].
        next_obs: What was after it.
        robot: Whose range actions are scaled by.
        reward: What is paid.
        planned: Of each its position in its chunk, the version that planned it, and who acted.
    """
    commands = np.stack([event.decision.command for event in events])
    pay, terminated, truncated = zip(*(paid(reward, event.after) for event in events), strict=True)
    index, version, source = zip(*planned, strict=True)
    columns = (np.array(pay, np.float32), np.array(terminated), np.array(truncated), next_obs)
    counts = (np.array(index, np.int32), np.array(version, np.int64), np.array(source, np.int8))
    return Transition(obs, in_range(robot, commands), *columns, *counts)


def shown_after(event: StepEvent, robot: RobotSpec) -> Observation:
    """What a step led to, as its agent would have seen it."""
    return observe(event.after.observation, robot, event.observation.task, event.k + 1)


class StoredEpisode:
    """Recorder of an episode's transitions, not normalised, for who learns from them later.

    Args:
        episode: The episode.
        reward: What is paid.
        frozen: The encoder of what is observed; None: the state alone is.
    """

    def __init__(self, episode: Episode, reward: Reward, frozen: ChunkPolicy | None) -> None:
        self._robot, self._reward, self._frozen = episode.plan.policy.robot, reward, frozen
        self._events: list[StepEvent] = []
        self._obs: list[Vector] = []

    def step(self, event: StepEvent) -> None:
        self._events.append(event)
        self._obs.append(measured([event.observation], self._frozen))

    def result(self) -> Transition | None:
        """One row a step; None of an episode without any."""
        if not self._events:
            return None
        seen = [*self._obs, measured([shown_after(self._events[-1], self._robot)], self._frozen)]
        planned = [(0, 0, int(Source.OFFLINE))] * len(self._events)
        obs = np.concatenate(seen)
        return transition(self._events, obs[:-1], obs[1:], self._robot, self._reward, planned)


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
        self._policies: dict[Source, engine.ChunkPolicy] = {}
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
        self._stream = engine.stream(acting, plan, starts, num_envs)
        self._vectors: dict[int, NDArray[np.float32]] = {}  # what each row showed last
        self._chunks: dict[int, tuple[int, int, int]] = {}  # of each row: request, version, actions executed

    def step(self) -> tuple[Transition, list[EpisodeRecord]]:
        """One control step of every row."""
        pairs, records = next(self._stream)
        rows, events = zip(*sorted(pairs, key=lambda pair: pair[0]), strict=True)
        first = [(row, event.observation) for row, event in zip(rows, events, strict=True) if event.k == 0]
        after = [shown_after(event, self._robot) for event in events]
        seen = self.acting.seen.vectors([*(observation for _, observation in first), *after])
        self._vectors |= {row: vector for (row, _), vector in zip(first, seen, strict=False)}
        obs, next_obs = np.stack([self._vectors[row] for row in rows]), seen[len(first) :]
        self._vectors |= dict(zip(rows, next_obs, strict=True))
        planned = [self._planned(row, event) for row, event in zip(rows, events, strict=True)]
        return transition(events, obs, next_obs, self._robot, self._reward, planned), records

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

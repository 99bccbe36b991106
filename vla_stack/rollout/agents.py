"""Who acts: a policy behind the robot's own executor, or a scripted expert."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vla_stack import envs
from vla_stack.envs.vector import EnvStep
from vla_stack.errors import UserError
from vla_stack.history import History
from vla_stack.rollout.plan import Agent, Decision, Episode, Plan, Query, Recorder, Reply
from vla_stack.runtime.dispatch import Request, State
from vla_stack.runtime.executor import Executor
from vla_stack.schema import ActionChunk, Observation, PolicySpec

HASH_BITS = 2  # dropped of a hashed seed, so that every generator takes it


class PolicyAgent:
    """The engine's policy under the virtual clock, through :class:`~vla_stack.runtime.executor.Executor`.

    Computing a chunk costs no time; when it *arrives* is an input of the experiment. Where a chunk is
    late the last command is repeated, as a robot holds.
    """

    def __init__(self, episode: Episode) -> None:
        self._episode, plan = episode, episode.plan
        self._timeline = Executor(episode.robot, plan.policy, plan.executor)
        self._timeline.reset(0, episode.start.seed)
        # A robot knows its delay from the episodes before; a fresh executor an episode makes episodes independent.
        self._timeline.delay.observe(plan.latency.usual_ticks(episode.robot.rate_hz))
        self._history = History(plan.policy.history)
        self._arrivals: list[tuple[int, ActionChunk]] = []
        self._noise: dict[int, int] = {}  # request id -> seed
        self._command = episode.robot.standstill(episode.first.observation["agent_pos"])

    def act(self, k: int, observation: Observation, now: EnvStep) -> Generator[Query, Reply, Decision | None]:
        plan, start = self._episode.plan, self._episode.start
        if (request := self._timeline.plan(k)) is not None:
            seed = request.seed if not start.number else numbered(request.seed, start.number)
            shown = self._history.beside(observation).expecting(request.state)
            reply = yield Query(shown, seed, request.continuation)
            late = plan.latency.ticks(self._episode.robot.rate_hz, (start.seed, k))
            self._arrivals.append((k + late, arrived(request, reply)))
            self._noise[request.rid] = seed
        for _, chunk in [arrival for arrival in self._arrivals if arrival[0] <= k]:
            self._timeline.deliver(chunk, k)
        self._arrivals = [arrival for arrival in self._arrivals if arrival[0] > k]
        dispatch = self._timeline.dispatch(k)
        if dispatch.state is State.STOP:
            return None  # a stopped robot waits for a person, and here there is none
        self._command = self._command if dispatch.action is None else dispatch.action
        if dispatch.state is not State.RUN:
            return Decision(self._command)
        noise, ahead = self._noise[dispatch.chunk_rid], self._timeline.planned(k + 1)
        return Decision(self._command, dispatch.chunk_rid, noise, ahead=ahead)

    def resume(self, k: int, command: NDArray[np.float32]) -> None:
        """Go on at step ``k`` after somebody else has acted, whose last command was this one: float32 [A].

        Nothing of a chunk from before is executed.
        """
        self._timeline.reset(k, numbered(self._episode.start.seed, k))
        self._arrivals.clear()
        self._command = command

    def result(self) -> None:
        """Nothing that the record does not say."""


class ExpertAgent:
    """A scripted expert, with noise on what it executes.

    Its label is the clean action, which is what demonstrations are made of.

    Args:
        episode: The episode.
        make: (environment, noise, seed) -> the expert, e.g. ``sim.make_expert``.
        noise: See there.
    """

    def __init__(self, episode: Episode, make: Callable[[Any, float, int], Any], noise: float) -> None:
        self._expert = make(episode.env, noise, episode.start.seed)

    def act(self, k: int, observation: Observation, now: EnvStep) -> Generator[Query, Reply, Decision | None]:
        label = self._expert.act()
        return Decision(np.asarray(self._expert.perturb(label), np.float32), label=label)
        yield  # a generator, as agents that ask a policy are

    def result(self) -> None:
        """Nothing that the record does not say."""


def expert_plan(
    env_id: str,
    options: dict[str, Any],
    agent: Callable[[Episode], Agent],
    recorders: Mapping[str, Callable[[Episode], Recorder]],
    linger: int | None = 0,
) -> Plan:
    """A plan in which no policy is asked, so that the environment is observed as its options make it."""
    one = envs.make(env_id, 1, None, options)
    robot = one.robot
    one.close()
    if robot is None:
        raise UserError(f"{env_id} does not describe its robot", "give it a `spec_robot`")
    return Plan(env_id, options, PolicySpec(robot, 1), agent, recorders, linger=linger)


def numbered(seed: int, number: int) -> int:
    """Seed of the policy's noise in another rollout of the same start."""
    return int(np.random.SeedSequence((seed, number)).generate_state(1, np.uint64)[0] >> np.uint64(HASH_BITS))


def arrived(request: Request, reply: Reply) -> ActionChunk:
    """What a policy has answered to a request of the timeline, as the timeline takes it."""
    actions, execute = reply
    return ActionChunk(actions, request.origin, request.k_obs, rid=request.rid, epoch=request.epoch, execute=execute)

"""One dimension of a robot moved by a distance and back, by the control loop that a policy's chunks are driven by."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vla_stack.errors import UserError
from vla_stack.runtime.clock import Clock, RealClock
from vla_stack.runtime.control import ControlLoop
from vla_stack.runtime.dispatch import Request, State
from vla_stack.runtime.driver import Driver
from vla_stack.runtime.episode_log import Row
from vla_stack.runtime.executor import Executor, ExecutorConfig
from vla_stack.runtime.safety import SafetyEnvelope
from vla_stack.schema import ActionChunk, Observation, PolicySpec


class Jogged(NamedTuple):
    """Where the dimension was measured: at the start, when it should have moved, and when it should be back."""

    start: float
    there: float
    back: float


def jog(driver: Driver, envelope: SafetyEnvelope, dimension: int, by: float, clock: Clock | None = None) -> Jogged:
    """Move one dimension of a connected robot.

    Args:
        driver: The robot.
        envelope: What any command has to pass.
        dimension: Index of an action.
        by: How far, in the dimension's unit.
        clock: For tests.

    Raises:
        UserError: The goal is outside the limits, and nothing was sent; or the robot was stopped on the way.
    """
    spec = driver.spec
    ticks = round((1.0 + 2.0 * abs(by) / min(envelope.limits(dimension)[2], 1.0)) * spec.rate_hz)
    port = _ThereAndBack(envelope, dimension, by, ticks)
    config = ExecutorConfig(mode="sync", execute=ticks, hold_s=ticks / spec.rate_hz)
    executor = Executor(spec, PolicySpec(spec, ticks), config)
    ControlLoop(driver, executor, envelope, clock or RealClock(), port).run(0)
    if port.stopped:
        raise UserError(f"stopped: {port.stopped}", "vla robot check says more")
    if len(port.measured) < 3:  # a simulation's episode is over after a while
        raise UserError("the robot's episode ended before it was back", "give a shorter distance")
    start, there, back = port.measured
    return Jogged(start, there, back)


class _ThereAndBack:
    """Answers the loop's requests: ``ticks`` steps at the goal, as many at the start; the third one ends the loop."""

    def __init__(self, envelope: SafetyEnvelope, dimension: int, by: float, ticks: int) -> None:
        self._envelope, self._dimension, self._by, self._ticks = envelope, dimension, by, ticks
        self._dims = len(envelope.robot.action)
        self._start: NDArray[np.float32] = np.zeros(self._dims, np.float32)
        self._replies: list[ActionChunk | str] = []
        self.measured: list[float] = []  # of the dimension, with each request
        self.stopped = ""

    def offer(self, obs: Observation, request: Request | None) -> None:
        if request is None:
            return
        self.measured.append(float(obs.state[self._dimension]))
        if len(self.measured) > 2:  # it is back; another answer would be another motion
            self._replies.append("abort")
            return
        there = len(self.measured) == 1
        if there:
            self._check(self.measured[0] + self._by)
            self._start = obs.state[: self._dims].copy()
        actions = np.repeat(self._start[None], self._ticks, 0)
        actions[:, self._dimension] += self._by * there
        origin, rid, epoch = request.origin, request.rid, request.epoch
        self._replies.append(ActionChunk(actions, origin, request.k_obs, rid=rid, epoch=epoch))

    def _check(self, goal: float) -> None:
        """Refuse what the envelope would cut short, or take for a wrong unit."""
        low, high, *_ = self._envelope.limits(self._dimension)
        if not low <= goal <= high:
            dim = self._envelope.robot.action[self._dimension]
            raise UserError(
                f"{dim.name} would be {goal:.3f} {dim.unit}, its limits are {low:.3f} to {high:.3f}",
                "give a smaller --by, or one the other way",
            )

    def receive(self, timeout_s: float = 0.0) -> list[ActionChunk | str]:
        replies, self._replies = self._replies, []
        return replies

    def announce(self, k: int, state: State, why: str) -> None:
        if state is State.STOP:
            self.stopped = why
            self._replies = ["abort"]

    def record(self, row: Row) -> None: ...

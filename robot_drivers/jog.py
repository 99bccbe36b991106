"""One dimension of a robot moved by a distance and back, by the control loop that a policy's chunks are driven by."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

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
        UserError: The robot was stopped on the way.
    """
    spec = driver.spec
    ticks = round((1.0 + 2.0 * abs(by) / min(spec.action[dimension].max_rate, 1.0)) * spec.rate_hz)
    port = _OneChunk(len(spec.action), dimension, by, ticks)
    config = ExecutorConfig(mode="sync", execute=2 * ticks, hold_s=2 * ticks / spec.rate_hz)
    executor = Executor(spec, PolicySpec(spec, 2 * ticks), config)
    ControlLoop(driver, executor, envelope, clock or RealClock(), port).run(0)
    if port.stopped:
        raise UserError(f"stopped: {port.stopped}", "vla robot check says more")
    there = [value for step, value in port.measured if step <= ticks]  # before the first command back
    return Jogged(there[0], there[-1], port.measured[-1][1])


class _OneChunk:
    """Answers the loop's requests with one chunk, ``ticks`` steps at the goal and as many back; then ends the loop."""

    def __init__(self, dims: int, dimension: int, by: float, ticks: int) -> None:
        self._dims, self._dimension, self._by, self._ticks = dims, dimension, by, ticks
        self._replies: list[ActionChunk | str] = []
        self.measured: list[tuple[int, float]] = []  # (control step, value of the dimension)
        self.stopped = ""

    def offer(self, obs: Observation, request: Request | None) -> None:
        self.measured.append((obs.step, float(obs.state[self._dimension])))
        if len(self.measured) == 2 * self._ticks + 2:
            self._replies.append("abort")
        if request is not None:
            actions = np.repeat(obs.state[None, : self._dims], 2 * self._ticks, 0)
            actions[: self._ticks, self._dimension] += self._by
            origin, rid, epoch = request.origin, request.rid, request.epoch
            self._replies.append(ActionChunk(actions, origin, request.k_obs, rid=rid, epoch=epoch))

    def receive(self, timeout_s: float = 0.0) -> list[ActionChunk | str]:
        replies, self._replies = self._replies, []
        return replies

    def announce(self, k: int, state: State, why: str) -> None:
        if state is State.STOP:
            self.stopped = why
            self._replies = ["abort"]

    def record(self, row: Row) -> None: ...

"""STOP of a robot, and what lets it go on.

A robot is stopped where its plan has run out for too long (``runtime/executor.py``), where the envelope refuses to go
on or the robot reports a fault (``runtime/safety.py``), where an operator says so (``runtime/operator_lane.py``), and
where the computer was suspended for a while.
The driver's ``stop`` is called once, when it begins. STOP ends in three ways, and in each the robot holds where it is
until a new command comes:

- the robot node re-arms, by itself or because a person answered it; without an operator, or while the policy may act;
- the operator re-arms, or takes the robot by hand;
- the next episode begins.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from vla_stack.runtime.clock import Clock
from vla_stack.runtime.dispatch import Dispatch, State
from vla_stack.runtime.driver import Driver, SelfChecking
from vla_stack.runtime.executor import Executor
from vla_stack.runtime.operator_lane import Act, OperatorLane, Order
from vla_stack.runtime.safety import SafetyEnvelope
from vla_stack.schema import Observation

REARM_S = 1.0  # between a STOP and re-arming
SUSPENDED_NS = 100_000_000  # of a computer, after which nobody knows what is in front of the robot


class Outlet:
    """Every command's way to the robot: through the envelope, and none while the robot is stopped.

    Args:
        driver: Connected.
        executor: Whose plan a re-armed robot forgets; None where there is no policy.
        envelope: Which command is allowed.
        clock: For the age of what a command rests on.
        lane: The operator's, if there is one; it learns that the envelope has stopped the robot.
        announce: Called with (tick, state, why) when the state changes.

    Attributes:
        state: After the last command.
        last: float32 [A], the command sent last, or where the robot was when it began or was re-armed.
        limits: Names of the limits that the envelope applied to it.
    """

    def __init__(
        self,
        driver: Driver,
        executor: Executor | None,
        envelope: SafetyEnvelope,
        clock: Clock,
        lane: OperatorLane | None,
        announce: Callable[[int, State, str], None],
    ) -> None:
        self._driver, self._executor, self._envelope = driver, executor, envelope
        self._clock, self._lane, self._announce = clock, lane, announce
        self._self_checking = driver if isinstance(driver, SelfChecking) else None
        self._dims = len(driver.spec.action)
        self._suspended_ns = clock.suspended_ns()
        self.state = State.HOLD
        self.last: NDArray[np.float32] = np.zeros(self._dims, np.float32)
        self.limits: tuple[str, ...] = ()

    def begin(self, obs: Observation) -> None:
        """An episode begins where the robot is."""
        self.state = State.HOLD
        self._suspended_ns = self._clock.suspended_ns()
        self._hold_at(obs)

    def send(
        self, k: int, due: Dispatch, action: NDArray[np.float32] | None, obs: Observation, why: str
    ) -> tuple[State, str, NDArray[np.float32] | None]:
        """One command through the envelope to the robot.

        Args:
            k: Control step.
            due: What is due in it.
            action: float32 [A], what to send of that.
            obs: What it rests on.
            why: The robot would not run, where the envelope says nothing.

        Returns:
            The state that it leads to, why, and what was sent.
        """
        state, sent = due.state, None
        if state is not State.STOP:
            age_s = (self._clock.now_ns() - obs.t_capture_ns) * 1e-9
            fault = self._self_checking.fault if self._self_checking else None
            if fault and fault.stop:
                self._envelope.stop(fault.kind)
            slept_ns = self._clock.suspended_ns() - self._suspended_ns
            if slept_ns > SUSPENDED_NS:  # by any other clock of ours no time has passed since the last command
                self._suspended_ns += slept_ns
                self._envelope.stop("suspended")
            verdict = self._envelope.filter(action if state is State.RUN else None, age_s, fault.kind if fault else "")
            sent, self.limits = verdict.command, verdict.changes
            if verdict.state is not state or fault:
                state, why = verdict.state, fault.why if fault else ", ".join(verdict.changes)
                if slept_ns > SUSPENDED_NS:
                    why = f"the computer was suspended for {slept_ns * 1e-9:.1f} s"
        if sent is not None:
            sent = self.last = self._driver.write(sent)
        elif self.state is not State.STOP:
            self._driver.stop()
        if self._lane is not None and state is State.STOP and due.state is not State.STOP:
            self._lane.trip(k, why)
        if state is not self.state:
            self._announce(k, state, "" if state is State.RUN else why)
        self.state = state
        return state, why, sent

    def node_rearms(self, k: int, obs: Observation) -> None:
        """The node lets the robot go on; an operator's stop is the operator's."""
        if self.state is State.STOP and (self._lane is None or self._lane.machine.policy_may_act):
            self._rearm(k, obs)

    def operator_rearms(self, k: int, obs: Observation, order: Order) -> None:
        """The operator may have let it go on, or taken it by hand."""
        if order.rearm or (self.state is State.STOP and order.act in (Act.HOLD, Act.COMMAND)):
            self._rearm(k, obs)

    def _rearm(self, k: int, obs: Observation) -> None:
        if self._executor is not None:
            self._executor.rearm(k)
        self._hold_at(obs)

    def _hold_at(self, obs: Observation) -> None:
        self._envelope.reset(obs.state[: self._dims])
        self.last = obs.state[: self._dims].copy()


class AutomaticRearm:
    """Asks once a second, while the robot is stopped, whether it may go on; the node's part.

    Args:
        may: Whether it may; may ask a person.
        rearm: Lets it go on.
    """

    def __init__(self, may: Callable[[], bool], rearm: Callable[[], None]) -> None:
        self._may, self._rearm = may, rearm
        self._stopped, self._due_s = False, 0.0
        self._called = False  # help was, and the robot holds

    def begin(self) -> None:
        """An episode begins: nothing is stopped."""
        self._stopped = self._called = False

    def note(self, state: str) -> None:
        """The robot's state has changed."""
        self._stopped, self._due_s = state == State.STOP.value, time.monotonic() + REARM_S

    def call(self) -> None:
        """The robot is to hold until it may go on."""
        self._called, self._due_s = True, time.monotonic() + REARM_S

    def ask(self, now_s: float) -> None:
        """Ask if it is time to; ``now_s`` is monotonic."""
        if (self._stopped or self._called) and now_s >= self._due_s:
            self._due_s = now_s + REARM_S
            if self._may():
                self._called = False
                self._rearm()

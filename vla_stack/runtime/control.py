"""The control loop: one tick of sense, plan, act at each absolute deadline t_k = t_0 + k h, in a process of its own.

The process imports neither torch nor zmq and waits for nobody but the clock, its driver and, where the robot would hold
otherwise, half a step for the policy: beside a busy thread of the
same interpreter the same loop would be late by tens of milliseconds. A tick that is late is run late; after a stall of
more than a step the missed ticks are skipped and counted, never run in a burst.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from vla_stack.runtime.clock import BEAT_NS, Clock
from vla_stack.runtime.dispatch import NO_ACTION, Dispatch, Help, Request, State
from vla_stack.runtime.driver import Driver, EpisodicDriver, Guarded, JointDriver
from vla_stack.runtime.episode_log import EpisodeLog, Row
from vla_stack.runtime.executor import Executor
from vla_stack.runtime.link import Message
from vla_stack.runtime.merging import blender
from vla_stack.runtime.operator_lane import Act, OperatorLane, Order
from vla_stack.runtime.safety import SafetyEnvelope
from vla_stack.runtime.stopping import Outlet
from vla_stack.schema import ActionChunk, Observation

PHASE = 0.02  # of a step between a reading's capture and the tick that uses it, for the reading to get here
WAIT = 0.5  # of a step; then there is time enough left to send a command and to read again


class Port(Protocol):
    """The control loop's way out of its process. No method waits unless it is asked to."""

    def offer(self, obs: Observation, request: Request | None) -> None:
        """Pass on an observation; with a request it goes to the policy."""
        ...

    def receive(self, timeout_s: float = 0.0) -> Sequence[ActionChunk | Help | str]:
        """Chunks, calls for help, and the orders ``rearm``, ``renew`` (the server has lost the request), ``abort``.

        Args:
            timeout_s: Longest wait for something to come.
        """
        ...

    def announce(self, k: int, state: State, why: str) -> None:
        """Say that the state changed."""
        ...

    def record(self, row: Row) -> None:
        """Pass on what was sent in answer to the observation offered last."""
        ...


class ControlLoop:
    """Drives one robot, one episode at a time.

    Args:
        driver: Connected.
        executor: Which action of the policy is due; None where there is no policy.
        envelope: Which action is allowed.
        clock: Real, or virtual in tests.
        port: Where requests go and chunks come from.
        lane: The operator's, if there is one; without, the policy acts from the first tick on.
    """

    def __init__(
        self,
        driver: Driver,
        executor: Executor | None,
        envelope: SafetyEnvelope,
        clock: Clock,
        port: Port,
        lane: OperatorLane | None = None,
    ) -> None:
        self._driver, self._executor, self._envelope = driver, executor, envelope
        self._clock, self._port, self._lane = clock, port, lane
        self._outlet = Outlet(driver, executor, envelope, clock, lane, port.announce)
        self._joint_driver = driver if isinstance(driver, JointDriver) else None
        self._beat = driver.beat if isinstance(driver, Guarded) else None
        self._dt_ns = round(1e9 / driver.spec.rate_hz)
        self._dims = len(driver.spec.action)
        self._commands = executor.config.interpolate if executor else 1  # a control step
        self._blend, self._gripper = blender(driver.spec), driver.spec.gripper_mask

    def run(self, seed: int, max_ticks: int | None = None) -> EpisodeLog:
        """One episode, until the driver says that it is done, ``max_ticks`` are over or an ``abort`` arrives."""
        episodic = self._driver if isinstance(self._driver, EpisodicDriver) else None
        task = episodic.reset(seed) if episodic else ""
        if self._executor is not None:
            self._executor.reset(0, seed)
            self._executor.counters.clear()
        self._envelope.counters.clear()
        obs = self._driver.read()
        self._outlet.begin(obs)
        self._row: Row | None = None
        self._flushes = int(self._lane is None)  # with an operator the policy's first start is one of them
        self._help = ""  # why the robot waits for a person, where there is no operator's lane
        log = EpisodeLog(seed, task or obs.task)
        t_0 = obs.t_capture_ns + int(PHASE * self._dt_ns)
        k = 0
        while max_ticks is None or self._lane is not None or k < max_ticks:  # the lane counts from its start
            self._clock.sleep_until_ns(t_0 + k * self._dt_ns, self._beat)
            log.late_ns.append(self._clock.now_ns() - t_0 - k * self._dt_ns)
            if k:
                obs = self._driver.read()
            if episodic:
                log.status = episodic.status()
            self._record(None)
            obs = replace(obs, step=k)
            start_ns = t_0 + k * self._dt_ns
            if (log.status["done"] and self._lane is None) or not self._tick(k, start_ns, obs, log):
                break
            self._between(k, start_ns, obs)
            due = (self._clock.now_ns() - t_0) // self._dt_ns  # the tick in whose time we are
            log.overruns += max(0, due - (k + 1))
            k = max(k + 1, due)
        log.duration_s = (self._clock.now_ns() - t_0) * 1e-9
        if self._row is not None and self._joint_driver is not None:
            self._driver.read()  # says how the last command was realised
        self._record(None)
        log.safety = self._envelope.counters.copy()
        if self._executor is not None:
            log.executor = self._executor.counters.copy()
        if self._lane is not None:
            log.operator = self._lane.summary()
        self._driver.hold()
        return log

    def _tick(self, k: int, start_ns: int, obs: Observation, log: EpisodeLog) -> bool:
        """One control step; False where the episode is to end."""
        if not self._take(self._port.receive(), k, obs, log):
            return False
        order = self._ask_operator(k, obs, log)
        if order.act is Act.END:
            self._publish(k, obs, log, order.why, self._outlet.last)
            return False
        planning = order.act is Act.POLICY and self._executor is not None
        self._port.offer(obs, self._executor.plan(k) if planning and self._executor is not None else None)
        if planning and not self._wait_for_reply(k, start_ns, obs, log):
            return False
        self._act(k, obs, log, order)
        return True

    def _take(self, items: Sequence[ActionChunk | Help | str], k: int, obs: Observation, log: EpisodeLog) -> bool:
        """What has come; False where the episode is to end."""
        for item in items:
            if isinstance(item, ActionChunk):
                self._deliver(item, k, log)
            elif item == "abort":
                return False
            elif item == "renew" and self._executor is not None:
                self._executor.forget_request()
            elif isinstance(item, Help):
                self._call(k, item.why, log)
            elif item == "rearm":
                self._help = ""
                self._outlet.node_rearms(k, obs)
        return True

    def _wait_for_reply(self, k: int, start_ns: int, obs: Observation, log: EpisodeLog) -> bool:
        """Wait within this control step where the robot would hold for a reply; False where the episode is to end.

        A policy that answers within :data:`WAIT` of a step then costs no step at all, as in an evaluation without
        delay: at ten commands a second a wait for whole steps is a fifth of all steps where four are executed.
        """
        assert self._executor is not None
        end_ns = start_ns + round(WAIT * self._dt_ns)
        while self._executor.waits(k) and (left_ns := end_ns - self._clock.now_ns()) > 0:
            if self._beat is not None:
                self._beat()
            if not self._take(self._port.receive(min(left_ns, BEAT_NS) * 1e-9), k, obs, log):
                return False
        return True

    def _call(self, k: int, why: str, log: EpisodeLog) -> None:
        """Hold until a person lets the policy go on; what it has planned is void."""
        if self._lane is not None:
            self._lane.call(why)
        elif not self._help:
            self._help = why
            self._void(k, log)

    def _void(self, k: int, log: EpisodeLog) -> None:
        if self._executor is not None:
            self._executor.reset(k, _flush_seed(log.seed, self._flushes))
            self._flushes += 1

    def _deliver(self, chunk: ActionChunk, k: int, log: EpisodeLog) -> None:
        if self._executor is not None:
            report = self._executor.deliver(chunk, k)
            if report.accepted:
                log.delays.append(report.delay)

    def _ask_operator(self, k: int, obs: Observation, log: EpisodeLog) -> Order:
        """Whose tick this is; where the policy comes or goes, its plan ends and its requests are void."""
        if self._lane is None:
            return Order(Act.HOLD, why=self._help) if self._help else Order(Act.POLICY)
        order = self._lane.step(k, self._clock.now_ns(), obs, log.status, self._outlet.last)
        if order.flush:
            self._void(k, log)
        self._outlet.operator_rearms(k, obs, order)
        return order

    def _act(self, k: int, obs: Observation, log: EpisodeLog, order: Order) -> None:
        due = self._now = self._due(k, order)
        state, why, sent = self._outlet.send(k, due, due.action, obs, order.why or NO_ACTION)
        log.states[state.value] += 1
        log.rids.append(due.chunk_rid if state is State.RUN else -1)
        log.actions.append(obs.state[: self._dims] if sent is None else sent)
        if sent is not None and state is State.RUN:  # what a robot does while it waits, nobody has decided
            self._row_of(k, obs, log, order, sent)
        self._publish(k, obs, log, order.why if state is State.RUN else why, sent)

    def _between(self, k: int, start_ns: int, obs: Observation) -> None:
        """Commands between this control step's and the next one's; one whose time has passed is left out."""
        due = self._now
        for i in range(1, self._commands):
            at_ns = start_ns + i * self._dt_ns // self._commands
            if self._outlet.state is State.STOP or self._clock.now_ns() > at_ns:
                continue
            self._clock.sleep_until_ns(at_ns, self._beat)
            self._outlet.send(k, due, self._on_the_way(due, i / self._commands), obs, NO_ACTION)

    def _on_the_way(self, due: Dispatch, share: float) -> NDArray[np.float32] | None:
        if due.action is None or due.following is None:
            return due.action
        action = self._blend(due.action[None], due.following[None], np.full(1, share, np.float32))[0]
        action[self._gripper] = due.action[self._gripper]  # it closes when it is told to, not before
        return action

    def _due(self, k: int, order: Order) -> Dispatch:
        if order.act is Act.POLICY and self._executor is not None:
            return self._executor.dispatch(k)
        state = {Act.COMMAND: State.RUN, Act.STOP: State.STOP}.get(order.act, State.HOLD)
        return Dispatch(order.action, state)

    # -- recordings and the operator's view ------------------------------------------------------------------------

    def _row_of(self, k: int, obs: Observation, log: EpisodeLog, order: Order, sent: NDArray[np.float32]) -> None:
        """Note the row of this tick if it is one to record. Joint targets are known with the next reading."""
        now_ns = self._clock.now_ns()
        labels: Message = {"subtask_index": log.status.get("stage", 0), "limits": list(self._outlet.limits)}
        taken = (obs.image_t_ns.get(c.name, obs.t_capture_ns) for c in self._driver.spec.cameras)
        labels["cam_age_ms"] = [(now_ns - t_ns) * 1e-6 for t_ns in taken]
        if order.act not in (Act.POLICY, Act.COMMAND):
            return
        if self._lane is not None:
            if not self._lane.machine.recording:
                return
            labels |= self._lane.labels(k)
            labels |= self._lane.measured(now_ns, obs)
        self._record(Row(k, obs.state, sent, labels, now_ns))

    def _record(self, row: Row | None) -> None:
        """Pass the row before on, now that its joint targets are known, and keep this one."""
        if self._row is not None:
            joints = self._joint_driver.joint_command if self._joint_driver else None
            self._port.record(replace(self._row, joint_command=joints))
        self._row = row

    def _publish(self, k: int, obs: Observation, log: EpisodeLog, why: str, sent: NDArray[np.float32] | None) -> None:
        if self._lane is not None:
            self._lane.publish(
                k,
                self._clock.now_ns(),
                obs,
                run=self._outlet.state.value,
                why=why,
                action=None if sent is None else [float(x) for x in sent],
                stage=log.status.get("stage", -1),
                success=bool(log.status.get("is_success", False)),
            )


def _flush_seed(seed: int, flushes: int) -> int:
    """Of the policy's noise from its first tick on, and after each return to it."""
    return seed if flushes == 0 else int(np.random.SeedSequence((seed, flushes)).generate_state(1)[0])

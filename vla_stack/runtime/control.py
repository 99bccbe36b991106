"""The control loop: one tick of sense, plan, act at each absolute deadline t_k = t_0 + k h, in a process of its own.

The process imports neither torch nor zmq and waits for nobody but the clock and its driver: beside a busy thread of the
same interpreter the same loop would be late by tens of milliseconds. A tick that is late is run late; after a stall of
more than a step the missed ticks are skipped and counted, never run in a burst.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from robot_drivers.driver import Driver, EpisodicDriver, SelfChecking, Status
from vla_stack.errors import UserError
from vla_stack.runtime.clock import Clock, RealClock
from vla_stack.runtime.executor import Executor, ExecutorConfig, Request, State
from vla_stack.runtime.limits import make_envelope
from vla_stack.runtime.link import Link, Message, ObservationSlots
from vla_stack.runtime.safety import SafetyConfig, SafetyEnvelope
from vla_stack.schema import ActionChunk, Observation, PolicySpec

PHASE = 0.02  # of a step between a reading's capture and the tick that uses it, for the reading to get here
LATENESS_BINS_MS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class Port(Protocol):
    """The control loop's way out of its process. No method waits."""

    def offer(self, obs: Observation, request: Request | None) -> None:
        """Pass on an observation; with a request it goes to the policy."""
        ...

    def receive(self) -> list[ActionChunk | str]:
        """Chunks and the orders ``rearm``, ``renew`` (the server has lost the request) and ``abort``."""
        ...

    def announce(self, k: int, state: State, why: str) -> None:
        """Say that the state changed."""
        ...


@dataclass
class EpisodeLog:
    """What an episode was like; one row a tick that was run: ``actions`` as sent, ``rids`` of chunks (-1: holding)."""

    seed: int
    task: str
    actions: list[NDArray[np.float32]] = field(default_factory=list)
    rids: list[int] = field(default_factory=list)
    states: Counter[str] = field(default_factory=Counter)
    delays: list[int] = field(default_factory=list)
    late_ns: list[int] = field(default_factory=list)
    overruns: int = 0
    executor: Counter[str] = field(default_factory=Counter)
    safety: Counter[str] = field(default_factory=Counter)
    status: Status = field(default_factory=lambda: Status(is_success=False, done=False))
    duration_s: float = 0.0

    def to_message(self) -> Message:
        """Everything as plain values; ``steps`` counts all control ticks, skipped and idle ones included."""
        late_ms = np.array(self.late_ns or [0]) * 1e-6
        actions = np.array(self.actions, np.float32)
        ran = len(self.rids)
        return {
            "seed": self.seed,
            "instruction": self.task,
            "success": bool(self.status.get("is_success", False)),
            "stage": int(self.status.get("stage", -1)),
            "steps": ran + self.overruns,
            "idle_ticks": ran - self.states["run"] + self.overruns,
            "duration_s": self.duration_s,
            "real_time_factor": float(self.status.get("real_time_factor", 1.0)),
            "ticks": {**self.states, "overrun": self.overruns},
            "delay_ticks": {
                "mean": float(np.mean(self.delays)) if self.delays else 0.0,
                "max": max(self.delays, default=0),
                "counts": {str(d): n for d, n in sorted(Counter(self.delays).items())},
            },
            "lateness_ms": {
                "p50": float(np.median(late_ms)),
                "p99": float(np.quantile(late_ms, 0.99)),
                "max": float(late_ms.max()),
                "bins": list(LATENESS_BINS_MS),
                "counts": np.bincount(np.digitize(late_ms, LATENESS_BINS_MS), minlength=8).tolist(),
            },
            "executor": dict(self.executor),
            "safety": dict(self.safety),
            "actions": actions.tobytes(),
            "shape": list(actions.shape),
            "rids": np.array(self.rids, np.int32).tobytes(),
        }


class ControlLoop:
    """Drives one robot, one episode at a time.

    Args:
        driver: Connected.
        executor: Which action is due.
        envelope: Which action is allowed.
        clock: Real, or virtual in tests.
        port: Where requests go and chunks come from.
    """

    def __init__(self, driver: Driver, executor: Executor, envelope: SafetyEnvelope, clock: Clock, port: Port) -> None:
        self._driver, self._executor, self._envelope = driver, executor, envelope
        self._clock, self._port = clock, port
        self._self_checking = driver if isinstance(driver, SelfChecking) else None
        self._dt_ns = round(1e9 / driver.spec.rate_hz)
        self._dims = len(driver.spec.action)
        self._state = State.HOLD

    def run(self, seed: int, max_ticks: int | None = None) -> EpisodeLog:
        """One episode, until the driver says that it is done, ``max_ticks`` are over or an ``abort`` arrives."""
        episodic = self._driver if isinstance(self._driver, EpisodicDriver) else None
        task = episodic.reset(seed) if episodic else ""
        self._executor.reset(0, seed)
        self._executor.counters.clear()
        self._envelope.counters.clear()
        obs = self._driver.read()
        self._envelope.reset(obs.state[: self._dims])
        self._state = State.HOLD
        log = EpisodeLog(seed, task or obs.task)
        t_0 = obs.t_capture_ns + int(PHASE * self._dt_ns)
        k = 0
        while max_ticks is None or k < max_ticks:
            self._clock.sleep_until_ns(t_0 + k * self._dt_ns)
            log.late_ns.append(self._clock.now_ns() - t_0 - k * self._dt_ns)
            if k:
                obs = self._driver.read()
            if episodic:
                log.status = episodic.status()
            if log.status["done"] or not self._tick(k, replace(obs, step=k), log):
                break
            due = (self._clock.now_ns() - t_0) // self._dt_ns  # the tick in whose time we are
            log.overruns += max(0, due - (k + 1))
            k = max(k + 1, due)
        log.duration_s = (self._clock.now_ns() - t_0) * 1e-9
        log.executor, log.safety = self._executor.counters.copy(), self._envelope.counters.copy()
        self._driver.hold()
        return log

    def _tick(self, k: int, obs: Observation, log: EpisodeLog) -> bool:
        """One control step; False where the episode is to end."""
        for item in self._port.receive():
            if isinstance(item, ActionChunk):
                report = self._executor.deliver(item, k)
                if report.accepted:
                    log.delays.append(report.delay)
            elif item == "abort":
                return False
            elif item == "renew":
                self._executor.forget_request()
            elif self._state is State.STOP:
                self._executor.rearm(k)
                self._envelope.reset(obs.state[: self._dims])
        self._port.offer(obs, self._executor.plan(k))
        self._act(k, obs, log)
        return True

    def _act(self, k: int, obs: Observation, log: EpisodeLog) -> None:
        due = self._executor.dispatch(k)
        state, why, sent = due.state, "no action is due", None
        if state is not State.STOP:
            age_s = (self._clock.now_ns() - obs.t_capture_ns) * 1e-9
            fault = self._self_checking.fault if self._self_checking else None
            if fault and fault.stop:
                self._envelope.stop(fault.kind)
            action = due.action if state is State.RUN else None
            verdict = self._envelope.filter(action, age_s, fault.kind if fault else "")
            sent = verdict.command
            if verdict.state is not state or fault:
                state, why = verdict.state, fault.why if fault else ", ".join(verdict.changes)
        if sent is not None:
            sent = self._driver.write(sent)
        elif self._state is not State.STOP:
            self._driver.stop()
        if state is not self._state:
            self._port.announce(k, state, "" if state is State.RUN else why)
        self._state = state
        log.states[state.value] += 1
        log.rids.append(due.chunk_rid if state is State.RUN else -1)
        log.actions.append(obs.state[: self._dims] if sent is None else sent)


class LinkPort:
    """A :class:`Port` over a :class:`~vla_stack.runtime.link.Link` to the node.

    Args:
        link: To the node.
        slots: The node's, for observations.
    """

    def __init__(self, link: Link, slots: ObservationSlots) -> None:
        self._link, self._slots = link, slots
        self.film = False  # whether observations without a request are passed on too

    def offer(self, obs: Observation, request: Request | None) -> None:
        if request is None and not (self.film and self._slots.spare > 1):  # the last slot is for requests
            return
        plan = request.continuation if request else None
        obs = obs.expecting(request.state) if request else obs
        if (note := self._slots.put(obs, plan.actions if plan else None)) is None:
            return  # the node is busy; an executor asks again
        if not self._link.post("observation", **note, request=request and request_fields(request)):
            self._slots.free(note["slot"])

    def receive(self) -> list[ActionChunk | str]:
        items: list[ActionChunk | str] = []
        for message in self._link.receive():
            if message["kind"] == "free":
                self._slots.free(message["slot"])
            else:
                items.append(read_chunk(message) if message["kind"] == "chunk" else message["kind"])
        return items

    def announce(self, k: int, state: State, why: str) -> None:
        self._link.post("state", tick=k, state=state.value, why=why)


def request_fields(request: Request) -> Message:
    """A request as a message; its plan and its state travel with the observation."""
    fields = {name: getattr(request, name) for name in ("rid", "epoch", "origin", "seed")}
    fields["patience"] = request.deadline - request.k_obs
    if (c := request.continuation) is None:
        return {**fields, "continuation": None}
    return {
        **fields,
        "continuation": {"mode": c.mode, "length": len(c.actions), "delay": c.delay, "execute": c.execute},
    }


def chunk_fields(chunk: ActionChunk) -> Message:
    """A chunk as a message's fields."""
    names = ("origin", "k_obs", "rid", "epoch", "d_cond", "model_version", "execute")
    fields = {name: getattr(chunk, name) for name in names}
    return {**fields, "actions": chunk.actions.tobytes(), "shape": list(chunk.actions.shape)}


def read_chunk(message: Message) -> ActionChunk:
    """Inverse of :func:`chunk_fields`."""
    fields = {k: v for k, v in message.items() if k not in ("kind", "shape")}
    actions = np.frombuffer(fields.pop("actions"), np.float32).reshape(message["shape"])
    return ActionChunk(actions, **fields)


def control_process(connection: Connection, make: Callable[[], Driver]) -> None:
    """Main function of the control process: connect the driver, run the episodes that the node asks for.

    Ends, after holding the robot, when the node closes its end of the pipe or dies.
    """
    link = Link(connection)
    driver: Driver | None = None
    try:
        driver = make()
        driver.connect()
        stages = driver.stages if isinstance(driver, EpisodicDriver) else ()
        link.send("ready", spec=driver.spec.to_json(), stages=list(stages))
        _serve(link, driver)
    except EOFError:
        pass
    except UserError as e:
        _report(link, str(e))
    except Exception as e:
        _report(link, f"{type(e).__name__}: {e}")
        raise
    finally:
        if driver is not None:
            driver.disconnect()


def _serve(link: Link, driver: Driver) -> None:
    setup = _next(link, "setup")
    executor = Executor(driver.spec, PolicySpec.from_json(setup["policy"]), ExecutorConfig(**setup["executor"]))
    envelope = make_envelope(driver.spec, SafetyConfig(**setup["safety"]))
    slots = ObservationSlots(driver.spec, setup["slots"], executor.policy.horizon)
    port = LinkPort(link, slots)
    loop = ControlLoop(driver, executor, envelope, RealClock(), port)
    gc.freeze()  # what start-up left behind need not be walked at every collection
    try:
        link.send("armed")
        while True:
            order = _next(link, "episode", slots)
            port.film = order["film"]
            log = loop.run(order["seed"], order["max_ticks"])
            link.send("finished", **log.to_message())
    finally:
        slots.close()


def _next(link: Link, kind: str, slots: ObservationSlots | None = None) -> Message:
    """Wait for a message of one kind; others are of an episode that is over."""
    while True:
        found: Message | None = None
        for message in link.receive(timeout_s=3600.0):
            if message["kind"] == "free" and slots is not None:
                slots.free(message["slot"])
            elif message["kind"] == kind:
                found = message
        if found is not None:
            return found


def _report(link: Link, text: str) -> None:
    try:
        link.send("failed", error=text)
    except EOFError:
        pass

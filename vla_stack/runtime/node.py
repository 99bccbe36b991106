"""The robot node: between the policy server, which may vanish, and the control process, which must not notice.

The node owns the connection to the server, all shared memory and the control process. It carries observations one way
and chunks the other; it decides nothing about motion. Without a server the control process holds and then stops the
robot; when the server is back (or another one at its address with the same policy) the session is renewed, the lost
request is asked again, and, where re-arming is automatic, the robot goes on without a restart of anything here.
"""

from __future__ import annotations

import multiprocessing as mp
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robot_drivers.driver import Driver
from vla_stack.errors import UserError
from vla_stack.runtime.control import chunk_fields, control_process
from vla_stack.runtime.executor import ExecutorConfig
from vla_stack.runtime.link import Link, Message, ObservationSlots, ignored_interrupts
from vla_stack.runtime.safety import SafetyConfig
from vla_stack.schema import ActionChunk, Continuation, Observation, PolicySpec, RobotSpec
from vla_stack.serving.client import PolicyClient

PING_S = 0.5
REARM_S = 1.0  # between a STOP and re-arming
BUSY_WAIT_S, IDLE_WAIT_S = 0.002, 0.02  # longest wait for the control process while a chunk may arrive, and otherwise
CONNECT_TIMEOUT_S = 90.0


@dataclass(frozen=True)
class Episode:
    """An episode as it was driven.

    Attributes:
        summary: Plain values, see :meth:`vla_stack.runtime.control.EpisodeLog.to_message`.
        actions: float32 [T, A], commands as sent.
        rids: int32 [T], request id of the chunk behind each command, -1 while holding.
    """

    summary: dict[str, Any]
    actions: NDArray[np.float32]
    rids: NDArray[np.int32]


class RobotNode:
    """One robot on one policy server; a context manager.

    Args:
        server: Endpoint of the policy server.
        make_driver: Builds the driver, in the control process; must be picklable.
        executor: How chunks become motion.
        safety: Limits beyond the robot's own.
        rearm: Asked about once a second while the robot is stopped: may it go on? By default it may not, until
            :meth:`rearm` or the next episode.
        on_state: Called with (tick, state, why) when the robot's state changes.
        hello_timeout_s: How long to wait for the server at the start.

    Attributes:
        robot: What is driven.
        stages: Names of the task's stages, empty where the robot knows of none.
        policy: What the server serves.
        counters: Events since the start, by name.
    """

    def __init__(
        self,
        server: str,
        make_driver: Callable[[], Driver],
        executor: ExecutorConfig | None = None,
        safety: SafetyConfig | None = None,
        rearm: Callable[[], bool] = lambda: False,
        on_state: Callable[[int, str, str], None] | None = None,
        hello_timeout_s: float = 30.0,
    ) -> None:
        self._server, self._make_driver = server, make_driver
        self._executor, self._safety = executor or ExecutorConfig(), safety or SafetyConfig()
        self._may_rearm, self._on_state, self._hello_timeout_s = rearm, on_state, hello_timeout_s
        self.counters: Counter[str] = Counter()
        self._process: mp.process.BaseProcess | None = None
        self._client: PolicyClient | None = None
        self._slots: ObservationSlots | None = None
        self._epoch, self._awaited = 0, False
        self._next_ping = self._rearm_at = 0.0
        self._stopped = False

    def __enter__(self) -> RobotNode:
        """Start the control process, connect the robot, open a session with the server.

        Raises:
            UserError: The robot or the server cannot be reached, or they do not fit.
        """
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        context = mp.get_context("spawn")
        ours, theirs = context.Pipe()
        self._link = Link(ours)
        self._process = context.Process(target=control_process, args=(theirs, self._make_driver), name="control")
        with ignored_interrupts():
            self._process.start()
        theirs.close()
        ready = self._wait("ready")
        self.robot, self.stages = RobotSpec.from_json(ready["spec"]), tuple(ready["stages"])
        self._client = PolicyClient(self._server)
        self.policy: PolicySpec = self._client.hello(self.robot, self._hello_timeout_s)
        self._slots = ObservationSlots(self.robot, horizon=self.policy.horizon)
        self._link.send(
            "setup",
            policy=self.policy.to_json(),
            executor=asdict(self._executor),
            safety=asdict(self._safety),
            slots=self._slots.name,
        )
        self._wait("armed")

    def run_episode(
        self, seed: int, max_ticks: int | None = None, on_observation: Callable[[Observation], None] | None = None
    ) -> Episode:
        """Drive one episode in real time.

        Args:
            seed: Of the robot's start (where it has one) and of the policy's noise.
            max_ticks: Control steps after which it ends in any case.
            on_observation: Called in this process with what the robot saw, for a film. A slow function loses
                observations; it never slows the robot.

        Raises:
            UserError: The control process ended, or the server came back with another policy.
        """
        self._stopped = False
        self._link.send("episode", seed=seed, max_ticks=max_ticks, film=on_observation is not None)
        while True:
            for message in self._receive(BUSY_WAIT_S if self._awaited else IDLE_WAIT_S):
                if message["kind"] == "finished":
                    return _episode(message)
                self._handle(message, on_observation)
            self._serve()

    def rearm(self) -> None:
        """Let a stopped robot go on."""
        self.counters["rearmed"] += 1
        self._link.send("rearm")

    def abort(self) -> None:
        """End the running episode at its next step; for a callback of :meth:`run_episode`."""
        self._link.send("abort")

    def close(self) -> None:
        """Hold the robot, end the control process, free everything; may be called twice."""
        if self._process is not None:
            self._link.close()  # the control process reads the end of the pipe, holds the robot and ends
            self._process.join(10.0)
            if self._process.is_alive():
                self._process.kill()
                self._process.join()
        if self._slots is not None:
            self._slots.close()
        if self._client is not None:
            self._client.close()
        self._process = self._slots = self._client = None

    # -- from the control process ---------------------------------------------------------------------------------

    def _handle(self, message: Message, on_observation: Callable[[Observation], None] | None) -> None:
        if message["kind"] == "observation":
            assert self._slots is not None
            obs, request = self._slots.get(message), message["request"]
            plan = request["continuation"] if request else None
            continuation = None
            if plan:
                continuation = Continuation(actions=self._slots.get_plan(message, plan.pop("length")), **plan)
            self._link.send("free", slot=message["slot"])
            if request:
                self._ask(obs, request, continuation)
            if on_observation is not None:
                on_observation(obs)
        elif message["kind"] == "state":
            self._stopped = message["state"] == "stop"
            self._rearm_at = time.monotonic() + REARM_S
            self.counters[f"to {message['state']}"] += 1
            if self._on_state is not None:
                self._on_state(message["tick"], message["state"], message["why"])

    def _ask(self, obs: Observation, request: Message, plan: Continuation | None) -> None:
        assert self._client is not None
        if request["epoch"] != self._epoch:
            self._epoch = request["epoch"]
            self._client.reset(self._epoch)
        names = ("rid", "epoch", "origin", "seed")
        slack_ms = round(request["patience"] * self.robot.dt * 1000)
        sent = self._client.request(
            obs, **{name: request[name] for name in names}, continuation=plan, slack_ms=slack_ms
        )
        self.counters["requests" if sent else "requests unsent"] += 1
        self._awaited = True

    # -- from the server ------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Carry chunks to the control process, keep the session alive."""
        assert self._client is not None
        for item in self._client.poll():
            if isinstance(item, ActionChunk):
                self._link.send("chunk", **chunk_fields(item))
                self.counters["chunks"] += 1
                self._awaited = False
            elif item.code == "POLICY_CHANGED":
                raise UserError(item.text, "start `vla run` again")
            else:
                self.counters[f"server error {item.code}"] += 1
        now = time.monotonic()
        if now >= self._next_ping:
            self._next_ping = now + PING_S
            self._client.ping()
        policy = self._client.policy or self.policy
        if policy.model_version != self.policy.model_version:  # between two episodes
            self.policy = policy
            self.counters["policies swapped"] += 1
        elif policy is not self.policy:  # every session brings its own description of the same policy
            self.policy = policy
            self.counters["sessions renewed"] += 1
            self._link.send("renew")
        if self._stopped and now >= self._rearm_at:
            self._rearm_at = now + REARM_S
            if self._may_rearm():
                self.rearm()

    # -- the control process --------------------------------------------------------------------------------------

    def _wait(self, kind: str) -> Message:
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        while (left := deadline - time.monotonic()) > 0:
            for message in self._receive(left):
                if message["kind"] == kind:
                    return message
        raise UserError(f"the control process did not say '{kind}' within {CONNECT_TIMEOUT_S:g} s")

    def _receive(self, timeout_s: float) -> list[Message]:
        try:
            messages = self._link.receive(timeout_s)
        except EOFError:
            if self._process is not None:
                self._process.join(1.0)
            code = self._process.exitcode if self._process else None
            raise UserError(f"the control process ended (exit code {code})") from None
        for message in messages:
            if message["kind"] == "failed":
                raise UserError(message["error"])
        return messages


def _episode(message: Message) -> Episode:
    summary = {k: v for k, v in message.items() if k not in ("kind", "actions", "shape", "rids")}
    actions = np.frombuffer(message["actions"], np.float32).reshape(message["shape"])
    return Episode(summary, actions, np.frombuffer(message["rids"], np.int32))

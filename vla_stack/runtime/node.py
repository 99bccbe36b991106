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
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import Any

import numpy as np

from vla_stack.errors import UserError
from vla_stack.intervention import MODES, Control, Mode
from vla_stack.runtime.control_process import control_process
from vla_stack.runtime.driver import Driver, Guard
from vla_stack.runtime.episode_log import Episode
from vla_stack.runtime.executor import ExecutorConfig
from vla_stack.runtime.familiar import Familiar
from vla_stack.runtime.frames import Frame, FrameQueue, version_number
from vla_stack.runtime.link import SLOTS, Link, Message, ObservationSlots, ignored_interrupts
from vla_stack.runtime.link_port import chunk_fields
from vla_stack.runtime.operator_messages import ENDPOINT
from vla_stack.runtime.operator_port import OperatorPort
from vla_stack.runtime.safety import SafetyConfig
from vla_stack.runtime.stopping import AutomaticRearm
from vla_stack.schema import ActionChunk, Continuation, Observation, PolicySpec, RobotSpec
from vla_stack.serving.clients import Client, open_client
from vla_stack.serving.endpoint import OpenpiAddress
from vla_stack.serving.keys import KeyFolder
from vla_stack.serving.pictures import Pictures

PING_S = 0.5
BUSY_WAIT_S, IDLE_WAIT_S = 0.002, 0.02  # longest wait for the control process while a chunk may arrive, and otherwise
CONNECT_TIMEOUT_S = 90.0
RECORDING_SLOTS, RECORDING_BYTES = 16, 64 << 20  # observations that may wait for the node, as long as memory suffices


@dataclass(frozen=True)
class Operator:
    """That a person supervises or drives this robot.

    Attributes:
        endpoint: Where, see :func:`~vla_stack.runtime.operator_messages.channel`.
        keys: This computer's keys; needed where the endpoint can be reached from outside.
        on_event: Called with (name, args) of ``keep``, ``undo`` and ``reset``, and of ``discard`` where no episode is
            running; returns why it refuses, or None. On a thread of the node's; it must not wait. A ``reset`` has then
            ended the running episode.
        familiar: Where demonstrations were, for auto-rewind and the likeness that is shown.
    """

    endpoint: str = ENDPOINT
    keys: KeyFolder | None = None
    on_event: Callable[[str, dict[str, Any]], str | None] | None = None
    familiar: Familiar | None = None


class RobotNode:
    """One robot on one policy server; a context manager.

    Args:
        server: Endpoint of `vla serve`, or the address of a server that speaks openpi's protocol; None where nobody but
            an operator drives.
        make_driver: Builds the driver, in the control process; must be picklable.
        executor: How chunks become motion.
        safety: Limits beyond the robot's own.
        rearm: Asked about once a second while the robot is stopped: may it go on? By default it may not, until
            :meth:`rearm` or the next episode.
        on_state: Called with (tick, state, why) when the robot's state changes.
        on_beat: Called with the counters, twice a second while a policy drives.
        hello_timeout_s: How long to wait for the server at the start.
        operator: Opens the operator channels; episodes then wait for ``start`` and end as the operator says.
        pictures: In what form they are sent to the server.

    Attributes:
        robot: What is driven.
        stages: Names of the task's stages, empty where the robot knows of none.
        joints: Names of the joints of frames' ``joint_command``, empty where the driver does not say.
        guard: Who brings the robot to rest where the control process cannot.
        policy: What the server serves; None without one.
        counters: Events since the start, by name.
    """

    def __init__(
        self,
        server: str | OpenpiAddress | None,
        make_driver: Callable[[], Driver],
        executor: ExecutorConfig | None = None,
        safety: SafetyConfig | None = None,
        rearm: Callable[[], bool] = lambda: False,
        on_state: Callable[[int, str, str], None] | None = None,
        on_beat: Callable[[Counter[str]], None] = lambda _: None,
        hello_timeout_s: float = 30.0,
        operator: Operator | None = None,
        pictures: Pictures = Pictures(),
    ) -> None:
        if server is None and operator is None:
            raise UserError("neither a policy nor an operator would drive the robot", "name a server or an operator")
        self._server, self._make_driver, self._pictures = server, make_driver, pictures
        self._executor, self._safety = executor or ExecutorConfig(), safety or SafetyConfig()
        self._rearming = AutomaticRearm(rearm, self.rearm)
        self._on_state, self._on_beat, self._hello_timeout_s = on_state, on_beat, hello_timeout_s
        self.counters: Counter[str] = Counter()
        self._process: mp.process.BaseProcess | None = None
        self._client: Client | None = None
        self._slots: ObservationSlots | None = None
        self._operator = operator
        self._port: OperatorPort | None = None
        self._recording: FrameQueue | None = None
        self._seen: Observation | None = None  # the newest, for the row that follows it
        self.guard = Guard.NONE
        self._told: str | None = None  # instruction, to the operators
        self._instruction, self._aborting = "", False
        self.policy: PolicySpec | None = None
        self._epoch, self._awaited, self._next_ping = 0, False, 0.0

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
        ours, theirs = zip(*(context.Pipe() for _ in range(3 if self._operator else 1)), strict=True)
        self._link = Link(ours[0])
        arguments = (theirs[0], self._make_driver, theirs[1:] or None)
        self._process = context.Process(target=control_process, args=arguments, name="control")
        with ignored_interrupts():
            self._process.start()
        for connection in theirs:
            connection.close()
        ready = self._wait("ready")
        self.robot, self.stages = RobotSpec.from_json(ready["spec"]), tuple(ready["stages"])
        self.joints, self.guard = tuple(ready["joints"]), Guard[ready["guard"]]
        if self._server is not None:
            self._client = open_client(self._server, self._pictures)
            self.policy = self._client.hello(self.robot, self._hello_timeout_s)
        size = sum(c.height * c.width * 3 for c in self.robot.cameras) + 4096
        count = max(SLOTS, min(RECORDING_SLOTS, RECORDING_BYTES // size))
        self._slots = ObservationSlots(self.robot, None, self.policy.horizon if self.policy else 0, count)
        familiar = self._operator.familiar if self._operator else None
        self._link.send(
            "setup",
            policy=self.policy and self.policy.to_json(),
            executor=asdict(self._executor),
            safety=asdict(self._safety),
            slots=self._slots.name,
            slot_count=count,
            familiar=familiar and familiar.to_message(),
        )
        self._wait("armed")
        if self._operator is not None:
            o = self._operator
            self._port = OperatorPort(
                *(ours[1], ours[2], self.robot, o.endpoint, o.keys, self._on_event), {"stages": list(self.stages)}
            )

    def run_episode(
        self,
        seed: int,
        max_ticks: int | None = None,
        on_observation: Callable[[Observation], None] | None = None,
        on_frame: Callable[[Frame], None] | None = None,
        mode: Mode | None = None,
        on_chunk: Callable[[ActionChunk], None] | None = None,
    ) -> Episode:
        """Drive one episode in real time.

        Args:
            seed: Of the robot's start (where it has one) and of the policy's noise.
            max_ticks: Control steps after which it ends in any case; with an operator they count from ``start``, and
                an intervention goes on to its own end.
            on_observation: Called in this process with what the robot saw, for a film. A slow function loses
                observations; it never slows the robot.
            on_frame: Called with every control step in which the policy or a human acted, in order, on a thread of its
                own; all calls are over when this returns. Frames wait for a slow function, up to 256 MB of them.
            mode: With an operator: ``teleop``, ``rac`` or ``hg_dagger``; by default ``rac``, without a server
                ``teleop``.
            on_chunk: Called in this process with each chunk, once it is on its way to the control process.

        Raises:
            UserError: The control process ended, or the server came back with another policy.
        """
        mode = mode or ("teleop" if self._server is None else "rac")
        if mode not in MODES or (self._server is None and mode != "teleop"):
            raise UserError(f"mode '{mode}' needs a policy server, or is none of {', '.join(MODES)}")
        self._aborting, self._on_chunk, self._instruction, self._seen = False, on_chunk, "", None
        self._rearming.begin()
        self._recording = FrameQueue(on_frame) if on_frame is not None else None
        film = on_observation is not None or on_frame is not None or self._operator is not None
        self._link.send("episode", seed=seed, max_ticks=max_ticks, film=film, record=on_frame is not None, mode=mode)
        try:
            message = self._until_finished(on_observation)
        finally:
            if self._recording is not None:
                self._recording.close()
        return Episode.of(message)

    def _until_finished(self, on_observation: Callable[[Observation], None] | None) -> Message:
        aborted = False
        while True:
            for message in self._receive(BUSY_WAIT_S if self._awaited else IDLE_WAIT_S):
                if message["kind"] == "finished":
                    if self._client is not None:
                        self._client.reset(self._epoch)  # a server may come back with other weights now
                    return message
                self._handle(message, on_observation)
            if self._client is not None:
                self._serve(self._client)
            if self._recording is not None and self._recording.error is not None:
                self._aborting = True
            if self._aborting and not aborted:
                aborted = True
                self._link.send("abort")

    @property
    def model_version(self) -> str:
        """Of the policy that is served now; empty without one."""
        return self.policy.model_version if self.policy else ""

    def rearm(self) -> None:
        """Let a stopped robot go on."""
        self.counters["rearmed"] += 1
        self._link.send("rearm")

    def call_for_help(self, why: str) -> None:
        """Have the robot hold until a person has looked: the operator, or who is asked for re-arming where none is."""
        self.counters["calls for help"] += 1
        if self._operator is None:
            self._rearming.call()
        self._link.send("help", why=why)

    def abort(self) -> None:
        """End the running episode at its next step. From a callback of :meth:`run_episode`, or another thread."""
        self._aborting = True

    def tell(self, **facts: Any) -> None:
        """Let operators know, with every state that is published from now on. Any thread."""
        if self._port is not None:
            self._port.tell(**facts)

    def close(self) -> None:
        """Hold the robot, end the control process, free everything; may be called twice."""
        if self._process is not None:
            self._link.close()  # the control process reads the end of the pipe, holds the robot and ends
            self._process.join(10.0)
            if self._process.is_alive():
                self._process.kill()
                self._process.join()
        for part in (self._port, self._slots, self._client):
            if part is not None:
                part.close()
        self._process = self._port = self._slots = self._client = None

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
            if self._instruction:
                obs = replace(obs, task=self._instruction)
            if request:
                self._ask(obs, request, continuation)
            self._seen = obs
            if self._port is not None:
                self._port.show(obs)
                if obs.task != self._told:
                    self._told = obs.task
                    self._port.tell(instruction=obs.task)
            if on_observation is not None:
                on_observation(obs)
        elif message["kind"] == "frame":
            self._record(message)
        elif message["kind"] == "state":
            self._rearming.note(message["state"])
            self.counters[f"to {message['state']}"] += 1
            if self._on_state is not None:
                self._on_state(message["tick"], message["state"], message["why"])

    def _record(self, message: Message) -> None:
        assert self._recording is not None
        if self._seen is None or self._seen.step != message["step"]:
            raise RuntimeError(f"a row of step {message['step']} without its observation")
        state, action = (np.frombuffer(message[name], np.float32) for name in ("state", "action"))
        joints = message["joint_command"] and np.frombuffer(message["joint_command"], np.float32)
        obs = replace(self._seen, state=state)  # what was measured, where the policy is shown something else
        labels = message["labels"]
        if labels.get("control_source", Control.POLICY) == Control.POLICY:  # without an operator nobody else acts
            labels["policy_version"] = version_number(self.model_version)
        self._recording.put(Frame(obs, action, joints, labels, message["t_ns"] * 1e-9))
        if self._port is not None:
            self._port.tell(drops=self._recording.lost)

    def _on_event(self, name: str, args: dict[str, Any]) -> str | None:
        """On the port's thread."""
        if name == "instruct":
            text = args.get("text")
            if not isinstance(text, str) or not text:
                return "an instruction is a text"
            self._instruction = text
            return None
        self._aborting |= name == "reset"
        assert self._operator is not None
        return self._operator.on_event(name, args) if self._operator.on_event else None

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

    def _serve(self, client: Client) -> None:
        """Carry chunks to the control process, keep the session alive."""
        for item in client.poll():
            if isinstance(item, ActionChunk):
                self._link.send("chunk", **chunk_fields(item))
                self.counters["chunks"] += 1
                self._awaited = False
                if self._on_chunk is not None:
                    self._on_chunk(item)
            elif item.code == "POLICY_CHANGED":
                raise UserError(item.text, "start `vla run` again")
            else:
                self.counters[f"server error {item.code}"] += 1
        now = time.monotonic()
        if now >= self._next_ping:
            self._next_ping = now + PING_S
            client.ping()
            self._on_beat(self.counters)
        policy = client.policy or self.policy
        assert policy is not None and self.policy is not None  # there was a HELLO before the first episode
        if policy.model_version != self.policy.model_version:  # between two episodes
            self.policy = policy
            self.counters["policies swapped"] += 1
        elif policy is not self.policy:  # every session brings its own description of the same policy
            self.policy = policy
            self.counters["sessions renewed"] += 1
            self._link.send("renew")
        self._rearming.ask(now)

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
            remedy = "its guardian has brought the robot to rest" if self.guard is Guard.GUARDIAN else ""
            raise UserError(f"the control process ended (exit code {code})", remedy) from None
        for message in messages:
            if message["kind"] == "failed":
                raise UserError(message["error"])
        return messages

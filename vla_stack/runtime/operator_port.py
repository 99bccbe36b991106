"""The node's end of the operator channels: sockets, the lease, acknowledgements. It decides nothing about motion.

Two threads of the node: one for teleop, events and state, one for the e-stop alone. Each has a pipe of its own to the
control process, so that neither a busy node nor a flood of messages delays the other. A third encodes pictures.

What goes wrong with one message is no reason to hear no other, so it is logged and the message refused. Where the first
thread ends all the same the control process hears that the operator is lost; an e-stop that is out of order stops the
robot.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import msgpack

from vla_stack.errors import UserError
from vla_stack.intervention import EVENTS
from vla_stack.runtime.lease import Lease, holder_name
from vla_stack.runtime.link import Link, Message
from vla_stack.runtime.operator_messages import (
    ENDPOINT,
    LEASE_EVENTS,
    MAX_BYTES,
    OWNER_EVENTS,
    PRESENT,
    Event,
    Reply,
    channel,
    read_event,
    read_teleop,
)
from vla_stack.runtime.video_port import VideoPort
from vla_stack.schema import Observation, RobotSpec, SchemaError
from vla_stack.serving.admission import Admission
from vla_stack.serving.endpoint import is_local
from vla_stack.serving.keys import KeyFolder, Role
from vla_stack.serving.listener import Listener, Mail, PeerGone

log = logging.getLogger(__name__)
REPLIES_KEPT = 512
MAX_SKEW_NS = 3600 * 10**9  # a hand message that says it was sent longer ago, or later, is none
MAY_NOT_DRIVE = "this key may not drive: vla keys allow --role operator"
REPEAT_NS = 200_000_000  # the last state is published again after this long without a new one
TURN_MS = 50
DRIVER_HZ = 500.0  # messages of who drives, by one channel


class OperatorPort:
    """Binds the channels; a context manager whose threads run until :meth:`close`.

    Args:
        control: Pipe to the control process for teleop and events; states and answers come back.
        estop: Pipe to the control process for the e-stop.
        robot: What is driven.
        endpoint: Of the first channel, see :func:`~vla_stack.runtime.operator_messages.channel`.
        keys: This computer's keys; needed where the endpoint can be reached from outside.
        on_event: Called, on the port's thread, with (name, args) of the events that are about recordings and scenes;
            returns why it refuses, or None. It must not wait.
        facts: Published with every state, e.g. the names of the task's stages.

    Raises:
        UserError: An endpoint is in use, or can be reached from outside and there are no keys.
    """

    def __init__(
        self,
        control: Connection,
        estop: Connection,
        robot: RobotSpec,
        endpoint: str = ENDPOINT,
        keys: KeyFolder | None = None,
        on_event: Callable[[str, dict[str, Any]], str | None] | None = None,
        facts: Message | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.facts: Message = dict(facts or {})  # replaced as a whole, never changed
        self._telling = threading.Lock()
        self.counters: Counter[str] = Counter()
        self._robot, self._on_event = robot, on_event
        self._control, self._estop = Link(control), Link(estop)
        self._lease = Lease()
        self._replies: OrderedDict[str, Reply | None] = OrderedDict()  # None: the control process has not answered yet
        self._unsent: deque[Event] = deque()  # for the control process, which may be busy starting an episode
        self._asked: dict[str, bytes] = {}  # event id -> routing id of who waits for its answer
        self._state: Message = {"phase": "reset", "tick": -1, "run": "hold", "why": "no episode is running"}
        self._published_ns = 0
        self._closing = threading.Event()
        self._admission: Admission | None = None
        if keys is not None or not is_local(channel(endpoint, "event")):
            self._admission = Admission(keys or KeyFolder())
        self._bound: list[Listener] = []
        try:
            self._teleop, self._events, self._states = (self._bind(name) for name in ("teleop", "event", "state"))
            self._stops = self._bind("estop")
            self._video = VideoPort(self._bind("video"))
        except BaseException:
            self._end()
            raise
        self._threads = [
            threading.Thread(target=self._serve, name="operator", daemon=True),
            threading.Thread(target=self._watch, name="estop", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def tell(self, **facts: Any) -> None:
        """Publish these with every state from now on. Any thread."""
        with self._telling:
            self.facts = {**self.facts, **facts}

    def show(self, obs: Observation) -> None:
        """Publish an observation's pictures; encoded elsewhere, the newest only. Does not wait."""
        self._video.show(obs)

    def close(self) -> None:
        """End the threads, close the sockets and pipes."""
        self._closing.set()
        for thread in self._threads:
            thread.join(5.0)
        self._video.close()
        self._end()

    def _bind(self, name: str) -> Listener:
        self._bound.append(Listener(channel(self.endpoint, name), self._admission, MAX_BYTES, DRIVER_HZ))
        return self._bound[-1]

    def _end(self) -> None:
        for listener in self._bound:
            listener.close()
        self._control.close()
        self._estop.close()

    def _may_drive(self, key: str) -> bool:
        return self._admission is None or self._admission.has_role(key, Role.OPERATOR)

    # -- teleop, events, state ------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            self._take_turns()
        except EOFError:
            return  # the control process is gone; the node says so
        except Exception:
            log.exception("the operator's channels are out of order")
        with contextlib.suppress(EOFError):
            while not self._closing.is_set() and not self._post("lost"):
                self._closing.wait(TURN_MS * 1e-3)

    def _take_turns(self) -> None:
        listeners = (self._teleop, self._events, self._states)
        with selectors.DefaultSelector() as selector:
            for source in (*listeners, self._control):
                selector.register(source, selectors.EVENT_READ)
            while not self._closing.is_set():
                selector.select(TURN_MS * 1e-3)
                self._turn()

    def _turn(self) -> None:
        for listener, name, take in (
            (self._teleop, "teleop", self._take_teleop),
            (self._events, "event", self._take_event),
        ):
            for mail in listener.receive():
                if mail.frames != [PRESENT]:
                    self._guarded(name, take, mail)
        self._states.receive()  # watchers say that they are there
        while self._unsent:
            event = self._unsent[0]
            if not self._post("event", id=event.id, name=event.name, stops=event.args.get("stops")):
                break
            self._unsent.popleft()
        if self._lease.expired(time.monotonic_ns()):
            self.counters["lease lost"] += 1
            self._post("lost")
        for message in self._control.receive():
            self._guarded("answer", self._take_answer, message)
        if time.monotonic_ns() - self._published_ns > REPEAT_NS:
            self._guarded("state", self._publish)

    def _guarded(self, what: str, take: Callable[..., None], *args: Any) -> None:
        """One message; the first of each kind that something goes wrong with is logged, all are counted."""
        try:
            take(*args)
        except EOFError:
            raise
        except Exception:
            self._log_failure(what)

    def _log_failure(self, what: str) -> None:
        if not self.counters[f"{what} failed"]:
            log.exception("%s", what)
        self.counters[f"{what} failed"] += 1

    def _take_teleop(self, mail: Mail) -> None:
        now_ns = time.monotonic_ns()
        try:
            message = read_teleop(mail.frames[-1], len(self._robot.action))
        except SchemaError:
            self.counters["teleop malformed"] += 1
            return
        sent_ns = self._lease.accept(message, now_ns) if self._may_drive(mail.key) else None
        if sent_ns is None or abs(now_ns - sent_ns) > MAX_SKEW_NS:
            self.counters["teleop not accepted"] += 1
            return
        self.counters["teleop"] += 1
        self._teleop.vouch(mail.peer)
        self._post(
            "teleop",
            t_ns=sent_ns,
            engaged=message.engaged,
            velocity=message.velocity,
            target=message.target,
            rewind=message.rewind,
        )

    def _take_event(self, mail: Mail) -> None:
        peer, parts = mail.peer, mail.frames
        try:
            if len(parts) != 1:
                raise SchemaError(f"an event is one frame, not {len(parts)}")
            event = read_event(parts[0])
        except SchemaError as e:
            self.counters["event malformed"] += 1
            self._send(peer, Reply("", False, str(e)))
            return
        if event.id in self._replies:
            self.counters["event repeated"] += 1
            if (reply := self._replies[event.id]) is not None:
                self._send(peer, reply)
            else:
                self._asked[event.id] = peer
            return
        self._asked[event.id] = peer
        self._replies[event.id] = None
        while len(self._replies) > REPLIES_KEPT:
            self._asked.pop(self._replies.popitem(last=False)[0], None)
        try:
            reply = self._apply(event) if self._may_drive(mail.key) else Reply(event.id, False, MAY_NOT_DRIVE)
        except EOFError:
            raise
        except Exception as e:
            self._log_failure("event")
            reply = Reply(event.id, False, str(e) if isinstance(e, UserError) else f"{type(e).__name__}: {e}")
        if reply is None or reply.ok:
            self._events.vouch(peer)
        if reply is not None:
            self._answer(reply)

    def _apply(self, event: Event) -> Reply | None:
        """Apply an event; None where the control process will answer it."""
        now_ns, error = time.monotonic_ns(), None
        if event.name == "acquire":
            error = self._lease.acquire(event.lease, now_ns)
        elif event.name == "release":
            error = self._lease.release(event.lease)
            if error is None:
                self._post("lost")
        elif event.name not in (*EVENTS, *OWNER_EVENTS):
            error = f"'{event.name}' is no event; there are {', '.join((*EVENTS, *LEASE_EVENTS, *OWNER_EVENTS))}"
        elif event.name != "estop" and not self._lease.holds(event.lease, now_ns):
            error = "acquire the lease first"
        elif event.name in OWNER_EVENTS or (event.name == "discard" and not self._running()):
            error = self._on_event(event.name, event.args) if self._on_event else "nobody here takes this event"
        else:
            self._unsent.append(event)
            return None
        if event.name in LEASE_EVENTS:
            self._publish()
        return Reply(event.id, error is None, error or "", self._state.get("phase", ""), self._state.get("tick", -1))

    def _running(self) -> bool:
        """Whether an episode has started and not ended; below an e-stop or a hold that is what it would resume."""
        phase = str(self._state["phase"])
        return self._state.get("resumes", phase) != "reset" and not phase.startswith("end_")

    def _take_answer(self, message: Message) -> None:
        if message.pop("kind") == "reply":
            self._answer(Reply(**message))
        else:
            self._state = message
            self._publish()

    def _answer(self, reply: Reply) -> None:
        reply = replace(reply, error=reply.error[:200])
        self._replies[reply.id] = reply
        if (peer := self._asked.pop(reply.id, None)) is not None:
            self._send(peer, reply)

    def _send(self, peer: bytes, reply: Reply) -> None:
        try:
            self._events.send(peer, [reply.pack()])
        except PeerGone:
            self.counters["reply unsent"] += 1  # its console has left

    def _publish(self) -> None:
        self._published_ns = time.monotonic_ns()
        facts = {"lease": holder_name(self._lease.token), "counters": dict(self.counters), **self.facts}
        state = msgpack.packb({**self._state, **facts, "t_sent_ns": self._published_ns})
        for peer in list(self._states.peers):
            self._states.send(peer, [state], newest=True)

    def _post(self, kind: str, **fields: Any) -> bool:
        sent = self._control.post(kind, **fields)
        self.counters[f"{kind} unsent"] += not sent
        return sent

    # -- e-stop ---------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Whatever arrives, from whomever the authenticator lets in, stops the robot; so does a channel that fails."""
        pending = False
        while not self._closing.is_set():
            try:
                pending |= self._hear_stop(TURN_MS if not pending else 1)
            except Exception:
                self._log_failure("estop")
                pending = True
                self._closing.wait(TURN_MS * 1e-3)  # it may fail at once, again and again
            try:
                pending = pending and not self._estop.post("estop")
            except EOFError:
                return

    def _hear_stop(self, timeout_ms: int) -> bool:
        """Whether somebody asks for a stop."""
        mail = self._stops.receive(timeout_ms * 1e-3)
        for peer, _, _ in mail:
            self.counters["estop"] += 1
            with contextlib.suppress(PeerGone):  # whoever stopped the robot has left; it stops all the same
                self._stops.send(peer, [b"stopping"])
        return bool(mail)

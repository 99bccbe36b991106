"""What a robot's message does: sessions, requests, and which policy answers them. Called by one thread at a time.

Every admitted request is answered exactly once, by CHUNK or by ERR: EXPIRED to a request that a newer one of its
session or a RESET overtook. A copy of a request is dropped: its answer would end the request that it is a copy of.

A session keeps its policy for the length of an epoch. When the server has loaded another one, a session goes over to it
at its next RESET: where only the weights differ, a WELCOME tells the robot so before the first chunk; where anything
that a plan rests on differs, the session ends and the robot has to say HELLO, which shows it the difference.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

from vla_stack.history import History
from vla_stack.schema import RobotSpec
from vla_stack.serving import messages, wire
from vla_stack.serving.admission import Admission
from vla_stack.serving.events import EventLog
from vla_stack.serving.listener import Listener, PeerGone
from vla_stack.serving.metrics import Metrics
from vla_stack.serving.pixels import PixelRing
from vla_stack.serving.rates import Allowance
from vla_stack.serving.sessions import Session, Sessions
from vla_stack.serving.wire import Code, Kind, Message, WireError
from vla_stack.serving.worker import ChunkPolicy, Job, Mailbox, Result

NO_SESSION = "none"  # session id in the answer to whoever only asks what is served
log = logging.getLogger(__name__)

SLACK_MS = 10_000  # of a request that does not say how long it can wait
REFUSALS_HZ = 10.0  # lines about refusals in the audit log: a flood of nonsense must not push out the rest


class Limits(Protocol):
    """What :class:`~vla_stack.serving.server.ServerConfig` says about robots."""

    @property
    def max_sessions(self) -> int: ...
    @property
    def idle_s(self) -> float: ...


class Reception:
    """The server's side of every conversation.

    Args:
        listener: Replies leave through it.
        mailbox: Requests go here.
        limits: Caps.
        stopping: Whether the server has been told to stop.
        admission: Who may ask what; None on this machine.
        metrics: Counts.
        events: Audit log.

    Attributes:
        policy: What new sessions are served, None while it loads.
        unanswered: Admitted requests that have had no reply yet.
        replied_ns: When the last chunk was sent.
        sessions: Open sessions.
    """

    def __init__(
        self,
        listener: Listener,
        mailbox: Mailbox,
        limits: Limits,
        stopping: Callable[[], bool],
        admission: Admission | None,
        metrics: Metrics,
        events: EventLog,
    ) -> None:
        self._listener, self._mailbox, self._stopping = listener, mailbox, stopping
        self._admission, self._metrics, self._events = admission, metrics, events
        self._refusals = Allowance(REFUSALS_HZ)
        self.sessions = Sessions(limits.max_sessions, int(limits.idle_s * 1e9))
        self.policy: ChunkPolicy | None = None
        self.unanswered = 0
        self.replied_ns = 0

    # -- what came ------------------------------------------------------------------------------------------------

    def handle(self, peer: bytes, frames: list[memoryview], key: str) -> None:
        """Answer a message, whatever it holds."""
        received_ns = time.monotonic_ns()
        message = Message(Kind.ERR)
        try:
            message = wire.decode(frames)
            self._metrics.receive(message.kind)
            if self._admission:
                self._admission.check(message.kind, key)
            if message.kind is Kind.PING:
                self._on_ping(peer, message, received_ns)
            elif message.kind is Kind.HELLO:
                self._on_hello(peer, message, received_ns, key)
            elif message.kind is Kind.INFER:
                self._on_infer(peer, message, received_ns)
            elif message.kind is Kind.RESET:
                self._on_reset(self.sessions.require(peer, message.sid, received_ns), message.epoch)
            elif message.kind is Kind.BYE:
                self._end(self.sessions.require(peer, message.sid, received_ns), "bye")
            else:
                raise WireError(Code.BAD_SCHEMA, f"a server does not take {message.kind}")
        except WireError as e:
            self._refuse(message, e, peer)
        except Exception:  # one robot's message must not end the service of the others
            log.exception("a %s message could not be handled", message.kind)
            self._refuse(message, WireError(Code.INTERNAL, "the server could not handle this message"), peer)

    def finish(self, result: Result) -> None:
        """Send what became of a request."""
        self.unanswered -= 1
        job, frames, begun_ns, computed_ns, encoded_ns = result
        queued = (("decode", job.queued_ns - job.received_ns), ("queue", begun_ns - job.queued_ns))
        if isinstance(frames, WireError):
            self._refuse(job, frames)
            self._metrics.observe(*queued)
            return
        self._send(job.peer, frames)  # first of all: the robot waits for it, the figures can wait
        self.replied_ns = time.monotonic_ns()
        total_ns = self.replied_ns - job.received_ns
        computed = (("infer", computed_ns - begun_ns), ("encode", encoded_ns - computed_ns), ("total", total_ns))
        self._metrics.observe(*queued, *computed)
        self._events.write(
            "chunk",
            job.sid,
            rid=job.rid,
            epoch=job.epoch,
            k_obs=job.observation.step,
            origin=job.origin,
            model=job.policy.spec.model_version,
            ms=round(total_ns * 1e-6, 3),
        )

    def forget_silent(self, now_ns: int) -> None:
        """End the sessions that have said nothing for too long."""
        for session in self.sessions.expire(now_ns):
            self._end(session, "silent")

    # -- messages -------------------------------------------------------------------------------------------------

    def _on_ping(self, peer: bytes, message: Message, received_ns: int) -> None:
        session = self.sessions.of(peer, received_ns)
        fields = {"t0": message.fields.get("t0", 0), "t1": received_ns, "t2": time.monotonic_ns()}
        pong = Message(Kind.PONG, session.sid if session else "", message.epoch, message.rid, fields)
        self._send(peer, wire.encode(pong))

    def _on_hello(self, peer: bytes, message: Message, received_ns: int, key: str) -> None:
        policy = self._require_ready()
        robot = messages.read_hello(message)
        if robot is None:
            self._send(peer, wire.encode(messages.welcome(policy.spec, NO_SESSION, message.epoch)))
            return
        difference = messages.robot_difference(robot, policy.spec.robot)
        if difference:
            raise WireError(Code.BAD_SCHEMA, f"this policy was not trained for this robot: {difference}")
        session, replaced = self.sessions.open(peer, message.epoch, message.sid, received_ns, key)
        if replaced is not None:
            self._end(replaced, "replaced")
            session.policy = replaced.policy  # its epoch goes on
        self._listener.vouch(peer)
        session.policy = session.policy or policy
        self._metrics.sessions = len(self.sessions)
        self._begin_epoch(session, message.epoch)
        spec = session.policy.spec
        self._events.write(
            "hello", session.sid, robot=robot.name, key=key, epoch=session.epoch, model=spec.model_version
        )
        offered = message.fields.get("ring")
        if session.ring is None or session.ring.name != offered:  # a repeated HELLO finds the name removed
            session.ring = _open_ring(offered, robot)
        ring = session.ring.name if session.ring else None
        self._send(peer, wire.encode(messages.welcome(spec, session.sid, session.epoch, ring)))

    def _on_infer(self, peer: bytes, message: Message, received_ns: int) -> None:
        self._require_ready()
        session = self.sessions.require(peer, message.sid, received_ns)
        if message.epoch < session.epoch:
            raise WireError(Code.EXPIRED, f"epoch {message.epoch} is over, {session.epoch} runs")
        self._on_reset(session, message.epoch)
        if not session.ask(message.rid):  # a copy: it must not take the place of what was asked since
            self._metrics.reject("replay")
            return
        policy = session.policy
        assert policy is not None  # every session has one since its HELLO
        ring, slot = session.ring, message.fields.get("slot")
        observation, origin, seed = messages.read_infer(message, policy.spec.robot, ring, policy.spec.reads)
        session.history = session.history or History(policy.spec.history)
        observation = session.history.beside(observation)
        plan = messages.read_continuation(message, policy.spec)
        if plan is not None:
            self._metrics.delay(session.sid, plan.delay)
        queued_ns = time.monotonic_ns()
        job = Job(
            peer,
            session.sid,
            message.epoch,
            message.rid,
            observation,
            origin,
            seed,
            plan,
            received_ns,
            queued_ns,
            deadline_ns=received_ns + max(0, message.fields.get("slack_ms", SLACK_MS)) * 1_000_000,
            policy=policy,
            pixels_hold=partial(ring.holds, slot, message.fields.get("sequence", 0))
            if ring and slot is not None
            else None,
        )
        self.unanswered += 1
        superseded = self._mailbox.put(job)
        if superseded:
            self._expire(superseded, "a newer request took its place")

    def _on_reset(self, session: Session, epoch: int) -> None:
        if self._begin_epoch(session, epoch) and session.policy is not self.policy:
            self._change_policy(session)

    def _begin_epoch(self, session: Session, epoch: int) -> bool:
        """Whether ``epoch`` is a new one; what was asked in the last one is not worth computing then."""
        if epoch <= session.epoch:
            return False
        session.begin(epoch)
        self._events.write("reset", session.sid, epoch=epoch)
        job = self._mailbox.drop(session.sid)
        if job:
            self._expire(job, f"reset to epoch {epoch}")
        return True

    def _change_policy(self, session: Session) -> None:
        old, new = session.policy, self.policy
        assert old is not None and new is not None
        difference = messages.plan_difference(new.spec, old.spec)
        if difference is None and new.spec.reads != old.spec.reads:
            difference = "it reads pictures of other sizes"  # which robots send from HELLO on
        self._events.write(
            "swap", session.sid, epoch=session.epoch, old=old.spec.model_version, model=new.spec.model_version
        )
        if difference:
            self._end(session, "swap")
            raise WireError(Code.NO_SESSION, f"another policy is served now, say HELLO again: {difference}")
        session.policy = new
        self._send(session.peer, wire.encode(messages.welcome(new.spec, session.sid, session.epoch)))

    def _require_ready(self) -> ChunkPolicy:
        if self._stopping():
            raise WireError(Code.BUSY, "the server is shutting down")
        if self.policy is None:
            raise WireError(Code.NOT_READY, "the policy is loading")
        return self.policy

    # -- what goes out --------------------------------------------------------------------------------------------

    def _send(self, peer: bytes, frames: list[bytes | memoryview]) -> None:
        try:
            if not self._listener.send(peer, frames):  # the peer does not read
                self._metrics.reject("unread")
        except PeerGone:
            self._metrics.reject("gone")
            session = self.sessions.of(peer, time.monotonic_ns())
            if session is not None:
                self._end(session, "gone")

    def _refuse(self, about: Job | Message, e: WireError, peer: bytes = b"") -> None:
        self._metrics.reject(e.code.lower())
        if self._refusals.admit(time.monotonic_ns()):
            self._events.write("refused", about.sid, code=str(e.code), text=e.text, rid=about.rid, epoch=about.epoch)
        peer = about.peer if isinstance(about, Job) else peer
        self._send(peer, wire.encode(wire.error(e.code, e.text, about.sid, about.epoch, about.rid)))

    def _expire(self, job: Job, why: str) -> None:
        self.unanswered -= 1
        self._refuse(job, WireError(Code.EXPIRED, why))

    def _end(self, session: Session, why: str) -> None:
        """A session is over; what it had queued is not worth computing."""
        self.sessions.close(session)
        self._listener.vouch(session.peer, False)
        self._metrics.sessions = len(self.sessions)
        self._metrics.delay(session.sid, None)
        self._events.write("end", session.sid, why=why)
        if self._mailbox.drop(session.sid):
            self.unanswered -= 1


def _open_ring(name: str | None, robot: RobotSpec) -> PixelRing | None:
    """Shared memory that a robot offers, if it is there: a robot behind a tunnel offers that of its own computer."""
    try:
        return PixelRing(robot, name) if name else None
    except OSError:
        return None

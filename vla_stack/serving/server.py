"""Policy server: robots say HELLO, send observations, receive action chunks.

The inference thread (``worker.py``) runs the policy and, while it has nothing to compute, the network; the caller of
:meth:`PolicyServer.run` runs the network while it computes, so PING and HELLO are answered whatever the policy does
(``baton.py``). The metrics page (``metrics.py``) is optional. Every admitted request is answered exactly once, by CHUNK
or by ERR: EXPIRED to a request that a newer one of its session or a RESET overtook.

Off this machine every connection is encrypted, and ZeroMQ's authenticator lets in only peers of the allow-list, whose
roles are checked here (``keys.py``). One key drives one robot: a second session with it is refused while the first
lives. Limits: ZeroMQ caps the size of a frame, not the number of frames of an unfinished message, so a peer that is
allowed to connect can make libzmq hold memory.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from vla_stack.errors import UserError
from vla_stack.schema import PolicySpec
from vla_stack.serving import messages, wire
from vla_stack.serving.admission import Admission
from vla_stack.serving.baton import Baton
from vla_stack.serving.keys import KeyFolder
from vla_stack.serving.metrics import Metrics, MetricsPage
from vla_stack.serving.sessions import Session, Sessions
from vla_stack.serving.transport import is_local, new_socket, owner, readable, receive, send, zmq_address
from vla_stack.serving.wire import Code, Kind, Message, WireError
from vla_stack.serving.worker import ChunkPolicy, Job, Mailbox, Result, Worker

log = logging.getLogger(__name__)

READ_NS = 250_000_000  # a client loses what it has not read when the connection ends (a property of ZMQ_IMMEDIATE)
SLACK_MS = 10_000  # of a request that does not say how long it can wait
BURST = 32  # messages read before finished inferences are sent again
HOUSEKEEPING_NS = 100_000_000


@dataclass(frozen=True)
class ServerConfig:
    """Limits of a server.

    Attributes:
        metrics_port: Port of the metrics page on loopback, 0 for any free one, None for no page.
        max_sessions: Robots at the same time.
        max_batch: Requests that are computed together, where that many wait.
        idle_s: Silence in seconds after which a session is forgotten.
        drain_s: Longest time in seconds that shutting down waits for requests in progress.
    """

    metrics_port: int | None = None
    max_sessions: int = 64
    max_batch: int = 8
    idle_s: float = 60.0
    drain_s: float = 5.0


class PolicyServer:
    """Serves one policy. Binds at once; loads, warms up and serves in :meth:`run`.

    Args:
        load: Returns the policy. Called on the inference thread; until it is loaded and warm, robots are told
            NOT_READY.
        endpoint: ``tcp://ADDRESS:PORT`` (port ``*`` for any free one) or ``ipc://PATH``.
        config: Limits.
        on_ready: Called once, when requests are first answered.
        keys: This computer's keys: connections are encrypted, peers must be on the allow-list. None uses the default
            folder where the endpoint can be reached from outside, and no encryption otherwise.

    Attributes:
        endpoint: Address that is bound.
        metrics: Counters.

    Raises:
        UserError: The endpoint is in use, or can be reached from outside and there are no keys.
    """

    def __init__(
        self,
        load: Callable[[], ChunkPolicy],
        endpoint: str = "tcp://127.0.0.1:5555",
        config: ServerConfig = ServerConfig(),
        on_ready: Callable[[PolicySpec], None] | None = None,
        keys: KeyFolder | None = None,
    ) -> None:
        self._config = config
        self._on_ready = on_ready
        self._context = zmq.Context()
        self._admission: Admission | None = None
        if keys is not None or not is_local(endpoint):
            self._admission = Admission(self._context, keys or KeyFolder())
        self._router = new_socket(self._context, zmq.ROUTER, self._admission.curve if self._admission else None)
        try:
            self._router.bind(zmq_address(endpoint))
        except zmq.ZMQError as e:
            if self._admission:
                self._admission.close()
            self._context.destroy()
            raise UserError(f"cannot bind {endpoint}: {e}", "stop the other server or choose another port") from None
        self.endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self._wake_in = self._context.socket(zmq.PAIR)
        self._wake_out = self._context.socket(zmq.PAIR)
        self._wake_in.bind("inproc://wake")
        self._wake_out.connect("inproc://wake")
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._wake_in, zmq.POLLIN)
        self._mailbox = Mailbox(config.max_batch)
        self._results: queue.SimpleQueue[list[Result] | PolicySpec | BaseException] = queue.SimpleQueue()
        self._baton = Baton()
        self._leads = False  # whether the inference thread has the baton; it alone reads and writes this
        self._retired = False  # the inference thread is to leave the network to run()
        self._worker = Worker(load, self._next, self._deliver, self._fail)
        self._sessions = Sessions(config.max_sessions, int(config.idle_s * 1e9))
        self._policy: PolicySpec | None = None
        self._unanswered = 0  # admitted requests that have had no reply yet
        self._replied_ns = 0  # when the last chunk was sent
        self._stopping_ns = 0  # when the network loop saw that it should stop
        self._stop = threading.Event()
        self.metrics = Metrics()
        self._turned_ns = time.monotonic_ns()
        self._page: MetricsPage | None = None

    @property
    def metrics_url(self) -> str | None:
        """Address of the metrics page while :meth:`run` runs, None without one."""
        return self._page.url if self._page else None

    def stop(self) -> None:
        """Ask :meth:`run` to finish what is in progress and return. Safe from any thread and from a signal handler."""
        self._stop.set()

    def run(self) -> None:
        """Serve until :meth:`stop`; the calling thread answers while the policy computes.

        Raises:
            Exception: Whatever loading or warming up the policy raised.
        """
        try:
            if self._config.metrics_port is not None:
                self._page = MetricsPage(self.metrics, self._is_alive, self._config.metrics_port)
            self._worker.start()
            while not self._stop.is_set():
                if self._baton.stand_by():
                    try:
                        while self._baton.computing and not self._stop.is_set():
                            self._turn()
                    finally:
                        self._baton.release()
            self._retired = True
            self._baton.take()
            while not self._is_drained(time.monotonic_ns()):
                self._turn()
        finally:
            self._close()

    def _is_drained(self, now_ns: int) -> bool:
        """Whether a server that was told to stop may go: nothing is in progress, and robots had time to read."""
        self.metrics.ready = False
        self._stopping_ns = self._stopping_ns or now_ns
        if now_ns - self._stopping_ns > self._config.drain_s * 1e9:
            return True
        read = not len(self._sessions) or now_ns - self._replied_ns > READ_NS
        return not self._unanswered and read

    def _turn(self) -> None:
        """Wait for messages and answer them; the baton's holder calls this."""
        ready = [socket for socket, _ in self._poller.poll(100)]
        if self._wake_in in ready:
            self._collect()
        if self._router in ready:
            for _ in range(BURST):
                peer, *parts = receive(self._router)
                self._handle(peer.bytes, [part.buffer for part in parts], owner(peer) if self._admission else "")
                if not readable(self._router):
                    break
        now_ns = time.monotonic_ns()
        if now_ns - self._turned_ns > HOUSEKEEPING_NS or not ready:
            self._turned_ns = now_ns
            for session in self._sessions.expire(now_ns):
                self._forget(session)

    def _close(self) -> None:
        self.metrics.ready = False
        self._mailbox.close()
        if self._page:
            self._page.close()
        self._router.close(linger=500)  # the last replies still leave
        if self._admission:
            self._admission.close()
        self._wake_in.close()
        # The inference thread owns the other end of the pair; where it hangs inside the policy, only the end of the
        # process ends it.
        if self._worker.ident is not None:
            self._worker.join(timeout=1.0)
        if not self._worker.is_alive():
            self._wake_out.close()
            self._context.term()

    def _is_alive(self) -> bool:
        return time.monotonic_ns() - self._turned_ns < 5_000_000_000

    # -- inference thread ----------------------------------------------------------------------------------------

    def _next(self) -> list[Job]:
        """The next jobs; until there is one, this thread attends to the network."""
        while self._leads:
            if self._retired:
                self._leads = False
                self._baton.release()
            elif jobs := self._mailbox.poll():
                self._leads = False
                self._baton.compute()
                return jobs
            else:
                self._turn()
        return self._mailbox.take()

    def _deliver(self, item: list[Result] | PolicySpec) -> None:
        """What the policy has computed: sent from here, unless the other thread has the network."""
        self._leads = self._baton.computed()
        if self._leads:
            self._accept(item)
            return
        self._results.put(item)
        self._wake_out.send(b"")
        while not (self._leads or self._retired):
            self._leads = self._baton.take(timeout=0.1)
        if self._leads:  # the other thread may have left before it saw the result
            self._collect()

    def _fail(self, failure: BaseException) -> None:
        """End of the inference thread; :meth:`run` raises what ended it."""
        self._results.put(failure)
        if self._leads:
            self._baton.compute()
        self._wake_out.send(b"")

    # -- replies -------------------------------------------------------------------------------------------------

    def _collect(self) -> None:
        """Accept what the inference thread has left here."""
        while self._wake_in.poll(0):
            self._wake_in.recv()
            self._accept(self._results.get())

    def _accept(self, item: list[Result] | PolicySpec | BaseException) -> None:
        if isinstance(item, list):
            for result in item:
                self._finish(result)
        elif isinstance(item, BaseException):
            raise item
        else:
            self._policy = item
            self.metrics.labels = {"model_version": item.model_version, "robot": item.robot.name}
            self.metrics.ready = True
            if self._on_ready:
                self._on_ready(item)

    def _finish(self, result: Result) -> None:
        self._unanswered -= 1
        job, frames, begun, computed, encoded = result
        queued = (("decode", job.queued_ns - job.received_ns), ("queue", begun - job.queued_ns))
        if isinstance(frames, WireError):
            self._refuse(job, frames)
            self.metrics.observe(*queued)
            return
        self._send(job.peer, frames)  # first of all: the robot waits for it, the figures can wait
        self._replied_ns = time.monotonic_ns()
        total = ("total", self._replied_ns - job.received_ns)
        self.metrics.observe(*queued, ("infer", computed - begun), ("encode", encoded - computed), total)

    def _send(self, peer: bytes, frames: list[bytes | memoryview]) -> None:
        try:
            if not send(self._router, [peer, *frames]):  # the peer does not read
                self.metrics.reject("unread")
        except zmq.ZMQError as e:
            if e.errno != zmq.EHOSTUNREACH:
                raise
            self.metrics.reject("gone")
            session = self._sessions.of(peer, time.monotonic_ns())
            if session is not None:
                self._sessions.close(session)
                self._forget(session)

    def _refuse(self, about: Job | Message, e: WireError, peer: bytes = b"") -> None:
        self.metrics.reject(e.code.lower())
        peer = about.peer if isinstance(about, Job) else peer
        self._send(peer, wire.encode(wire.error(e.code, e.text, about.sid, about.epoch, about.rid)))

    def _forget(self, session: Session) -> None:
        """A session is over; what it had queued is not worth computing."""
        self.metrics.sessions = len(self._sessions)
        if self._mailbox.drop(session.sid):
            self._unanswered -= 1

    # -- requests ------------------------------------------------------------------------------------------------

    def _handle(self, peer: bytes, frames: list[memoryview], key: str) -> None:
        received_ns = time.monotonic_ns()
        message = Message(Kind.ERR)
        try:
            message = wire.decode(frames)
            self.metrics.receive(message.kind)
            if self._admission:
                self._admission.check(message.kind, key)
            if message.kind is Kind.PING:
                self._on_ping(peer, message, received_ns)
            elif message.kind is Kind.HELLO:
                self._on_hello(peer, message, received_ns, key)
            elif message.kind is Kind.INFER:
                self._on_infer(peer, message, received_ns)
            elif message.kind is Kind.RESET:
                self._on_reset(self._sessions.require(peer, message.sid, received_ns), message.epoch)
            elif message.kind is Kind.BYE:
                self._on_bye(self._sessions.require(peer, message.sid, received_ns))
            else:
                raise WireError(Code.BAD_SCHEMA, f"a server does not take {message.kind}")
        except WireError as e:
            self._refuse(message, e, peer)
        except Exception:  # one robot's message must not end the service of the others
            log.exception("a %s message could not be handled", message.kind)
            self._refuse(message, WireError(Code.INTERNAL, "the server could not handle this message"), peer)

    def _on_ping(self, peer: bytes, message: Message, received_ns: int) -> None:
        session = self._sessions.of(peer, received_ns)
        fields = {"t0": message.fields.get("t0", 0), "t1": received_ns, "t2": time.monotonic_ns()}
        pong = Message(Kind.PONG, session.sid if session else "", message.epoch, message.rid, fields)
        self._send(peer, wire.encode(pong))

    def _on_hello(self, peer: bytes, message: Message, received_ns: int, key: str) -> None:
        policy = self._require_ready()
        difference = messages.robot_difference(messages.read_hello(message), policy.robot)
        if difference:
            raise WireError(Code.BAD_SCHEMA, f"this policy was not trained for this robot: {difference}")
        session, replaced = self._sessions.open(peer, message.epoch, message.sid, received_ns, key)
        if replaced is not None:
            self._forget(replaced)
        self.metrics.sessions = len(self._sessions)
        self._on_reset(session, message.epoch)
        self._send(peer, wire.encode(messages.welcome(policy, session.sid, session.epoch)))

    def _on_infer(self, peer: bytes, message: Message, received_ns: int) -> None:
        policy = self._require_ready()
        session = self._sessions.require(peer, message.sid, received_ns)
        if message.epoch < session.epoch:
            raise WireError(Code.EXPIRED, f"epoch {message.epoch} is over, {session.epoch} runs")
        self._on_reset(session, message.epoch)
        observation, origin, seed = messages.read_infer(message, policy.robot)
        plan = messages.read_continuation(message, policy)
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
        )
        self._unanswered += 1
        superseded = self._mailbox.put(job)
        if superseded:
            self._expire(superseded, "a newer request took its place")

    def _on_reset(self, session: Session, epoch: int) -> None:
        if epoch <= session.epoch:
            return
        session.epoch = epoch
        job = self._mailbox.drop(session.sid)
        if job:
            self._expire(job, f"reset to epoch {epoch}")

    def _on_bye(self, session: Session) -> None:
        self._sessions.close(session)
        self._forget(session)

    def _expire(self, job: Job, why: str) -> None:
        self._unanswered -= 1
        self._refuse(job, WireError(Code.EXPIRED, why))

    def _require_ready(self) -> PolicySpec:
        if self._stop.is_set():
            raise WireError(Code.BUSY, "the server is shutting down")
        if self._policy is None:
            raise WireError(Code.NOT_READY, "the policy is loading")
        return self._policy

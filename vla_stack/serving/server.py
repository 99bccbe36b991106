"""Policy server: robots say HELLO, send observations, receive action chunks.

The inference thread (``worker.py``) runs the policy and, while it has nothing to compute, the network; the caller of
:meth:`PolicyServer.run` runs the network while it computes, so PING and HELLO are answered whatever the policy does
(``baton.py``). What a message does is in ``reception.py``; the metrics page (``metrics.py``) and the audit log
(``events.py``) are optional.

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
from pathlib import Path

import zmq

from vla_stack.errors import UserError
from vla_stack.schema import PolicySpec
from vla_stack.serving.admission import Admission
from vla_stack.serving.baton import Baton
from vla_stack.serving.events import EventLog
from vla_stack.serving.keys import KeyFolder
from vla_stack.serving.metrics import Metrics, MetricsPage
from vla_stack.serving.reception import Reception
from vla_stack.serving.transport import is_local, new_socket, owner, readable, receive, wait_readable, zmq_address
from vla_stack.serving.worker import ChunkPolicy, Job, Mailbox, Result, Worker, load_warm

log = logging.getLogger(__name__)

READ_NS = 250_000_000  # a client loses what it has not read when the connection ends (a property of ZMQ_IMMEDIATE)
BURST = 32  # messages read before finished inferences are sent again
HOUSEKEEPING_NS = 100_000_000


@dataclass(frozen=True)
class ServerConfig:
    """Limits of a server.

    Attributes:
        metrics_port: Port of the metrics page on loopback, 0 for any free one, None for no page.
        max_sessions: Robots at the same time.
        max_batch: Requests that are computed together, where that many wait.
        max_rate_hz: Messages of one robot per second; those beyond are dropped unread.
        idle_s: Silence in seconds after which a session is forgotten.
        drain_s: Longest time in seconds that shutting down waits for requests in progress.
    """

    metrics_port: int | None = None
    max_sessions: int = 64
    max_batch: int = 8
    max_rate_hz: float = 1000.0
    idle_s: float = 60.0
    drain_s: float = 5.0


class PolicyServer:
    """Serves one policy. Binds at once; loads, warms up and serves in :meth:`run`.

    Args:
        load: Returns the policy. Called on the inference thread; until it is loaded and warm, robots are told
            NOT_READY. Called again, on a thread of its own, for each :meth:`reload`.
        endpoint: ``tcp://ADDRESS:PORT`` (port ``*`` for any free one) or ``ipc://PATH``.
        config: Limits.
        on_ready: Called once, when requests are first answered.
        keys: This computer's keys: connections are encrypted, peers must be on the allow-list. None uses the default
            folder where the endpoint can be reached from outside, and no encryption otherwise.
        log_file: Audit log, see ``events.py``; None writes none.

    Attributes:
        endpoint: Address that is bound.
        metrics: Counters.

    Raises:
        UserError: The endpoint is in use, or can be reached from outside and there are no keys, or the audit log cannot
            be written.
    """

    def __init__(
        self,
        load: Callable[[], ChunkPolicy],
        endpoint: str = "tcp://127.0.0.1:5555",
        config: ServerConfig = ServerConfig(),
        on_ready: Callable[[PolicySpec], None] | None = None,
        keys: KeyFolder | None = None,
        log_file: str | Path | None = None,
    ) -> None:
        self._config = config
        self._load, self._on_ready = load, on_ready
        self._events = EventLog(log_file)
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
        self._sockets = (self._router, self._wake_in)
        self._mailbox = Mailbox(config.max_batch)
        self._results: queue.SimpleQueue[list[Result] | ChunkPolicy | BaseException] = queue.SimpleQueue()
        self._loaded: queue.SimpleQueue[ChunkPolicy] = queue.SimpleQueue()  # by reload(), to be served
        self._reloading = threading.Lock()
        self._baton = Baton()
        self._leads = False  # whether the inference thread has the baton; it alone reads and writes this
        self._retired = False  # the inference thread is to leave the network to run()
        self._worker = Worker(load, self._next, self._deliver, self._fail)
        self._stopping_ns = 0  # when the network loop saw that it should stop
        self._stop = threading.Event()
        self.metrics = Metrics()
        self._reception = Reception(
            self._router, self._mailbox, config, self._stop.is_set, self._admission, self.metrics, self._events
        )
        self._turned_ns = time.monotonic_ns()
        self._page: MetricsPage | None = None

    @property
    def metrics_url(self) -> str | None:
        """Address of the metrics page while :meth:`run` runs, None without one."""
        return self._page.url if self._page else None

    def stop(self) -> None:
        """Ask :meth:`run` to finish what is in progress and return. Safe from any thread and from a signal handler."""
        self._stop.set()

    def reload(self) -> None:
        """Load the policy again, beside the one that is served, and go over to it once it is warm: new sessions at
        once, open ones at their next epoch. A policy that cannot be loaded changes nothing. Returns at once; safe from
        any thread and from a signal handler.
        """
        threading.Thread(target=self._load_beside, name="vla-reload", daemon=True).start()

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
        read = not len(self._reception.sessions) or now_ns - self._reception.replied_ns > READ_NS
        return not self._reception.unanswered and read

    def _turn(self) -> None:
        """Wait for messages and answer them; the baton's holder calls this."""
        ready = wait_readable(self._sockets, 100)
        if self._wake_in in ready:
            self._collect()
        if self._router in ready:
            for _ in range(BURST):
                peer, *parts = receive(self._router)
                key = owner(peer) if self._admission else ""
                self._reception.handle(peer.bytes, [part.buffer for part in parts], key)
                if not readable(self._router):
                    break
        now_ns = time.monotonic_ns()
        if now_ns - self._turned_ns > HOUSEKEEPING_NS or not ready:
            self._turned_ns = now_ns
            self._reception.forget_silent(now_ns)
            while not self._loaded.empty():
                self._accept(self._loaded.get())

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
        self._events.write("stopped", drained=not self._reception.unanswered)
        self._events.close()

    def _load_beside(self) -> None:
        if self._reception.policy is None or not self._reloading.acquire(blocking=False):
            log.warning("a policy is being loaded already")
            return
        try:
            self._loaded.put(load_warm(self._load))
        except Exception as e:  # whatever is wrong with the new one, the old one is served on
            self.metrics.reload("failed")
            self._events.write("reload failed", error=str(e)[:300])
            log.error("the policy could not be loaded again, the one before is served on: %s", e)
        finally:
            self._reloading.release()

    def _is_alive(self) -> bool:
        return time.monotonic_ns() - self._turned_ns < 5_000_000_000

    # -- inference thread ----------------------------------------------------------------------------------------

    def _next(self) -> list[Job]:
        """The next jobs; until there is one, this thread attends to the network."""
        while self._leads:
            if self._retired:
                self._leads = False
                self._baton.release()
            elif len(self._mailbox):
                jobs, self._leads = self._mailbox.poll(), False
                self._baton.compute()
                return jobs
            else:
                self._turn()
        return self._mailbox.take()

    def _deliver(self, item: list[Result] | ChunkPolicy) -> None:
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

    def _accept(self, item: list[Result] | ChunkPolicy | BaseException) -> None:
        if isinstance(item, list):
            self.metrics.batch(len(item))
            for result in item:
                self._reception.finish(result)
        elif isinstance(item, BaseException):
            raise item
        else:
            self._serve(item)

    def _serve(self, policy: ChunkPolicy) -> None:
        """A policy is loaded and warm."""
        first, spec = self._reception.policy is None, policy.spec
        self._reception.policy = policy
        self.metrics.labels = {"model_version": spec.model_version, "robot": spec.robot.name}
        self._events.write("ready" if first else "reloaded", model=spec.model_version, robot=spec.robot.name)
        if not first:
            self.metrics.reload("ok")
            log.info("model %s is served from each robot's next episode on", spec.model_version)
        elif self._on_ready:
            self._on_ready(spec)
        self.metrics.ready = not self._stop.is_set()

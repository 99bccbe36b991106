"""Policy server: robots say HELLO, send observations, receive action chunks.

The inference thread (``worker.py``) runs the policy and, while it has nothing to compute, the network; the caller of
:meth:`PolicyServer.run` runs the network while it computes, so PING and HELLO are answered whatever the policy does
(``ownership.py``). What a message does is in ``reception.py``; the metrics page (``metrics.py``) and the audit log
(``events.py``) are optional.

Off this machine every connection is encrypted, and only peers of the allow-list are let in, whose
roles are checked here (``keys.py``). One key drives one robot: a second session with it is refused while the first
lives. What a peer may cost is bounded in ``listener.py``; who has a session may send pictures, at a robot's rate.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vla_stack.schema import PolicySpec
from vla_stack.serving.admission import Admission
from vla_stack.serving.endpoint import is_local
from vla_stack.serving.events import EventLog
from vla_stack.serving.keys import KeyFolder
from vla_stack.serving.listener import Listener
from vla_stack.serving.metrics import Metrics, MetricsPage
from vla_stack.serving.ownership import SocketOwnership
from vla_stack.serving.pace import batch_sizes
from vla_stack.serving.reception import Reception
from vla_stack.serving.wire import MAX_HEADER_BYTES, MAX_TOTAL_BYTES
from vla_stack.serving.worker import ChunkPolicy, Job, Mailbox, Result, Worker, encode, load_warm

log = logging.getLogger(__name__)

READ_NS = 250_000_000  # a libzmq client loses what it has not read when the connection ends
HOUSEKEEPING_NS = 100_000_000


@dataclass(frozen=True)
class ServerConfig:
    """Limits of a server.

    Attributes:
        metrics_port: Port of the metrics page on loopback, 0 for any free one, None for no page.
        max_sessions: Robots at the same time.
        max_batch: Requests that are computed together, where that many wait.
        max_rate_hz: Messages of one robot per second; those beyond are not read before their time.
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
        self._admission = Admission(keys or KeyFolder()) if keys is not None or not is_local(endpoint) else None
        self._listener = Listener(
            endpoint,
            self._admission,
            MAX_HEADER_BYTES + MAX_TOTAL_BYTES,
            config.max_rate_hz,
            self._note_refusal,
        )
        self.endpoint = self._listener.endpoint
        self._mailbox = Mailbox(config.max_batch)
        self._results: queue.SimpleQueue[list[Result] | ChunkPolicy | BaseException] = queue.SimpleQueue()
        self._loaded: queue.SimpleQueue[ChunkPolicy] = queue.SimpleQueue()  # by reload(), to be served
        self._reloading = threading.Lock()
        self._ownership = SocketOwnership()
        self._leads = False  # whether the inference thread owns the sockets; it alone reads and writes this
        self._retired = False  # the inference thread is to leave the network to run()
        self._sizes = batch_sizes(config.max_batch)
        note = self._mailbox.note
        self._worker = Worker(load, self._next, self._deliver, self._fail, encode, note, self._sizes)
        self._stopping_ns = 0  # when the network loop saw that it should stop
        self._stop = threading.Event()
        self.metrics = Metrics()
        self._reception = Reception(
            self._listener, self._mailbox, config, self._stop.is_set, self._admission, self.metrics, self._events
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
                if self._ownership.stand_by():
                    try:
                        while self._ownership.computing and not self._stop.is_set():
                            self._turn()
                    finally:
                        self._ownership.release()
            self._retired = True
            self._ownership.take()
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
        """Wait for messages and answer them; the owner of the sockets calls this."""
        mail = self._listener.receive(0.1)
        self._collect()
        for peer, key, frames in mail:
            self._reception.handle(peer, frames, key)
        now_ns = time.monotonic_ns()
        if now_ns - self._turned_ns > HOUSEKEEPING_NS or not mail:
            self._turned_ns = now_ns
            self._reception.forget_silent(now_ns)
            while not self._loaded.empty():
                self._accept(self._loaded.get())

    def _close(self) -> None:
        self.metrics.ready = False
        self._mailbox.close()
        if self._page:
            self._page.close()
        self._listener.drain(0.5)  # the last replies still leave
        self._listener.close()
        if self._worker.ident is not None:  # where it hangs inside the policy, only the end of the process ends it
            self._worker.join(timeout=1.0)
        self._events.write("stopped", drained=not self._reception.unanswered)
        self._events.close()

    def _load_beside(self) -> None:
        if self._reception.policy is None or not self._reloading.acquire(blocking=False):
            log.warning("a policy is being loaded already")
            return
        try:
            self._loaded.put(load_warm(self._load, self._sizes))
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
                self._ownership.release()
            elif len(self._mailbox):
                jobs, self._leads = self._mailbox.poll(), False
                self._ownership.compute()
                return jobs
            else:
                self._turn()
        return self._mailbox.take()

    def _deliver(self, item: list[Result] | ChunkPolicy) -> None:
        """What the policy has computed: sent from here, unless the other thread has the network."""
        self._leads = self._ownership.computed()
        if self._leads:
            self._accept(item)
            return
        self._results.put(item)
        self._listener.wake()
        while not (self._leads or self._retired):
            self._leads = self._ownership.take(timeout=0.1)
        if self._leads:  # the other thread may have left before it saw the result
            self._collect()

    def _fail(self, failure: BaseException) -> None:
        """End of the inference thread; :meth:`run` raises what ended it."""
        self._results.put(failure)
        if self._leads:
            self._ownership.compute()
        self._listener.wake()

    # -- replies -------------------------------------------------------------------------------------------------

    def _collect(self) -> None:
        """Accept what the inference thread has left here."""
        while not self._results.empty():
            self._accept(self._results.get())

    def _note_refusal(self, why: str) -> None:
        log.warning("refused %s", why)
        self.metrics.reject("connection")
        self._events.write("refused connection", why=why)

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

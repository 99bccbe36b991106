"""A policy behind another project's websocket protocol, for robots and simulators that speak it.

What the messages look like is a :class:`Dialect`'s affair (``openpi.py``, ``vla_eval.py``), everything else is here.
The same inference thread as of :class:`~vla_stack.serving.server.PolicyServer` answers, batched over connections. Off
this machine connections are encrypted (TLS), and only who knows the token gets past the greeting; a browser's pages
never do. A request that cannot be answered gets one line of text, and the connection goes on.
"""

from __future__ import annotations

import asyncio
import hmac
import http
import logging
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from vla_stack.errors import UserError
from vla_stack.history import History
from vla_stack.schema import ActionChunk, Observation, PolicySpec
from vla_stack.serving.endpoint import bound_websocket, tls_context
from vla_stack.serving.events import EventLog
from vla_stack.serving.metrics import Metrics, MetricsPage
from vla_stack.serving.pace import batch_sizes
from vla_stack.serving.server import ServerConfig
from vla_stack.serving.trees import MAX_BYTES
from vla_stack.serving.wire import Code, WireError
from vla_stack.serving.worker import ChunkPolicy, Frames, Job, Mailbox, Result, Worker, load_warm

log = logging.getLogger(__name__)
logging.getLogger("websockets.server").setLevel(logging.WARNING)  # it would note every connection

GREETING_S = 3.0  # that a connection may take to say what it wants
TRY_LATER = 1013  # close code, RFC 6455


class Session(Protocol):
    """What the server does for one connection.

    Attributes:
        now_ns: When the message at hand came, the server's clock.
    """

    now_ns: int

    def restart(self) -> None:
        """Another episode: of the one before nothing is remembered."""
        ...

    async def infer(self, observation: Observation) -> bytes:
        """What :meth:`Dialect.encode` makes of the policy's chunk; raises WireError where there is none."""
        ...


class Conversation(Protocol):
    """One connection's messages."""

    def greeting(self) -> bytes | None:
        """What is said before anything was asked."""
        ...

    async def answer(self, message: bytes, session: Session) -> bytes | None:
        """The answer to a message, where it takes one; raises WireError where it is none of the protocol's."""
        ...

    def refusal(self, error: WireError) -> str | bytes:
        """What is said instead of an answer."""
        ...


class Dialect(Protocol):
    """A protocol's messages."""

    def conversation(self, policy: PolicySpec) -> Conversation:
        """For a connection; raises UserError where the policy does not fit what the person has said of the messages."""
        ...

    def encode(self, chunk: ActionChunk, job: Job) -> Frames:
        """A chunk as one frame of bytes, on the inference thread."""
        ...


class WebsocketServer:
    """Serves one policy. Takes its port at once; loads, warms up and listens in :meth:`run`.

    Args:
        load: Returns the policy; called on the inference thread.
        dialect: The protocol.
        endpoint: ``ws://ADDRESS:PORT`` or, with ``certificate``, ``wss://ADDRESS:PORT``; port ``*`` for any free one.
        config: Limits.
        token: What ``Authorization: Api-Key`` must say; None asks for none.
        certificate: PEM files of the certificate and its key.
        on_ready: Called once, when requests are first answered.
        log_file: Audit log, see ``events.py``.

    Attributes:
        endpoint: Address that is bound.
        metrics: Counters.

    Raises:
        UserError: The endpoint is in use, can be reached from outside and lacks token or certificate, or the
            certificate cannot be read.
    """

    def __init__(
        self,
        load: Callable[[], ChunkPolicy],
        dialect: Dialect,
        endpoint: str = "ws://127.0.0.1:8000",
        config: ServerConfig = ServerConfig(),
        token: str | None = None,
        certificate: tuple[Path, Path] | None = None,
        on_ready: Callable[[PolicySpec], None] | None = None,
        log_file: str | Path | None = None,
    ) -> None:
        self._config, self._dialect, self._token, self._on_ready = config, dialect, token, on_ready
        self._load = load
        self._ssl = tls_context(certificate) if certificate else None
        self._socket = bound_websocket(endpoint, encrypted=self._ssl is not None, token=token)
        host, port = self._socket.getsockname()[:2]
        self.endpoint = f"{'wss' if self._ssl else 'ws'}://{host}:{port}"
        self._events = EventLog(log_file)
        self.metrics = Metrics()
        self._mailbox = Mailbox(config.max_batch)
        self._sizes = batch_sizes(config.max_batch)
        take, note, done = self._mailbox.take, self._mailbox.note, self._on_worker
        self._worker = Worker(load, take, done, done, dialect.encode, note, self._sizes)
        self._waiting: dict[str, asyncio.Future[Result]] = {}  # session -> its request
        self._policy: ChunkPolicy | None = None
        self._failure: BaseException | None = None
        self._stop = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed: asyncio.Event | None = None  # stop, failure or the policy is there
        self._page: MetricsPage | None = None
        self._reloading = threading.Lock()

    @property
    def metrics_url(self) -> str | None:
        """Address of the metrics page while :meth:`run` runs, None without one."""
        return self._page.url if self._page else None

    def stop(self) -> None:
        """Ask :meth:`run` to finish what is in progress and return. Safe from any thread and from a signal handler."""
        self._stop.set()
        if self._loop is not None and self._changed is not None:
            with suppress(RuntimeError):  # the loop is over
                self._loop.call_soon_threadsafe(self._changed.set)

    def reload(self) -> None:
        """Load the policy again, beside the one that is served; connections from then on get the new one. A policy that
        cannot be loaded changes nothing. Returns at once; safe from any thread and from a signal handler.
        """
        threading.Thread(target=self._load_beside, name="vla-reload", daemon=True).start()

    def _load_beside(self) -> None:
        if self._policy is None or not self._reloading.acquire(blocking=False):
            log.warning("a policy is being loaded already")
            return
        try:
            self._on_worker(load_warm(self._load, self._sizes))
        except Exception as e:  # whatever is wrong with the new one, the old one is served on
            self._kept(e)
        finally:
            self._reloading.release()

    def _kept(self, why: Exception) -> None:
        """Another policy is not gone over to."""
        self.metrics.reload("failed")
        self._events.write("reload failed", error=str(why)[:300])
        log.error("the policy could not be loaded again, the one before is served on: %s", why)

    def run(self) -> None:
        """Serve until :meth:`stop`.

        Raises:
            Exception: Whatever loading or warming up the policy raised.
        """
        try:
            asyncio.run(self._run())
        finally:
            self._mailbox.close()
            self._socket.close()
            if self._page:
                self._page.close()
            if self._worker.ident is not None:  # where it hangs inside the policy, only the end of the process ends it
                self._worker.join(timeout=1.0)
            self._events.write("stopped")
            self._events.close()
        if self._failure is not None:
            raise self._failure

    async def _run(self) -> None:
        self._loop, self._changed = asyncio.get_running_loop(), asyncio.Event()
        if self._config.metrics_port is not None:
            self._page = MetricsPage(self.metrics, lambda: True, self._config.metrics_port)
        self._worker.start()
        await self._until(lambda: self._policy is not None)
        if self._over():
            return
        async with serve(
            self._converse,
            sock=self._socket,
            ssl=self._ssl,
            compression=None,  # pictures do not get smaller, and memory of a peer's choosing does not get larger
            max_size=MAX_BYTES,
            max_queue=1,
            open_timeout=GREETING_S,
            close_timeout=1.0,
            process_request=self._admit,
            server_header=None,
        ):
            self._begin()
            await self._until(lambda: False)
            self.metrics.ready = False
            await self._drain()

    async def _until(self, happened: Callable[[], bool]) -> None:
        """Until something happened, or all is over."""
        assert self._changed is not None
        while not happened() and not self._over():
            await self._changed.wait()
            self._changed.clear()

    def _over(self) -> bool:
        return self._stop.is_set() or self._failure is not None

    def _begin(self) -> None:
        assert self._policy is not None
        spec = self._policy.spec
        self._named("ready", spec)
        self.metrics.ready = True
        if self._on_ready:
            self._on_ready(spec)

    def _named(self, event: str, spec: PolicySpec) -> None:
        self.metrics.labels = {"model_version": spec.model_version, "robot": spec.robot.name}
        self._events.write(event, model=spec.model_version, robot=spec.robot.name)

    async def _drain(self) -> None:
        """What is being computed is still sent; leaving ``serve`` then closes the connections."""
        if self._waiting and self._failure is None:
            await asyncio.wait(list(self._waiting.values()), timeout=self._config.drain_s)
        for waiting in self._waiting.values():  # whoever still waits would keep its connection open
            if not waiting.done():
                waiting.set_exception(WireError(Code.BUSY, "the server is shutting down"))

    # -- inference thread ---------------------------------------------------------------------------------------------

    def _on_worker(self, item: list[Result] | ChunkPolicy | BaseException) -> None:
        assert self._loop is not None
        with suppress(RuntimeError):  # the loop is over
            self._loop.call_soon_threadsafe(self._accept, item)

    def _accept(self, item: list[Result] | ChunkPolicy | BaseException) -> None:
        assert self._changed is not None
        if isinstance(item, list):
            self.metrics.batch(len(item))
            for result in item:
                waiting = self._waiting.pop(result.job.sid, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(result)
            return
        if isinstance(item, BaseException):
            self._failure = item
        else:
            try:
                self._dialect.conversation(item.spec)  # of nobody: whether it fits
            except UserError as e:
                if self._policy is None:
                    self._failure = e
                else:
                    self._kept(e)
            else:
                if self._policy is not None:
                    self._named("reloaded", item.spec)
                    self.metrics.reload("ok")
                self._policy = item
        self._changed.set()

    # -- a connection -------------------------------------------------------------------------------------------------

    def _admit(self, connection: ServerConnection, request: Request) -> Response | None:
        """None lets it in."""
        why = None
        if request.path == "/healthz":
            return connection.respond(http.HTTPStatus.OK, "OK\n")
        given = request.headers.get("Authorization", "")
        if "Origin" in request.headers:
            why, status = "a page in a browser", http.HTTPStatus.FORBIDDEN
        elif self._token is not None and not hmac.compare_digest(given.encode(), f"Api-Key {self._token}".encode()):
            why, status = "no or another token", http.HTTPStatus.UNAUTHORIZED
        elif self.metrics.sessions >= self._config.max_sessions:
            why, status = "too many sessions", http.HTTPStatus.SERVICE_UNAVAILABLE
        if why is None:
            return None
        log.warning("refused a connection: %s", why)
        self.metrics.reject("connection")
        self._events.write("refused connection", why=why)
        return connection.respond(status, f"{why}\n")

    async def _converse(self, connection: ServerConnection) -> None:
        policy = self._policy
        assert policy is not None  # nobody is let in before
        if self.metrics.sessions >= self._config.max_sessions:  # several were let in at once
            await connection.close(TRY_LATER, "too many sessions")
            return
        talk, session = self._dialect.conversation(policy.spec), _Session(self, policy)
        self.metrics.sessions += 1
        self._events.write("hello", session.sid, model=policy.spec.model_version)
        try:
            if (greeting := talk.greeting()) is not None:
                await connection.send(greeting)
            async for message in connection:
                session.now_ns = time.monotonic_ns()
                try:
                    answer = await talk.answer(self._message(message), session)
                except WireError as e:
                    self.metrics.reject(e.code.lower())
                    await connection.send(talk.refusal(e))
                    continue
                if answer is not None:
                    await connection.send(answer)
        except ConnectionClosed:
            pass
        finally:
            self.metrics.sessions -= 1
            self.forget(session.sid)
            self._events.write("end", session.sid)

    def _message(self, message: str | bytes) -> bytes:
        self.metrics.receive("infer")
        if isinstance(message, str):
            raise WireError(Code.BAD_SCHEMA, "a request is a binary message")
        if self._stop.is_set():
            raise WireError(Code.BUSY, "the server is shutting down")
        return message

    def forget(self, sid: str) -> None:
        """Drop what waits for a session."""
        self._mailbox.drop(sid)
        self._waiting.pop(sid, None)

    async def infer(self, sid: str, observation: Observation, policy: ChunkPolicy, received_ns: int) -> bytes:
        """Ask the inference thread."""
        queued_ns, step = time.monotonic_ns(), observation.step
        assert self._loop is not None
        waiting = self._waiting[sid] = self._loop.create_future()
        never_ns = received_ns + (1 << 60)
        self._mailbox.put(Job(b"", sid, 0, step, observation, 0, step, None, received_ns, queued_ns, never_ns, policy))
        result = await waiting
        queued = (("decode", queued_ns - received_ns), ("queue", result.begun_ns - queued_ns))
        if isinstance(result.frames, WireError):
            self.metrics.observe(*queued)
            raise result.frames
        total = time.monotonic_ns() - received_ns
        self.metrics.observe(*queued, ("infer", result.computed_ns - result.begun_ns), ("total", total))
        self._events.write("chunk", sid, rid=step, model=policy.spec.model_version, ms=round(total * 1e-6, 3))
        return bytes(result.frames[0])


class _Session:
    """A connection's :class:`Session`; each episode has a name of its own at the policy."""

    def __init__(self, server: WebsocketServer, policy: ChunkPolicy) -> None:
        self._server, self._policy = server, policy
        self.sid, self.now_ns, self._history = secrets.token_hex(16), 0, History(policy.spec.history)

    def restart(self) -> None:
        self._server.forget(self.sid)
        self.sid, self._history = secrets.token_hex(16), History(self._policy.spec.history)

    async def infer(self, observation: Observation) -> bytes:
        seen = self._history.beside(observation)
        return await self._server.infer(self.sid, seen, self._policy, self.now_ns)

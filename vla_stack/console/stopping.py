"""The e-stop's own way from pages to the robot node: a process with a port of its own where nothing else is said.

What pages do to the gateway, and what the gateway does, holds up nothing here. Any message of a page stops the robot;
it is answered when the node has confirmed it.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from aiohttp import WSMsgType, web

from vla_stack.console.access import Access, tls_context
from vla_stack.console.door import Door, opened
from vla_stack.errors import UserError
from vla_stack.runtime.link import Link
from vla_stack.runtime.operator_client import stop_robot

LINES, LINES_OF_ONE = 64, 8  # open at once, in all and of one browser
BEAT_S = 5.0
Certificate = tuple[Path | None, Path | None]  # and its key, as access.tls_context takes them


class Stopper:
    """Stops the robot on a thread of its own: one stop is under way and one waits, however many are asked for.

    Args:
        stop: Returns when the node has it; raises UserError where it does not confirm it.
    """

    def __init__(self, stop: Callable[[], None]) -> None:
        self._stop = stop
        self._thread = ThreadPoolExecutor(1, "estop")
        self._lock = threading.Lock()
        self._waiting: Future[str] | None = None  # that has not begun: it will do for all who ask until then

    async def stop(self) -> str:
        """Wait for a stop that begins now or later; why it was not confirmed, empty where it was."""
        with self._lock:
            waiting = self._waiting = self._waiting or self._thread.submit(self._run)
        return await asyncio.shield(asyncio.wrap_future(waiting))

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _run(self) -> str:
        with self._lock:
            self._waiting = None
        try:
            self._stop()
        except UserError as e:
            return str(e)
        return ""


class StopLines:
    """The web application of the e-stop's port.

    Args:
        access: Of the console: the same sessions, and its pages.
        stop: See :class:`Stopper`.
    """

    def __init__(self, access: Access, stop: Callable[[], None]) -> None:
        self.door = Door()
        self._access, self._stopper = access, Stopper(stop)
        self._open: list[str] = []  # session of each line

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard], client_max_size=0)
        app.router.add_get("/stop", self._line)
        app.on_cleanup.append(self._close)
        return app

    async def _close(self, _: web.Application) -> None:
        self._stopper.close()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self._access.check(request, acts=True, stop=True)
        self.door.welcome(request)
        response: web.StreamResponse = await handler(request)
        return response

    async def _line(self, request: web.Request) -> web.StreamResponse:
        session = self._access.session(request)
        if len(self._open) >= LINES or self._open.count(session) >= LINES_OF_ONE:
            raise web.HTTPServiceUnavailable(text="too many lines are open")
        self._open.append(session)
        try:
            socket = web.WebSocketResponse(max_msg_size=64, heartbeat=BEAT_S, compress=False, autoping=False)
            await socket.prepare(request)
            self.door.settle(request)
            async for message in socket:
                if message.type not in (WSMsgType.ERROR, WSMsgType.PONG):
                    await socket.send_json({"error": await self._stopper.stop()})
        finally:
            self._open.remove(session)
        return socket


def stop_process(
    connection: Connection,
    access: Access,
    host: str,
    certificate: Certificate | None,
    endpoint: str,
) -> None:
    """Main function: says ``listening`` or ``failed`` over the pipe, then serves until the other end closes.

    Args:
        connection: To the console's process.
        access: Of the console.
        host: To listen at, on the port after the console's.
        certificate: None without TLS.
        endpoint: Of the node's operator channels.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C reaches the console, which closes the pipe
    link = Link(connection)
    tls = tls_context(host, *certificate)[0] if certificate else None

    async def serve() -> None:
        lines = StopLines(access, partial(stop_robot, endpoint))
        over = asyncio.Event()
        asyncio.get_running_loop().add_reader(link.fileno(), over.set)
        async with opened(lines.app(), lines.door, host, access.port + 1, tls):
            link.send("listening")
            await over.wait()

    try:
        asyncio.run(serve())
    except OSError as e:
        with suppress(EOFError):
            link.send("failed", error=f"{host}:{access.port + 1}, for the e-stop, cannot be opened: {e.strerror}")
    except EOFError:
        pass

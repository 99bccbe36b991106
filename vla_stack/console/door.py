"""Lets connections in to an aiohttp application, so that those that show no session hold up nobody.

A connection is a *stranger* until a request on it has shown a session. Strangers are few: where a newcomer finds no
place, the one that has been there longest makes room, and each has :data:`STRANGER_S`. In a turn of the event loop one
is accepted and one is let in, so that pages wait for no more; who has said nothing yet is no more than a socket.
Requests of strangers are answered and end the connection (that is the application's part). Connections that have shown
a session and are no page are limited, too; the one that has been quiet longest goes.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
import ssl
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from vla_stack.serving.rates import Allowance

STRANGERS, KNOWN = 64, 128
STRANGER_S = 5.0
BYTES_HZ = 64e3  # of one connection, and at once: ten times what our page says
BACKLOG = 512
REQUEST_HZ, REQUEST_BURST = 20.0, 100.0  # what one browser may ask for
PAGE_HZ, PAGE_BURST = 2.0, 12.0  # pages that it may open
SESSIONS = 256
HEADERS = 48  # of a request, of at most 8 KiB each: what a stranger can make the process hold


_log = logging.getLogger(__name__)
_log.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError)))


class Metered(asyncio.Protocol):
    """Passes what a connection says on to another protocol, and ends it where that is more than any page says.

    Before anything parses it: a frame may be two bytes long, and a parser does not count them.
    """

    def __init__(self, inner: asyncio.Protocol) -> None:
        self._inner, self._allowance = inner, Allowance(BYTES_HZ)
        self._transport: asyncio.Transport | None = None
        self.connection_lost, self.eof_received = inner.connection_lost, inner.eof_received  # type: ignore[method-assign]
        self.pause_writing, self.resume_writing = inner.pause_writing, inner.resume_writing  # type: ignore[method-assign]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._allowance.admit(time.monotonic_ns(), len(data)):
            self._inner.data_received(data)
        elif self._transport is not None:
            self._transport.abort()


class _Guest:
    """A connection that has not shown a session."""

    def __init__(self, stream: socket.socket) -> None:
        self.stream = stream
        self.due: asyncio.TimerHandle | None = None
        self.task: asyncio.Task[None] | None = None  # once it has said something
        self.transport: asyncio.BaseTransport | None = None

    def has_left(self) -> bool:
        """Whether what can be read of it is its end."""
        try:
            return not self.stream.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def drop(self) -> None:
        if self.due is not None:
            self.due.cancel()
        if isinstance(self.transport, asyncio.WriteTransport):
            self.transport.abort()
            return
        if self.task is not None:
            self.task.cancel()  # before its turn, or during the handshake of TLS
        else:
            asyncio.get_running_loop().remove_reader(self.stream)
        self.stream.close()


class Door:
    """One per application."""

    def __init__(self) -> None:
        self._strangers: dict[int, _Guest] = {}  # by the connection's file handle
        self._known: dict[int, asyncio.Transport] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._listening: list[socket.socket] = []
        self._turn = asyncio.Lock()  # of who is let in

    async def open(self, server: Any, host: str, port: int, tls: ssl.SSLContext | None = None) -> None:
        """Listen; ``server`` makes a protocol for each connection.

        Raises:
            OSError: The port is taken, or the host is not this machine.
        """
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, address in dict.fromkeys((entry[0], entry[4]) for entry in found):
            try:
                listening = socket.create_server(address[:2], family=family, backlog=BACKLOG)
            except OSError:
                if (family, address) == (found[-1][0], found[-1][4]) and not self._listening:
                    raise
                continue  # e.g. localhost's IPv6 address where there is no IPv6
            listening.setblocking(False)
            self._listening.append(listening)
            self._begin(self._accept(server, listening, tls))

    def welcome(self, request: web.Request) -> None:
        """The connection of this request has shown a session."""
        if isinstance(request.transport, asyncio.Transport) and (handle := _handle(request.transport)) >= 0:
            self._strangers.pop(handle, None)
            self._known.pop(handle, None)
            self._known[handle] = request.transport
            for old, transport in list(self._known.items()):
                if transport.is_closing():
                    del self._known[old]
            if len(self._known) > KNOWN:
                self._known.pop(next(iter(self._known))).abort()

    def settle(self, request: web.Request) -> None:
        """It is somebody's for good, who limits the number of such."""
        if request.transport is not None:
            self._known.pop(_handle(request.transport), None)

    async def close(self) -> None:
        """Accept nobody any more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for listening in self._listening:
            listening.close()
        for guest in self._strangers.values():
            if guest.transport is None:  # the others are the application's
                guest.drop()

    def _begin(self, coroutine: Any) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept(self, server: Any, listening: socket.socket, tls: ssl.SSLContext | None) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(0)  # sock_accept does not wait where somebody is there already
            try:
                stream, _ = await loop.sock_accept(listening)
            except OSError:  # no file handle is left: a stranger's will do
                self._make_room(0)
                await asyncio.sleep(0.01)
                continue
            guest, handle = _Guest(stream), stream.fileno()
            self._strangers[handle] = guest
            guest.due = loop.call_later(STRANGER_S, self._expire, handle, guest)
            loop.add_reader(stream, self._hear, handle, guest, server, tls)
            self._make_room(STRANGERS)

    def _hear(self, handle: int, guest: _Guest, server: Any, tls: ssl.SSLContext | None) -> None:
        """A guest has said its first bytes, or has left."""
        if guest.has_left():
            self._expire(handle, guest)
            return
        asyncio.get_running_loop().remove_reader(guest.stream)
        guest.task = self._begin(self._let_in(guest, server, tls))

    async def _let_in(self, guest: _Guest, server: Any, tls: ssl.SSLContext | None) -> None:
        async with self._turn:
            await asyncio.sleep(0)
        with contextlib.suppress(OSError):  # of a peer that does not speak TLS, or has left
            loop = asyncio.get_running_loop()
            guest.transport, _ = await loop.connect_accepted_socket(lambda: Metered(server()), guest.stream, ssl=tls)

    def _make_room(self, most: int) -> None:
        if len(self._strangers) > most:
            gone = [h for h, g in self._strangers.items() if g.transport is not None and g.transport.is_closing()]
            for handle in gone or [next(iter(self._strangers))]:
                self._strangers.pop(handle).drop()

    def _expire(self, handle: int, guest: _Guest) -> None:
        if self._strangers.get(handle) is guest:
            self._strangers.pop(handle).drop()


def _handle(transport: asyncio.BaseTransport) -> int:
    stream = transport.get_extra_info("socket")
    return -1 if stream is None else int(stream.fileno())


class Visitors:
    """How often each browser may ask; of those that were heard last."""

    def __init__(self) -> None:
        self._allowances: OrderedDict[str, tuple[Allowance, Allowance]] = OrderedDict()

    def admit(self, session: str, page: bool, now_ns: int) -> bool:
        """Whether it may open another ``page``, or ask for something else, at ``now_ns``."""
        if session not in self._allowances:
            self._allowances[session] = Allowance(REQUEST_HZ, REQUEST_BURST), Allowance(PAGE_HZ, PAGE_BURST)
        self._allowances.move_to_end(session)
        if len(self._allowances) > SESSIONS:
            self._allowances.popitem(last=False)
        return self._allowances[session][page].admit(now_ns)


@contextlib.asynccontextmanager
async def opened(
    app: web.Application, door: Door, host: str, port: int, tls: ssl.SSLContext | None = None
) -> AsyncIterator[None]:
    """The application behind its door, for as long as the block lasts.

    Raises:
        OSError: The port is taken, or the host is not this machine.
    """
    runner = web.AppRunner(
        app, logger=_log, access_log=None, max_headers=HEADERS, lingering_time=0.0, shutdown_timeout=1.0
    )
    await runner.setup()
    try:
        await door.open(runner.server, host, port, tls)
        gc.freeze()  # what start-up left stays: searching it for garbage took 50 ms, in which no page had an answer
        yield
    finally:
        gc.unfreeze()
        await door.close()
        await runner.cleanup()

"""Pages of the console by raw sockets: what an honest one says, and what hostile ones do. For ``attacks.py`` and
``console_flood.py``: only to 127.0.0.1, only for a while.

Each family is a function of a way to connect and a time at which it ends; it returns how many connections it made. Who
has a session opens pages; who has none sends requests instead.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from vla_stack.console.access import Access

TEXT, BINARY, CLOSE, PING, PONG, FIN = 1, 2, 8, 9, 10, 128
IDLE, PAGES, SLOW = 2000, 8, 20
PIECE = bytes(100 << 10)
COMMAND = json.dumps({"type": "event", "id": 1, "name": "start", "args": {}}).encode()


def session(access: Access) -> str:
    """A new session, as opening an address gives it."""
    made = access.redeem(access.invite().partition("token=")[2])
    assert made is not None
    return made


class Page:
    """A connection to a console; a page's WebSocket where there is a session.

    Args:
        access: Of the console.
        cookie: A session; without one nothing is said at first.
        path: ``/ws``, or ``/stop`` of the e-stop's port.
        buffer: Bytes that this end takes before it reads; the system's default by 0.

    Attributes:
        taken: Bytes of :meth:`push` that the other end's computer has taken, whether or not anybody read them.
    """

    def __init__(self, access: Access, cookie: str, path: str = "/ws", buffer: int = 0) -> None:
        self.port = access.port + (path == "/stop")
        self.socket = socket.socket()
        if buffer:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        self.socket.settimeout(20.0)
        self.socket.connect(("127.0.0.1", self.port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._data, self._rest, self.taken = b"", b"", 0
        self.page = bool(cookie)
        if self.page:
            self.socket.sendall(
                f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\nOrigin: {access.base}\r\n"
                f"Cookie: {access.cookie}={cookie}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n".encode()
            )
            self._wait_for(b"\r\n\r\n")

    # -- what is said ---------------------------------------------------------------------------------------------

    @property
    def message(self) -> bytes:
        """A command of who has no control; without a session a request."""
        return frame(COMMAND) if self.page else f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\n\r\n".encode()

    def send(self, **message: Any) -> None:
        self.socket.sendall(frame(json.dumps(message).encode()))

    def push(self, data: bytes) -> None:
        """Send what the other end takes at once of ``data``, and more of it once that has been taken as a whole.

        Raises:
            OSError: The connection has ended.
        """
        self.socket.setblocking(False)
        with suppress(BlockingIOError):
            self._rest = self._rest or data
            while self._rest:
                n = self.socket.send(self._rest)
                self._rest, self.taken = self._rest[n:], self.taken + n

    # -- what is heard --------------------------------------------------------------------------------------------

    def messages(self) -> Iterator[dict[str, Any]]:
        """What comes, acknowledged as it is yielded: JSON, and the headers of pictures.

        Raises:
            ConnectionError: It has ended.
        """
        while True:
            kind, size, start = self._head()
            self._fill(start + size)
            body, self._data = self._data[start : start + size], self._data[start + size :]
            if kind == PING:
                self.socket.sendall(frame(body, PONG))
            elif kind == CLOSE:
                raise ConnectionError(body[2:].decode())
            else:
                message = json.loads(body if kind == TEXT else body[2 : 2 + int.from_bytes(body[:2], "big")])
                if kind == BINARY or message.get("type") == "state":
                    self.send(type="seen", n=message["n"])
                yield message

    def wait_for(self, wanted: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        """The first message that is wanted."""
        return next(message for message in self.messages() if wanted(message))

    def round_trip(self) -> None:
        """Ask, and wait for the answer."""
        stamp = time.monotonic()
        self.send(type="ping", t=stamp)
        self.wait_for(lambda m: m.get("type") == "pong" and m["t"] == stamp)

    def close(self) -> None:
        self.socket.close()

    def _head(self) -> tuple[int, int, int]:
        self._fill(2)
        size, start = self._data[1], 2
        if size >= 126:
            start = 4 if size == 126 else 10
            self._fill(start)
            size = int.from_bytes(self._data[2:start], "big")
        return self._data[0] & 15, size, start

    def _fill(self, size: int) -> None:
        while len(self._data) < size:
            part = self.socket.recv(1 << 16)
            if not part:
                raise ConnectionError("closed")
            self._data += part

    def _wait_for(self, end: bytes) -> None:
        while end not in self._data:
            self._fill(len(self._data) + 1)
        head, _, self._data = self._data.partition(end)
        if b" 101 " not in head[:20]:
            raise ConnectionError(head[:40].decode(errors="replace"))


def frame(body: bytes, kind: int = TEXT, fin: bool = True, says: int | None = None) -> bytes:
    """A frame of a client, masked with zeros; ``says``: another length than it has."""
    size = len(body) if says is None else says
    if size < 126:
        length = bytes([128 | size])
    else:
        length = b"\xfe" + struct.pack(">H", size) if size < 1 << 16 else b"\xff" + struct.pack(">Q", size)
    return bytes([FIN * fin | kind]) + length + bytes(4) + body


Connect = Callable[..., Page]


def one_floods(connect: Connect, end: float) -> int:
    """A page says commands as fast as they are taken; again where it is closed."""
    return flood(connect, end, 1)[0]


def many_flood(connect: Connect, end: float) -> int:
    """The same by eight browsers."""
    return flood(connect, end, PAGES)[0]


def flood(connect: Connect, end: float, number: int) -> tuple[int, int]:
    """Connections made, and commands that were taken, whether or not anybody read them."""
    pages: dict[int, Page] = {}
    again = dict.fromkeys(range(number), 0.0)
    opened: list[Page] = []
    while time.monotonic() < end:
        for n in range(number):
            try:
                if n not in pages and time.monotonic() > again[n]:
                    again[n] = time.monotonic() + 0.05
                    pages[n] = connect(n)
                    opened.append(pages[n])
                if n in pages:
                    pages[n].push(2000 * pages[n].message)
            except OSError:
                if n in pages:
                    pages.pop(n).close()
        time.sleep(0.001)
    for page in pages.values():
        page.close()
    return len(opened), sum(page.taken // len(page.message) for page in opened)


def slow(connect: Connect, end: float) -> int:
    """Pages that ask and read nothing; strangers that ask and read no answer."""
    pages: list[Page] = []
    made = 0
    while time.monotonic() < end:
        try:
            if len(pages) < SLOW:
                pages.append(connect(len(pages) % 4, buffer=4096))
                made += 1
        except OSError:
            time.sleep(0.05)
        for page in list(pages):
            try:
                page.push(page.message if not page.page else frame(b'{"type": "ping", "t": 1}'))
            except OSError:
                pages.remove(page)
        time.sleep(0.01)
    for page in pages:
        page.close()
    return made


def idle(connect: Connect, end: float) -> int:
    """Connections that say nothing, as many as are let in, and again."""
    made = 0
    port = connect(None).port
    while time.monotonic() < end:
        ours: list[socket.socket] = []
        while len(ours) < IDLE and time.monotonic() < end:
            try:
                ours.append(socket.create_connection(("127.0.0.1", port), 1.0))
                made += 1
            except OSError:
                break
        time.sleep(min(1.0, max(0.0, end - time.monotonic())))
        for stream in ours:
            stream.close()
    return made


def unfinished(connect: Connect, end: float) -> int:
    """Messages of many pieces whose last one never comes; without a session a request's head without end."""
    return _press(
        connect, end, lambda page: frame(PIECE[:1000], fin=False) if page.page else b"GET / HTTP/1.1\r\nA: b\r\n"
    )


def oversized(connect: Connect, end: float) -> int:
    """A message that says it has a terabyte, and begins to come; without a session a body of that size."""
    length = f"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {1 << 40}\r\n\r\n".encode()
    return _press(connect, end, lambda page: frame(PIECE, says=1 << 40) if page.page else length + PIECE)


def _press(connect: Connect, end: float, begin: Callable[[Page], bytes]) -> int:
    made = 0
    while time.monotonic() < end:
        pages: list[Page] = []
        with suppress(OSError):
            for n in range(4):
                pages.append(connect(n))
        made += len(pages)
        until = min(end, time.monotonic() + 2.0)
        first = {page: begin(page) for page in pages}
        while time.monotonic() < until:
            for page in list(pages):
                try:
                    page.push(first.pop(page, PIECE if page.page else b"A: b\r\n" * 1000))
                except OSError:
                    pages.remove(page)
            time.sleep(0.005)
        for page in pages:
            page.close()
    return made


FAMILIES = {
    "flood of one page": one_floods,
    "flood of 8 pages": many_flood,
    "slow readers": slow,
    "2000 idle connections": idle,
    "unfinished message": unfinished,
    "oversized message": oversized,
}


def attack(family: str, access: Access, sessions: bool, end: float) -> int:
    """Main function of an attackers' process."""
    cookies = [session(access) for _ in range(PAGES)] if sessions else [""] * PAGES

    def connect(number: int | None, buffer: int = 0) -> Page:
        return Page(access, "" if number is None else cookies[number], buffer=buffer)

    return FAMILIES[family](connect, end)

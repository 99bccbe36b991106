"""What hostile peers do, by raw sockets, for ``attacks.py`` and for the tests: only to 127.0.0.1, only for a while.

Each family is a function of a way to connect and a time at which it ends; it returns how many connections it made.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import msgpack

from vla_stack.serving.curve import CurveClient, CurveKeys
from vla_stack.serving.zmtp import COMMAND, GREETING_BYTES, LARGE, MORE, Mechanism, Null, command, greeting, head

PING = msgpack.packb({"v": 2, "type": "PING", "sid": "", "epoch": 0, "rid": -1, "t0": 1})
ZMTP_PING = b"\x04PING" + struct.pack(">H", 0) + b"x"
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: the connection ends with a reset
CONNECTIONS, IDLE = 20, 2000
PIECE = bytes(100 << 10)


class Peer:
    """A raw connection to a port of this machine after its handshake.

    Args:
        port: Of 127.0.0.1.
        keys: Of a CURVE connection; None for NULL.
        kind: Socket type that it claims to be.
    """

    def __init__(self, port: int, keys: CurveKeys | None = None, kind: bytes = b"DEALER") -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), 3.0)
        self.mechanism: Mechanism = CurveClient(keys) if keys else Null()
        self._rest = b""
        self.socket.sendall(greeting(self.mechanism))
        self._exactly(GREETING_BYTES)
        for body in self.mechanism.begin(kind):
            self.socket.sendall(command(body))
        while not self.mechanism.ready:
            flags, size = self._exactly(2)
            if flags & LARGE:
                (size,) = struct.unpack(">Q", bytes([size]) + self._exactly(7))
            for answer in self.mechanism.handshake(self._exactly(size)):
                self.socket.sendall(command(answer))

    def frame(self, payload: bytes, flags: int = 0) -> bytes:
        """A frame as it travels."""
        flags, body = self.mechanism.seal(flags, payload)
        return b"".join((head(flags, sum(map(len, body))), *body))

    def push(self, data: Callable[[], bytes]) -> None:
        """Send what the other end takes at once, and more of it once that has been taken as a whole."""
        self.socket.setblocking(False)
        with suppress(OSError):
            self._rest = self._rest or data()
            while self._rest:
                self._rest = self._rest[self.socket.send(self._rest) :]

    def reset(self) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self.socket.close()

    def _exactly(self, n: int) -> bytes:
        data = b""
        while len(data) < n:
            part = self.socket.recv(n - len(data))
            if not part:
                raise ConnectionError("closed")
            data += part
        return data


Connect = Callable[[], Peer]


def peers(connect: Connect, n: int) -> list[Peer]:
    """At most ``n`` connections: as many as are let in."""
    found = []
    for _ in range(n):
        try:
            found.append(connect())
        except Exception:  # whatever a refusal looks like from here
            break
    return found


def flood_reset(connect: Connect, end: float) -> int:
    """Many small messages, then the connection is reset while the receiver's queue is full."""
    return _blast(connect, end, lambda peer: b"".join(peer.frame(PING) for _ in range(2000)))


def embedded_ping(connect: Connect, end: float) -> int:
    """The same with ZMTP heartbeats among the messages."""

    def data(peer: Peer) -> bytes:
        return b"".join(peer.frame(ZMTP_PING, COMMAND) if i % 13 == 12 else peer.frame(b"hello") for i in range(1300))

    return _blast(connect, end, data)


def _blast(connect: Connect, end: float, data: Callable[[Peer], bytes]) -> int:
    made = 0
    while time.monotonic() < end:
        ours = peers(connect, CONNECTIONS)
        made += len(ours)
        for peer in ours:
            peer.push(partial(data, peer))
        time.sleep(0.05)
        for peer in ours:
            peer.reset()
    return made


def unfinished(connect: Connect, end: float) -> int:
    """Messages whose last frame never comes."""
    made = 0
    while time.monotonic() < end:
        ours = peers(connect, 4)
        made += len(ours)
        until = min(end, time.monotonic() + 2.0)
        while time.monotonic() < until:
            for peer in ours:
                peer.push(partial(peer.frame, PIECE, MORE))
            time.sleep(0.005)
        for peer in ours:
            peer.reset()
    return made


def idle(connect: Connect, end: float) -> int:
    """Connections that say nothing; as many as are let in, half of them before the handshake, and again."""
    ours: list[Peer | socket.socket] = []
    probe = peers(connect, 1)
    address = probe[0].socket.getpeername() if probe else None
    made = 0
    while time.monotonic() < end:
        while len(ours) < IDLE and time.monotonic() < end:
            if address and len(ours) % 2:
                with suppress(OSError):
                    ours.append(socket.create_connection(address, 1.0))
            elif found := peers(connect, 1):
                ours += found
            else:
                break
            made += 1
        time.sleep(min(1.0, max(0.0, end - time.monotonic())))
        for peer in ours:
            (peer.socket if isinstance(peer, Peer) else peer).close()
        ours.clear()
    return made


def slow_readers(connect: Connect, end: float) -> int:
    """Peers that ask, ask, and read no answer."""
    ours = peers(connect, CONNECTIONS)
    for peer in ours:
        peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    while time.monotonic() < end:
        for peer in ours:
            peer.push(partial(peer.frame, PING))
        time.sleep(0.02)
    for peer in ours:
        peer.socket.close()
    return len(ours)


FAMILIES = {
    "flood and reset": flood_reset,
    "embedded ping": embedded_ping,
    "unfinished message": unfinished,
    "2000 idle connections": idle,
    "slow readers": slow_readers,
}


def rogue_server(listening: socket.socket, end: float) -> int:
    """A server that floods whoever connects, and resets."""
    made = 0
    while time.monotonic() < end:
        listening.settimeout(max(0.01, end - time.monotonic()))
        with suppress(OSError, ConnectionError):
            stream, _ = listening.accept()
            made += 1
            stream.settimeout(2.0)
            stream.sendall(greeting(Null()) + command(Null().begin(b"ROUTER")[0]))
            stream.recv(4096)
            stream.setblocking(False)
            data = (head(0, 4) + b"\x81\xa1v\x02") * 3000 + head(COMMAND, len(ZMTP_PING)) + ZMTP_PING
            with suppress(BlockingIOError):
                for _ in range(20):
                    stream.send(data)
            time.sleep(0.02)
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            stream.close()
    return made

"""ZMTP 3.0, the protocol of ZeroMQ's connections (https://rfc.zeromq.org/spec/23/), spoken by ourselves.

libzmq 4.3.5 ends its whole process where a peer floods it and resets the connection (``Assertion failed: !_io_error``,
stream_engine_base.cpp), and none of its settings bounds an unfinished message. So the sockets that others can reach are
this project's own; stock ZeroMQ peers talk to them as before.

A connection is a greeting, a handshake of commands, then frames::

    greeting  ff 00×8 7f | 3 0 | mechanism, 20 bytes | as-server | 00×31
    frame     flags: 1 more, 2 size has eight bytes, 4 command | size, 1 or 8 bytes | body
"""

from __future__ import annotations

import struct
from typing import Protocol

GREETING_BYTES = 64
SIGNATURE = b"\xff" + b"\0" * 8 + b"\x7f"
MORE, LARGE, COMMAND = 1, 2, 4
MAX_COMMAND_BYTES = 1024  # of a handshake: the longest, INITIATE, has 257 and a few words
READY = b"\x05READY"
PING, PONG = b"\x04PING", b"\x04PONG"


class ProtocolError(Exception):
    """What came is not ZMTP, or more than was agreed: the connection ends."""


class Refusal(ProtocolError):
    """A peer is not let in, or does not let us in. ``farewell`` is the command that tells it so."""

    def __init__(self, why: str, farewell: bytes = b"") -> None:
        super().__init__(why)
        self.farewell = farewell


class Mechanism(Protocol):
    """How two peers agree to talk: NULL here, CURVE in ``curve.py``."""

    name: bytes
    overhead: int  # bytes by which a sealed frame is longer
    ready: bool
    key: str  # who the peer is, Z85 text; empty where nobody asks

    @property
    def as_server(self) -> bool: ...
    def begin(self, kind: bytes) -> list[bytes]: ...
    def handshake(self, command: bytes) -> list[bytes]: ...
    def seal(self, flags: int, payload: bytes | memoryview) -> tuple[int, list[bytes | memoryview]]: ...
    def open(self, flags: int, frame: bytes | memoryview) -> tuple[int, bytes | memoryview]: ...


class Null:
    """No keys: for peers on this machine."""

    name, overhead, as_server, key = b"NULL", 0, False, ""

    def __init__(self) -> None:
        self.ready = False

    def begin(self, kind: bytes) -> list[bytes]:
        return [READY + metadata(kind)]

    def handshake(self, command: bytes) -> list[bytes]:
        if not command.startswith(READY):
            raise ProtocolError("not a NULL handshake")
        self.ready = True
        return []

    def seal(self, flags: int, payload: bytes | memoryview) -> tuple[int, list[bytes | memoryview]]:
        return flags, [payload]

    def open(self, flags: int, frame: bytes | memoryview) -> tuple[int, bytes | memoryview]:
        return flags, frame


def greeting(mechanism: Mechanism) -> bytes:
    """The first 64 bytes of either end."""
    return SIGNATURE + b"\x03\x00" + mechanism.name.ljust(20, b"\0") + bytes([mechanism.as_server]) + bytes(31)


def check_greeting(data: bytes, mechanism: Mechanism) -> None:
    """Raise ProtocolError where ``data`` is no greeting, Refusal where the peer wants other keys than we do."""
    if data[:1] != b"\xff" or data[9:10] != b"\x7f" or data[10] < 3:
        raise ProtocolError("not ZMTP 3")
    theirs = data[12:32].rstrip(b"\0")
    if theirs != mechanism.name:
        names = {b"NULL": "without keys", b"CURVE": "with keys (CURVE)"}
        raise Refusal(f"the other end speaks {names.get(theirs, 'in another way')}, this one {names[mechanism.name]}")


def metadata(kind: bytes, **others: bytes) -> bytes:
    """What a READY or INITIATE says of its sender; names of ``others`` are those of this project, ``X-``."""
    said = {"Socket-Type": kind} | {f"X-{name.capitalize()}": value for name, value in others.items()}
    parts = (
        struct.pack(">B", len(n)) + n.encode() + struct.pack(">I", len(value)) + value for n, value in said.items()
    )
    return b"".join(parts)


def properties(said: bytes) -> dict[str, bytes]:
    """Inverse of :func:`metadata`, by names as they are sent.

    Raises:
        ProtocolError: It is none.
    """
    found, at = {}, 0
    while at < len(said):
        value = at + 1 + said[at] + 4
        end = value + int.from_bytes(said[value - 4 : value], "big")
        if end > len(said):
            raise ProtocolError("malformed metadata")
        found[said[at + 1 : value - 4].decode("latin-1")], at = said[value:end], end
    return found


def head(flags: int, size: int) -> bytes:
    """What stands before a frame's body."""
    return bytes((flags, size)) if size < 256 else struct.pack(">BQ", flags | LARGE, size)


def command(body: bytes) -> bytes:
    """A command that is not encrypted, as those of handshakes are."""
    return head(COMMAND, len(body)) + body

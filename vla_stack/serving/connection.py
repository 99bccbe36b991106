"""One connection to a peer that may be hostile: messages in and out, never more memory than was granted.

Nothing here waits, and nothing that a peer sends or does can do more than end its own connection.
"""

from __future__ import annotations

import socket
import struct
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from vla_stack.serving.rates import Allowance
from vla_stack.serving.wire import MAX_TENSORS
from vla_stack.serving.zmtp import (
    COMMAND,
    GREETING_BYTES,
    LARGE,
    MAX_COMMAND_BYTES,
    MORE,
    PING,
    PONG,
    Mechanism,
    ProtocolError,
    Refusal,
    check_greeting,
    command,
    greeting,
    head,
)

READ_BYTES = 64 << 10  # taken from a connection at once
LARGE_BYTES = 16 << 10  # a longer frame is received where it stays
MAX_FRAMES = 2 * (MAX_TENSORS + 1)  # of a message; wire.py wants half of it
QUEUED_MESSAGES = 8  # to a peer: a burst of reset, request and ping; older data is of no use to a robot
STALLED_NS = 5_000_000_000  # that a peer may read nothing of what waits for it
KEEPALIVE = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 4000}

CLOSED = "the other end closed the connection"
Frames = list[memoryview]


def plainly(e: OSError) -> str:
    """What went wrong with a connection, for people."""
    if isinstance(e, FileNotFoundError | ConnectionRefusedError):
        return "nobody listens there"
    return e.strerror or str(e)


class Connection:
    """A peer's end of a stream socket, which is this object's own from now on.

    Args:
        stream: Connected, or about to be.
        mechanism: Keys, or none.
        kind: What our greeting says that we are: ``DEALER`` or ``ROUTER``.
        max_bytes: Of a message as a whole. A frame that would exceed it ends the connection before memory is taken.
        allowance: Messages that may come; what exceeds it stays with the sender.

    Attributes:
        heard_ns: Monotonic time of the last message, or of the beginning.
        spoken: Whether there has been a message.
        address: Of the peer, empty on this machine's own sockets.
    """

    def __init__(
        self, stream: socket.socket, mechanism: Mechanism, kind: bytes, max_bytes: int, allowance: Allowance
    ) -> None:
        stream.setblocking(False)
        if stream.family == socket.AF_INET:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # the kernel's heartbeats need no thread
            for name, value in KEEPALIVE.items():
                if hasattr(socket, name):
                    stream.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._stream, self._mechanism, self._kind = stream, mechanism, kind
        self.max_bytes, self.allowance = max_bytes, allowance
        self.heard_ns, self.spoken = time.monotonic_ns(), False
        self.address = ""
        self._greeted = False
        self._data, self._at = b"", 0  # received and not looked at from ``_at`` on
        self._flags, self._large, self._filled = 0, memoryview(b""), 0  # a large frame that is being received
        self._parts: Frames = []  # of a message that is being received
        self._held = 0  # its bytes
        self._out: deque[list[memoryview]] = deque()  # buffers of messages that wait for the peer
        self._out_ns = 0  # when it last took some
        self._begun = False  # whether it has taken a part of the first one
        self._trouble = ""  # at sending
        self._put([greeting(mechanism)])

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def ready(self) -> bool:
        """Whether both ends are done with the handshake."""
        return self._mechanism.ready

    @property
    def key(self) -> str:
        """Public key that the peer has proved to own; empty without keys, and before."""
        return self._mechanism.key

    @property
    def unread(self) -> bool:
        """Whether something was read that :meth:`take` has not returned."""
        return self._at < len(self._data) or (bool(self._large) and self._filled == len(self._large))

    @property
    def waiting(self) -> bool:
        """Whether something waits until the peer reads."""
        return bool(self._out)

    def stalled(self, now_ns: int) -> bool:
        """Whether the peer has read nothing for too long."""
        return bool(self._out) and now_ns - self._out_ns > STALLED_NS

    def close(self) -> None:
        with suppress(OSError):
            self._stream.close()

    # -- in -------------------------------------------------------------------------------------------------------

    def read(self) -> None:
        """Take what has come, at most :data:`READ_BYTES` or the rest of a large frame.

        Raises:
            ConnectionError: The peer has left.
        """
        try:
            if self._large and self._filled == len(self._large):
                return
            if self._large:
                n = self._stream.recv_into(self._large[self._filled :])
                self._filled += n
            else:
                data = self._stream.recv(READ_BYTES)
                n = len(data)
                self._data, self._at = (self._data[self._at :] + data if self._at < len(self._data) else data), 0
        except BlockingIOError:
            return
        except OSError as e:
            raise ConnectionError(plainly(e)) from None
        if not n:
            raise ConnectionError(self._trouble or CLOSED)

    def check(self) -> None:
        """Notice a reset while there is more to take than may come; reading would tell only after all of that.

        Raises:
            ConnectionError: The peer has left.
        """
        if self._trouble or self._stream.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise ConnectionError(self._trouble or CLOSED)

    def take(self, now_ns: int) -> Frames | None:
        """The next message of what was read; None where there is none, or the peer has used up its allowance.

        Raises:
            ProtocolError: What came is not ZMTP, or more than was granted.
        """
        while self._parts or not self.ready or self.allowance.has(now_ns):
            if (frame := self._frame()) is None:
                return None
            if not self.ready:
                self._shake_hands(*frame)
                continue
            flags, payload = self._mechanism.open(*frame)
            if flags & COMMAND:
                self.allowance.spend()
                if payload[:5] == PING and len(payload) <= 32:
                    self._put_frame(COMMAND, PONG + bytes(payload[7:]))
                continue
            self._parts.append(memoryview(payload))
            self._held += len(payload)
            if not flags & MORE:
                parts, self._parts, self._held = self._parts, [], 0
                self.allowance.spend()
                self.heard_ns, self.spoken = now_ns, True
                return parts
            if len(self._parts) == MAX_FRAMES:
                raise ProtocolError(f"a message of more than {MAX_FRAMES} frames")
        return None

    def _frame(self) -> tuple[int, memoryview] | None:
        if not self._greeted and not self._read_greeting():
            return None
        if self._large:
            if self._filled < len(self._large):
                return None
            frame, self._large = self._large, memoryview(b"")
            return self._flags, frame
        data, at, left = self._data, self._at, len(self._data) - self._at
        if left < 2:
            return None
        flags, start = data[at], at + 2
        if flags & ~(MORE | LARGE | COMMAND) or (flags & COMMAND and flags & MORE):
            raise ProtocolError("unknown flags of a frame")
        size = data[at + 1]
        if flags & LARGE:
            if left < 9:
                return None
            (size,), start = struct.unpack_from(">Q", data, at + 1), at + 9
        self._grant(size)
        flags &= ~LARGE
        if start + size <= len(data):
            self._at = start + size
            return flags, memoryview(data)[start : self._at]
        if size > LARGE_BYTES:
            self._flags, self._large = flags, memoryview(np.empty(size, np.uint8))  # memory is taken as it is filled
            self._filled = len(data) - start
            self._large[: self._filled] = memoryview(data)[start:]
            self._data, self._at = b"", 0
        return None

    def _grant(self, size: int) -> None:
        limit = self.max_bytes + self._mechanism.overhead - self._held if self.ready else MAX_COMMAND_BYTES
        if size > limit:
            raise ProtocolError(f"a message of more than {self.max_bytes if self.ready else limit} bytes")

    def _read_greeting(self) -> bool:
        if len(self._data) - self._at < GREETING_BYTES:
            return False
        self._at += GREETING_BYTES
        check_greeting(self._data[self._at - GREETING_BYTES : self._at], self._mechanism)
        self._greeted = True
        for body in self._mechanism.begin(self._kind):
            self._put([command(body)])
        return True

    def _shake_hands(self, flags: int, body: memoryview) -> None:
        if not flags & COMMAND:
            raise ProtocolError("a message before the handshake")
        try:
            for answer in self._mechanism.handshake(bytes(body)):
                self._put([command(answer)])
        except Refusal as e:
            if e.farewell:
                self._put([command(e.farewell)])
            raise

    # -- out ------------------------------------------------------------------------------------------------------

    def send(self, frames: Sequence[bytes | memoryview], newest: bool = False) -> bool:
        """Send, or queue what the peer does not take at once; False where too much is queued. Large frames are not
        copied: they must not change until they are sent.

        Args:
            frames: Of one message.
            newest: What is queued and not begun is worth nothing beside this: forget it.
        """
        if newest:
            while len(self._out) > self._begun:
                self._out.pop()
        if not self.ready or len(self._out) >= QUEUED_MESSAGES:
            return False
        buffers: list[bytes | memoryview] = []
        for i, frame in enumerate(frames):
            flags, body = self._mechanism.seal(MORE if i + 1 < len(frames) else 0, frame)
            buffers += (head(flags, sum(map(len, body))), *body)
        self._put(buffers)
        return True

    def flush(self) -> None:
        """Send what is queued, as far as the peer takes it. A connection that ended is noticed by :meth:`read`."""
        try:
            while self._out:
                buffers = self._out[0]
                sent = self._stream.sendmsg(buffers)
                self._out_ns, self._begun = time.monotonic_ns(), True
                while buffers and sent >= len(buffers[0]):
                    sent -= len(buffers.pop(0))
                if buffers:
                    buffers[0] = buffers[0][sent:]
                else:
                    self._out.popleft()
                    self._begun = False
        except BlockingIOError:
            pass
        except OSError as e:
            self._trouble = self._trouble or plainly(e)  # the first one says most

    def _put_frame(self, flags: int, body: bytes) -> None:
        if len(self._out) < 2 * QUEUED_MESSAGES:  # a peer that does not read needs no answers
            flags, sealed = self._mechanism.seal(flags, body)
            self._put([head(flags, sum(map(len, sealed))), *sealed])

    def _put(self, buffers: Sequence[bytes | memoryview]) -> None:
        if not self._out:
            self._out_ns = time.monotonic_ns()
        self._out.append([memoryview(buffer).cast("B") for buffer in buffers if len(buffer)])
        if len(self._out) == 1:
            self.flush()

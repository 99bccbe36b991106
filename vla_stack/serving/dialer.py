"""A connection to one server, made again whenever it is lost: ZeroMQ's DEALER to whoever is at the other end.

Without libzmq (``zmtp.py`` says why) and without a thread: it does something when its owner calls it.
"""

from __future__ import annotations

import ipaddress
import select
import shlex
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from vla_stack.errors import UserError
from vla_stack.serving.connection import CLOSED, Connection, Frames, plainly
from vla_stack.serving.curve import CurveClient, CurveKeys
from vla_stack.serving.endpoint import parse
from vla_stack.serving.rates import Allowance
from vla_stack.serving.zmtp import Mechanism, Null, ProtocolError, Refusal

RETRY_S, RETRY_MAX_S = 0.1, 1.0  # between two attempts to connect
HANDSHAKE_S, REACH_S = 2.0, 2.5
MESSAGES = 8  # taken at once
MAX_BYTES = 512 << 10  # of a message, where nothing else is said


class Dialer:
    """A connection to one listener, made again whenever it is lost. One thread owns it.

    Args:
        endpoint: ``tcp://HOST:PORT`` or ``ipc://PATH``.
        keys: One's own, and the server's that is believed; None on this machine.
        max_bytes: Longest message of the server.

    Attributes:
        endpoint: Of the server.
        public: One's own public key, empty without keys.
        connections: How many have been made; another number means that the server knows nothing of this end.
        trouble: Why there is none, in a few words; empty where nothing is known, or there is one.
        refused: Whether that is because one end does not let the other in.

    Raises:
        UserError: The endpoint is malformed.
    """

    def __init__(self, endpoint: str, keys: CurveKeys | None = None, max_bytes: int = MAX_BYTES) -> None:
        self.endpoint, self.public = endpoint, keys.public if keys else ""
        self._family, (self._host, self._port) = parse(endpoint)
        self._keys, self._max_bytes = keys, max_bytes
        self.connections, self.trouble, self.refused = 0, "", False
        self._connection: Connection | None = None
        self._known = False  # whether the connection that stands is counted
        self._address: tuple[str, int] | None = None
        self._begun = self._retry = 0.0
        self._wait_s = RETRY_S
        self._closed = False
        self._names: threading.Thread | None = None
        self._connect()

    @property
    def ready(self) -> bool:
        """Whether something can be sent."""
        return self._connection is not None and self._connection.ready

    @property
    def waiting(self) -> bool:
        """Whether something waits until the server reads."""
        return self._connection is not None and self._connection.waiting

    @property
    def closed(self) -> bool:
        return self._closed

    def hopeless(self, since: float) -> bool:
        """Whether whoever has waited ``since`` (monotonic seconds) for a connection has waited long enough: an end does
        not let the other in, or there has been nobody for :data:`REACH_S`."""
        return not self.ready and (self.refused or time.monotonic() - since > REACH_S)

    def fileno(self) -> int:
        """Of the connection, to be waited for beside others; -1 where there is none. It changes."""
        return self._connection.fileno() if self._connection else -1

    def send(self, frames: Sequence[bytes | memoryview], newest: bool = False) -> bool:
        """Send without waiting; False if nobody is connected or the queue is full. See :meth:`Connection.send`."""
        return self._connection is not None and self._connection.send(frames, newest)

    def flush(self, timeout_s: float = 0.0) -> None:
        """Go on sending what the connection did not take at once, for at most ``timeout_s``."""
        end = time.monotonic() + timeout_s
        while self._connection is not None and self._connection.waiting:
            self._connection.flush()
            left = end - time.monotonic()
            if left <= 0 or not self._connection.waiting:
                return
            _wait(self._connection, select.POLLOUT, left)

    def receive(self, timeout_s: float = 0.0) -> list[Frames]:
        """What has come; waits at most ``timeout_s`` for something to, or until a connection stands, which is made anew
        where that is due.
        """
        end, before = time.monotonic() + timeout_s, self.connections
        while True:
            messages = self._turn()
            left = end - time.monotonic()
            if messages or left <= 0 or self.connections != before:
                return messages
            if self._connection is None:
                time.sleep(min(left, max(0.001, self._retry - time.monotonic()), 0.02))
            else:
                _wait(
                    self._connection, select.POLLIN | self._connection.waiting * select.POLLOUT, min(left, HANDSHAKE_S)
                )

    def restart(self) -> None:
        """Give the connection up and make another one."""
        self._lose("")
        self._connect()

    def close(self, timeout_s: float = 0.0) -> None:
        """Close, after at most ``timeout_s`` for what is queued; a second call does nothing."""
        self.flush(timeout_s)
        self._lose("")
        self._closed = True

    def _connect(self) -> None:
        address: tuple[str, int] | str | None = self._host if self._family == socket.AF_UNIX else self._resolve()
        if address is None:
            return
        stream = socket.socket(self._family, socket.SOCK_STREAM)
        mechanism: Mechanism = CurveClient(self._keys) if self._keys else Null()
        stream.setblocking(False)
        self._begun = time.monotonic()
        try:
            stream.connect(address)
        except BlockingIOError:
            pass
        except OSError as e:
            stream.close()
            self._lose(plainly(e))
            return
        self._connection, self._known = Connection(stream, mechanism, b"DEALER", self._max_bytes, _ANY), False

    def _resolve(self) -> tuple[str, int] | None:
        """The address, None where it is not known yet; names are looked up on a thread, as that may take long."""
        if self._address is None:
            with suppress(OSError, ValueError):
                host = "127.0.0.1" if self._host == "localhost" else self._host
                self._address = (str(ipaddress.IPv4Address(host)), self._port)
        if self._address is None and (self._names is None or not self._names.is_alive()):
            self._names = threading.Thread(target=self._look_up, daemon=True)
            self._names.start()
        return self._address

    def _look_up(self) -> None:
        try:
            found = socket.getaddrinfo(self._host, self._port, socket.AF_INET, socket.SOCK_STREAM)
            self._address = (str(found[0][4][0]), self._port)
        except OSError as e:
            self.trouble = f"the name {self._host} is not known: {e.strerror}"
            time.sleep(RETRY_MAX_S)

    def _turn(self) -> list[Frames]:
        connection, now = self._connection, time.monotonic()
        if connection is None:
            if now >= self._retry and not self._closed:
                self._connect()
            return []
        messages: list[Frames] = []
        try:
            if connection.waiting:
                connection.flush()
            if not self._take(connection, messages):  # else there is more than one turn's worth already
                connection.read()
                self._take(connection, messages)
        except Refusal as e:
            self._lose(str(e), RETRY_MAX_S)
            self.refused = True
        except ProtocolError as e:
            self._lose(f"{e}: what answers is no server of this kind, or not the one whose key is pinned")
        except (ConnectionError, OSError) as e:
            self._lose(str(e) if connection.ready else self._unanswered(str(e)))
        else:
            if connection.ready and not self._known:
                self._known, self.trouble, self._wait_s = True, "", RETRY_S
                self.connections += 1
            elif not connection.ready and now - self._begun > HANDSHAKE_S:
                self._lose(self._unanswered("no answer"))
        return messages

    def _take(self, connection: Connection, messages: list[Frames]) -> bool:
        while len(messages) < MESSAGES and (frames := connection.take(time.monotonic_ns())) is not None:
            messages.append(frames)
        return bool(messages)

    def _unanswered(self, why: str) -> str:
        if self._keys and why == CLOSED:
            return "the server closed the connection: is its key the one that is pinned here?"
        return why

    def _lose(self, why: str, wait_s: float = 0.0) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self.trouble, self.refused = why or self.trouble, False
        self._retry = time.monotonic() + max(self._wait_s, wait_s)
        self._wait_s = min(2 * self._wait_s, RETRY_MAX_S)
        if self._family == socket.AF_INET and why and self._names is not None:
            self._address = None  # a name may stand for another address by now


_ANY = Allowance(float("inf"))


def no_server(dialer: Dialer, who: str, start: str) -> UserError:
    """What a person is told where ``dialer`` has no connection: why, and what to do; ``start`` is how to start one."""
    remedy = start
    if "allow" in dialer.trouble:
        remedy = f"there: vla keys allow {shlex.quote(dialer.public)} --name NAME"
    elif dialer.refused:
        remedy = "there: vla keys show; here: vla keys trust HOST:PORT 'KEY'. Or use keys at neither end"
    elif "pinned" in dialer.trouble:
        remedy = "compare `vla keys show` there with trusted.json here"
    return UserError(f"{who} {dialer.endpoint}: {dialer.trouble or 'no answer'}", remedy)


def _wait(connection: Connection, mask: int, timeout_s: float) -> None:
    poller = select.poll()
    poller.register(connection, mask)
    poller.poll(timeout_s * 1e3)

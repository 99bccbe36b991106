"""The end of a connection that others can reach: ZeroMQ's ROUTER to whoever connects.

Without libzmq (``zmtp.py`` says why) and without a thread: it does something when its owner calls it. It promises that
peers cost a bounded amount of memory and time, whoever they are:

- who has not been vouched for (:meth:`Listener.vouch`, e.g. because it has a session) is a stranger: its messages are
  small and few, it says something every :data:`SILENT_NS` or is dropped, and there are at most :data:`STRANGERS`, of
  which the one that has been silent longest makes room for a newcomer;
- who has may send messages up to the listener's limit, at the listener's rate;
- what exceeds a rate is not read, so that it stays with the sender;
- strangers have one turn among them in a call (``turns.py``): to be accepted, to be read and to say one message;
- a peer that does not read loses what is sent to it, and then its connection.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import selectors
import socket
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from vla_stack.errors import UserError
from vla_stack.serving.admission import Admission
from vla_stack.serving.connection import Connection, Frames
from vla_stack.serving.curve import CurveServer
from vla_stack.serving.endpoint import parse
from vla_stack.serving.rates import Allowance
from vla_stack.serving.turns import READ, WRITE, Turns
from vla_stack.serving.zmtp import Mechanism, Null, ProtocolError

log = logging.getLogger(__name__)

STRANGERS, PER_ADDRESS, PER_KEY = (
    128,
    64,
    8,
)  # connections that nobody has vouched for: in all, from one place, of one key
STRANGER_BYTES, STRANGER_HZ, STRANGER_BURST = 512 << 10, 20.0, 5.0  # of one of them: size and rate of its messages
SILENT_NS = 5_000_000_000
BACKLOG = 512  # connections that wait to be accepted
MESSAGES = 8  # of one peer before the others have their turn
HOUSEKEEPING_NS = 200_000_000
REFUSALS_HZ = 1.0  # lines about refusals in the log
DOOR, WAKE = b"", b"wake"  # names of no peer
Buffers = Sequence[bytes | memoryview]


class PeerGone(Exception):
    """The peer that something should be sent to has left."""


class Mail(NamedTuple):
    """A message: whose connection it came by, the public key behind it (empty without keys), its frames."""

    peer: bytes
    key: str
    frames: Frames


class Listener:
    """Binds an endpoint and talks to whoever connects. One thread at a time calls it, all but :meth:`wake`.

    Args:
        endpoint: ``tcp://ADDRESS:PORT`` (port ``*``: any free one, address ``*``: all of this machine's) or ``ipc://PATH``.
        admission: This end's keys and who may connect; connections are then encrypted, and who may not is told so.
        max_bytes: Longest message of a peer that was vouched for.
        max_rate_hz: Messages of such a peer per second.
        on_refusal: Told, at most :data:`REFUSALS_HZ` times a second, who was not let in and why; logged by default.

    Attributes:
        endpoint: Address that is bound.
        peers: Connections that are ready, by name.

    Raises:
        UserError: The endpoint is malformed or in use.
    """

    def __init__(
        self,
        endpoint: str,
        admission: Admission | None = None,
        max_bytes: int = STRANGER_BYTES,
        max_rate_hz: float = 1000.0,
        on_refusal: Callable[[str], None] | None = None,
    ) -> None:
        self._admission, self._max_bytes, self._max_rate_hz = admission, max_bytes, max_rate_hz
        self._on_refusal = on_refusal or (lambda why: log.warning("refused %s", why))
        self._refusals = Allowance(REFUSALS_HZ)
        self._path = ""
        self._listening = self._bind(endpoint)
        self.peers: dict[bytes, Connection] = {}
        self._unready: dict[bytes, Connection] = {}  # before the end of the handshake
        self._vouched: set[bytes] = set()
        self._held: dict[bytes, Connection] = {}  # with messages that had to wait their turn
        self._count = 0
        self._kept_ns = 0  # time of the last housekeeping
        self._turns = Turns()
        self._turns.watch(DOOR, self._listening, READ)
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._turns.watch(WAKE, self._woken, READ, stranger=False)

    def fileno(self) -> int:
        """Readable when :meth:`receive` has something to do; not only then, so call it now and then in any case."""
        return self._turns.fileno()

    def wake(self) -> None:
        """Let :meth:`receive` return at once. Any thread."""
        with suppress(OSError):
            self._waker.send(b"\0")

    def vouch(self, peer: bytes, on: bool = True) -> None:
        """Take a peer for one that has a right to be here, or no longer."""
        if (connection := self.peers.get(peer)) is None or (peer in self._vouched) == on:
            return
        if on:
            self._vouched.add(peer)
            connection.max_bytes, connection.allowance = self._max_bytes, Allowance(self._max_rate_hz)
        else:
            self._vouched.discard(peer)
            connection.max_bytes = min(STRANGER_BYTES, self._max_bytes)
            connection.allowance = Allowance(STRANGER_HZ, STRANGER_BURST)
        self._watch(peer, connection)

    def receive(self, timeout_s: float = 0.0) -> list[Mail]:
        """What has come, those first that were vouched for; waits at most ``timeout_s`` for something to. May return
        nothing earlier.
        """
        now_ns = time.monotonic_ns()
        if now_ns - self._kept_ns > HOUSEKEEPING_NS:
            self._keep_house(now_ns)
        mail: list[Mail] = []
        for name in self._held.keys() & self._vouched:  # what it said before comes before what it says now
            if self.peers[name].allowance.has(now_ns):
                mail += self._take(name, self.peers[name], now_ns)
        wait_s = 0.0 if mail else min(timeout_s, 0.02 if self._held else HOUSEKEEPING_NS * 1e-9)
        for name, mask in self._turns.next(wait_s, self._waiting):
            if name == DOOR:
                self._accept()
            elif name == WAKE:
                with suppress(OSError):
                    self._woken.recv(1024)
            elif (connection := self.peers.get(name) or self._unready.get(name)) is not None:
                mail += self._attend(name, connection, mask)
        self._turns.remind(
            any(c.allowance.has(now_ns) for c in self._held.values())
        )  # else owners sleep on what is held
        return mail

    def send(self, peer: bytes, frames: Buffers, newest: bool = False) -> bool:
        """Send without waiting; False where the peer does not read. See :meth:`Connection.send`.

        Raises:
            PeerGone: It has left.
        """
        if (connection := self.peers.get(peer)) is None:
            raise PeerGone
        sent = connection.send(frames, newest)
        if connection.waiting:
            self._watch(peer, connection)
        return sent

    def drain(self, timeout_s: float) -> None:
        """Wait until peers have taken what was sent to them, at most ``timeout_s``. Reads nothing."""
        end = time.monotonic() + timeout_s
        while (left := end - time.monotonic()) > 0:
            writing = [(name, c) for name, c in self.peers.items() if c.waiting]
            if not writing:
                return
            with selectors.DefaultSelector() as selector:
                for name, connection in writing:
                    selector.register(connection, WRITE, name)
                for event, _ in selector.select(left):
                    self.peers[event.data].flush()
                    self._watch(event.data, self.peers[event.data])

    def close(self) -> None:
        """Close all connections; what is queued is lost, see :meth:`drain`. A second call does nothing."""
        for connection in (*self.peers.values(), *self._unready.values()):
            connection.close()
        self.peers.clear()
        self._unready.clear()
        for part in (self._listening, self._woken, self._waker, self._turns):
            part.close()
        if self._path:
            with suppress(OSError):
                os.unlink(self._path)
            self._path = ""

    # -- connections ----------------------------------------------------------------------------------------------

    def _bind(self, endpoint: str) -> socket.socket:
        family, (host, port) = parse(endpoint)
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setblocking(False)
        try:
            if family == socket.AF_INET:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listening.bind(("" if host == "*" else host, port))
                self.endpoint = "tcp://{}:{}".format(*listening.getsockname())
            else:
                _remove_stale(host)
                listening.bind(host)
                self.endpoint, self._path = endpoint, host
            listening.listen(BACKLOG)
        except OSError as e:
            listening.close()
            why = e.strerror or str(e)
            raise UserError(f"cannot bind {endpoint}: {why}", "stop the other server or choose another port") from None
        return listening

    def _accept(self) -> None:
        try:
            stream, address = self._listening.accept()
        except OSError as e:
            if e.errno in (errno.EMFILE, errno.ENFILE) and self._unready:
                self._drop(next(iter(self._unready)))  # another one needs its file handle
            return
        self._count += 1
        name = self._count.to_bytes(8, "big")
        mechanism: Mechanism = CurveServer(a.curve, a.admits) if (a := self._admission) else Null()
        limit, allowance = min(STRANGER_BYTES, self._max_bytes), Allowance(STRANGER_HZ, STRANGER_BURST)
        connection = Connection(stream, mechanism, b"ROUTER", limit, allowance)
        connection.address = address[0] if stream.family == socket.AF_INET else ""
        self._unready[name] = connection
        self._watch(name, connection)
        self._make_room(name, connection)

    def _make_room(self, newcomer: bytes, connection: Connection) -> None:
        """Where there are too many strangers, of the newcomer's key or address or in all, drop one that has left, else
        the one that has been silent longest. Those who have said something and those who have not yet have half of
        the places each, so that the other kind crowds out neither newcomers nor watchers, who speak now and then.
        """
        strangers = [(n, c) for n, c in self.peers.items() if n not in self._vouched]
        strangers += self._unready.items()
        if connection.key:
            alike = [(n, c) for n, c in strangers if c.key == connection.key]
            crowded = len(alike) > PER_KEY
        else:
            alike = [(n, c) for n, c in strangers if not c.key and c.address == connection.address]
            crowded = len(alike) > PER_ADDRESS
        if not crowded and len(strangers) <= STRANGERS:
            return
        others = {n: c for n, c in (alike if crowded else strangers) if n != newcomer}
        for name in _ended(others)[:1] or _silent_longest(others):
            self._drop(name)

    def _drop(self, name: bytes) -> None:
        connection = self.peers.pop(name, None) or self._unready.pop(name, None)
        if connection is not None:
            self._vouched.discard(name)
            self._held.pop(name, None)
            self._turns.forget(name)
            connection.close()

    def _keep_house(self, now_ns: int) -> None:
        self._kept_ns = now_ns
        for name, connection in [*self.peers.items(), *self._unready.items()]:
            silent = name not in self._vouched and now_ns - connection.heard_ns > SILENT_NS
            if silent or connection.stalled(now_ns):
                self._drop(name)

    def _watch(self, name: bytes, connection: Connection) -> None:
        mask = (name not in self._held) * READ | connection.waiting * WRITE
        self._turns.watch(name, connection, mask, name not in self._vouched)

    # -- messages -------------------------------------------------------------------------------------------------

    def _attend(self, name: bytes, connection: Connection, mask: int) -> list[Mail]:
        """What a connection does in its turn."""
        if mask & WRITE:
            connection.flush()
            self._watch(name, connection)
        if not mask & READ:
            return []
        try:
            if name in self._held:
                connection.check()
            else:
                connection.read()
        except ConnectionError:
            self._drop(name)
            return []
        return self._take(name, connection, time.monotonic_ns())

    def _take(self, name: bytes, connection: Connection, now_ns: int) -> list[Mail]:
        """Messages of a connection, as many as its turn has; what is left waits for the next one."""
        mail: list[Mail] = []
        most = MESSAGES if name in self._vouched else 1
        try:
            while len(mail) < most and (frames := connection.take(now_ns)) is not None:
                mail.append(Mail(name, connection.key, frames))
        except ProtocolError as e:
            self._refuse(connection, e)
            self._drop(name)
            return mail
        if connection.ready and name in self._unready:
            self.peers[name] = self._unready.pop(name)
            self._make_room(name, connection)
        wait = connection.unread and (len(mail) == most or (connection.ready and not connection.allowance.has(now_ns)))
        if wait != (name in self._held):
            if wait:
                self._held[name] = connection
            else:
                del self._held[name]
        self._watch(name, connection)
        return mail

    def _waiting(self) -> list[bytes]:
        """Strangers with messages that had to wait and may come now."""
        now_ns = time.monotonic_ns()
        return [n for n, c in self._held.items() if n not in self._vouched and c.allowance.has(now_ns)]

    def _refuse(self, connection: Connection, why: ProtocolError) -> None:
        if not connection.ready and self._refusals.admit(time.monotonic_ns()):
            self._on_refusal(f"{connection.address or 'a peer on this machine'}: {why}")


def _ended(connections: dict[bytes, Connection]) -> list[bytes]:
    """Names of those that the other end has reset; who has to wait its turn is not read, so nothing else tells."""
    poller = select.poll()
    names = {connection.fileno(): name for name, connection in connections.items()}
    for handle in names:
        poller.register(handle, 0)
    return [names[handle] for handle, _ in poller.poll(0)]


def _silent_longest(connections: dict[bytes, Connection]) -> list[bytes]:
    """The name of one of the kind that has more than its half of the places; of those without a proven key, if any."""
    spoken = [n for n, c in connections.items() if c.spoken]
    kind = spoken if 2 * len(spoken) > len(connections) else [n for n, c in connections.items() if not c.spoken]
    return sorted(kind, key=lambda n: (connections[n].key != "", connections[n].heard_ns, n))[:1]


def _remove_stale(path: str) -> None:
    """Remove what a server that was killed has left at ``path``; OSError where one lives there."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise OSError(errno.EADDRINUSE, "there is a file of that name")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise OSError(errno.EADDRINUSE, "a server listens there")

"""Who is connected: one session a peer, a cap on their number, and expiry of the silent ones."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from vla_stack.history import History
from vla_stack.serving.pixels import PixelRing
from vla_stack.serving.wire import Code, WireError
from vla_stack.serving.worker import ChunkPolicy

REMEMBERED = 64  # requests of a session that are recognised when they come again
LEASE_NS = 2_000_000_000  # a robot node that lives sends a PING several times in this time


@dataclass
class Session:
    """A robot that has said HELLO.

    Attributes:
        sid: Unguessable id that every later message carries.
        peer: ZeroMQ routing id of the connection.
        epoch: Newest epoch seen; requests of an older one are refused.
        last_seen_ns: Server's monotonic clock at the last message.
        key: Public key of the robot, empty on a connection without keys.
        policy: What it is served until its epoch ends; None before its first WELCOME.
        asked: Newest request ids of the epoch.
        ring: Where its pictures lie; None: they are sent.
        history: What the policy remembers of the epoch; lost with the session, which training provides for.
    """

    sid: str
    peer: bytes
    epoch: int
    last_seen_ns: int
    key: str = ""
    policy: ChunkPolicy | None = None
    asked: dict[int, None] = field(default_factory=dict)
    ring: PixelRing | None = None
    history: History | None = None

    def begin(self, epoch: int) -> None:
        """Ids of requests may start anew with an epoch, and nothing is remembered."""
        self.epoch, self.history = epoch, None
        self.asked.clear()

    def ask(self, rid: int) -> bool:
        """Note a request; False where it has been asked before."""
        if rid in self.asked:
            return False
        self.asked[rid] = None
        if len(self.asked) > REMEMBERED:
            del self.asked[next(iter(self.asked))]
        return True


class Sessions:
    """The open sessions, by connection.

    Args:
        limit: Largest number of sessions.
        idle_ns: Silence after which a session is forgotten.
    """

    def __init__(self, limit: int, idle_ns: int) -> None:
        self._limit = limit
        self._idle_ns = idle_ns
        self._by_peer: dict[bytes, Session] = {}

    def __len__(self) -> int:
        return len(self._by_peer)

    def open(
        self, peer: bytes, epoch: int, previous_sid: str, now_ns: int, key: str = ""
    ) -> tuple[Session, Session | None]:
        """Session for ``peer``, and the one that it replaces: that of the same robot before it reconnected
        (``previous_sid``, which only that robot knows), or one of the same key that has fallen silent. A connection
        keeps its session when it says HELLO again.

        Raises:
            WireError: BUSY, the limit is reached, or another process drives the robot of this key.
        """
        session = self.of(peer, now_ns)
        if session is not None:
            return session, None
        replaced = next((s for s in self._by_peer.values() if s.sid == previous_sid or (key and s.key == key)), None)
        if replaced is not None and replaced.sid != previous_sid and now_ns - replaced.last_seen_ns < LEASE_NS:
            raise WireError(Code.BUSY, "another process drives this robot: it has a session with the same key")
        if replaced is not None:
            self.close(replaced)
        if len(self._by_peer) >= self._limit:
            raise WireError(Code.BUSY, f"{self._limit} sessions are open, no more are allowed")
        session = Session(secrets.token_hex(16), peer, epoch, now_ns, key)
        self._by_peer[peer] = session
        return session, replaced

    def of(self, peer: bytes, now_ns: int) -> Session | None:
        """Session of a connection that just spoke, or None."""
        session = self._by_peer.get(peer)
        if session is not None:
            session.last_seen_ns = now_ns
        return session

    def require(self, peer: bytes, sid: str, now_ns: int) -> Session:
        """Session of a connection that claims to be ``sid``; WireError NO_SESSION if it is not."""
        session = self.of(peer, now_ns)
        if session is None or session.sid != sid:
            raise WireError(Code.NO_SESSION, "no such session: say HELLO again")
        return session

    def close(self, session: Session) -> None:
        """Forget a session; no error if it is already gone."""
        if self._by_peer.get(session.peer) is session:
            del self._by_peer[session.peer]

    def expire(self, now_ns: int) -> list[Session]:
        """Forget and return the sessions that have been silent for too long."""
        silent = [s for s in self._by_peer.values() if now_ns - s.last_seen_ns > self._idle_ns]
        for session in silent:
            self.close(session)
        return silent

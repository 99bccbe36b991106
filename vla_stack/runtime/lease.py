"""Who drives: one operator at a time, as long as their messages come."""

from __future__ import annotations

import hashlib

from vla_stack.runtime.operator_messages import LEASE_S, Teleop

DRIFT = 1e-4  # two computers' clocks may differ in rate by this much


def holder_name(lease: str) -> str:
    """What may be published about a lease: enough to recognise one's own, not enough to take another's."""
    return hashlib.sha256(lease.encode()).hexdigest()[:12] if lease else ""


class Lease:
    """The one lease of a robot. Times are the node's monotonic nanoseconds."""

    def __init__(self) -> None:
        self.token = ""
        self._heard_ns = 0
        self._seq = -1
        self._offset_ns = 0  # smallest difference of arrival and sending: the clocks' offset and the quickest way
        self._offset_at_ns = 0

    def acquire(self, token: str, now_ns: int) -> str | None:
        """Take the lease; None, or why not. Whoever holds it may ask again."""
        if not token:
            return "a lease needs a name of its own"
        if self.token not in ("", token):
            return "another operator holds the lease; it ends when they release it or one second after they fall silent"
        if not self.token:
            self.token, self._seq, self._offset_at_ns = token, -1, 0
        self._heard_ns = now_ns
        return None

    def release(self, token: str) -> str | None:
        """Give it back; None, or why not."""
        if not token or token != self.token:
            return "only who holds the lease can release it"
        self.token = ""
        return None

    def holds(self, token: str, now_ns: int) -> bool:
        """Whether a message of ``token`` counts; if so its sender has been heard."""
        if not token or token != self.token:
            return False
        self._heard_ns = now_ns
        return True

    def expired(self, now_ns: int) -> bool:
        """Take the lease from an operator who has fallen silent; True in that moment alone."""
        if self.token and now_ns - self._heard_ns > LEASE_S * 1e9:
            self.token = ""
            return True
        return False

    def accept(self, message: Teleop, now_ns: int) -> int | None:
        """Whether a teleop message counts.

        Returns:
            When it was sent, on the node's clock, as if the quickest message so far had taken no time; None where the
            message is another operator's, or older than one that has come.
        """
        if message.lease != self.token or not self.token or message.seq <= self._seq:
            return None
        self._seq, self._heard_ns = message.seq, now_ns
        offset = now_ns - message.t_ns
        drifted = self._offset_ns + round(DRIFT * (now_ns - self._offset_at_ns))
        if not self._offset_at_ns or offset < drifted:
            drifted = offset
        self._offset_ns, self._offset_at_ns = drifted, now_ns
        return message.t_ns + drifted

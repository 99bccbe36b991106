"""How often a peer may speak, decided before anything that it says is parsed."""

from __future__ import annotations

from collections import OrderedDict

PEERS = 1024  # remembered; who spoke longest ago is forgotten first


class RateLimit:
    """A token bucket for each peer: bursts of one second's worth, then ``per_second``.

    Args:
        per_second: Messages of one peer; infinity admits everything.
    """

    def __init__(self, per_second: float) -> None:
        self._per_second = per_second
        self._buckets: OrderedDict[str | bytes, tuple[float, int]] = OrderedDict()  # peer -> tokens, when counted

    def admit(self, peer: str | bytes, now_ns: int) -> bool:
        """Whether a message that just came from ``peer`` may be looked at."""
        tokens, counted_ns = self._buckets.pop(peer, (self._per_second, now_ns))
        tokens = min(self._per_second, tokens + (now_ns - counted_ns) * 1e-9 * self._per_second)
        admitted = tokens >= 1.0
        self._buckets[peer] = (tokens - admitted, now_ns)
        if len(self._buckets) > PEERS:
            self._buckets.popitem(last=False)
        return admitted

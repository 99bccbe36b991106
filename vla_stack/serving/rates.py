"""How often a peer may speak, decided before anything that it says is looked at."""

from __future__ import annotations


class Allowance:
    """A token bucket: a burst, then ``per_second``.

    Args:
        per_second: Messages; infinity allows everything.
        burst: Messages that may come at once; by default one second's worth.
    """

    def __init__(self, per_second: float, burst: float | None = None) -> None:
        self._per_second, self._burst = per_second, per_second if burst is None else burst
        self._tokens, self._counted_ns = self._burst, 0

    def has(self, now_ns: int, number: float = 1.0) -> bool:
        """Whether another message, or so many of them, may come at ``now_ns``."""
        passed, self._counted_ns = max(0, now_ns - self._counted_ns), now_ns
        self._tokens = min(self._burst, self._tokens + passed * 1e-9 * self._per_second)
        return self._tokens >= number

    def spend(self, number: float = 1.0) -> None:
        """A message has come, or so many."""
        self._tokens -= number

    def admit(self, now_ns: int, number: float = 1.0) -> bool:
        """Spend so many where there are as many."""
        if admitted := self.has(now_ns, number):
            self.spend(number)
        return admitted

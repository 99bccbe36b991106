"""How many control steps a reply takes, as counted."""

from __future__ import annotations

from collections import deque


class DelayEstimator:
    """Predicts the delay as the largest of the last ``window`` counted ones (RTC, Algorithm 1's delay buffer).

    A maximum over the window, not over all time: one slow reply is forgotten after ``window`` replies. First replies,
    for which a server may have had to warm up, only stand in until there is another.
    """

    def __init__(self, window: int = 10) -> None:
        self._seen: deque[int] = deque(maxlen=window)
        self._first = 0

    def observe_first(self, delay: int) -> None:
        """Note the counted delay of an epoch's first reply."""
        self._first = delay

    def observe(self, delay: int) -> None:
        """Add a counted delay; for a request that was given up, the steps waited, a lower bound."""
        self._seen.append(delay)

    def predict(self) -> int:
        """Delay to plan for, control steps; 0 while nothing is known."""
        return max(self._seen, default=self._first)

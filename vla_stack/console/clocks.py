"""How old something is that was stamped by another computer's clock."""

from __future__ import annotations

DRIFT = 1e-4  # two clocks may differ in rate by this much


class RemoteClock:
    """Turns stamps of another clock into ages, as if the quickest message so far had taken no time. Nanoseconds."""

    def __init__(self) -> None:
        self._offset: float | None = None
        self._at = 0

    def age_ns(self, stamp_ns: int, now_ns: int) -> int:
        """Age at ``now_ns`` (this clock) of what was stamped ``stamp_ns`` (the other clock), at least 0."""
        offset = now_ns - stamp_ns
        grown = offset if self._offset is None else self._offset + DRIFT * (now_ns - self._at)
        self._offset, self._at = min(offset, grown), now_ns
        return max(0, round(offset - self._offset))

    def local_ns(self, stamp_ns: int) -> int | None:
        """This clock's time of a stamp; None before the first message. Learns nothing from it."""
        return None if self._offset is None else round(stamp_ns + self._offset)

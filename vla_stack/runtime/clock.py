"""Time on a robot: monotonic nanoseconds and absolute deadlines, real or virtual.

Latency under the virtual clock is an input of an experiment; under the real clock it is a property of the machine.
The code above the clock is the same. Wall-clock time appears nowhere: a step of the system clock cannot move a robot.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

BEAT_NS = 10_000_000  # between two calls of ``beat`` while a real clock waits
SPIN_NS = 1_000_000  # a sleep wakes up to about this late on a desktop kernel; the rest is waited out on the CPU


class Clock(Protocol):
    """What the control loop needs of time."""

    def now_ns(self) -> int:
        """Monotonic time, nanoseconds; only differences mean anything."""
        ...

    def sleep_until_ns(self, t_ns: int, beat: Callable[[], None] | None = None) -> None:
        """Return at ``t_ns``, or at once where it has passed; ``beat`` is called all the while."""
        ...

    def suspended_ns(self) -> int:
        """How long the computer has been suspended, in which monotonic time stands still; only differences count."""
        ...


class RealClock:
    """``time.monotonic_ns`` with deadlines met by sleeping to about 1 ms before and spinning the rest."""

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def sleep_until_ns(self, t_ns: int, beat: Callable[[], None] | None = None) -> None:
        while (left := t_ns - time.monotonic_ns()) > SPIN_NS:
            if beat is not None:
                beat()
                left = min(left, BEAT_NS + SPIN_NS)
            time.sleep((left - SPIN_NS) * 1e-9)
        while time.monotonic_ns() < t_ns:
            pass

    def suspended_ns(self) -> int:
        if not hasattr(time, "CLOCK_BOOTTIME"):  # Linux has it
            return 0
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.monotonic_ns()


class VirtualClock:
    """Time that moves only when it is told to.

    Args:
        start_ns: First reading, nanoseconds.

    Attributes:
        suspended: What :meth:`suspended_ns` says.
    """

    def __init__(self, start_ns: int = 0) -> None:
        self._now = start_ns
        self.suspended = 0

    def now_ns(self) -> int:
        return self._now

    def sleep_until_ns(self, t_ns: int, beat: Callable[[], None] | None = None) -> None:
        if beat is not None:
            beat()
        self._now = max(self._now, t_ns)

    def suspended_ns(self) -> int:
        return self.suspended

    def advance_ns(self, dt_ns: int) -> None:
        """Let ``dt_ns`` pass, e.g. to stand for work that took that long."""
        self._now += dt_ns

"""Calls a robot back to rest when its caller goes quiet."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Watchdog:
    """Calls ``hold`` once whenever ``limit_s`` pass after a :meth:`feed` without the next.

    A thread of its own, so that it also acts while the control loop hangs in a call. ``lock`` must guard every other
    use of the hardware: a bus has one user at a time.

    Args:
        limit_s: Longest silence, seconds.
        hold: Brings the robot to rest; called with ``lock`` held.
        lock: Of the hardware.
    """

    def __init__(self, limit_s: float, hold: Callable[[], None], lock: threading.RLock) -> None:
        self._limit_s, self._hold, self._lock = limit_s, hold, lock
        self._fed = time.monotonic()
        self._watching = False
        self._change = threading.Condition()
        self._ended = False
        self.barks = 0
        self._thread = threading.Thread(target=self._watch, daemon=True, name="watchdog")
        self._thread.start()

    def feed(self) -> None:
        """The caller lives: a command was sent now."""
        with self._change:
            self._fed = time.monotonic()
            if not self._watching:  # else the watching thread finds it when it wakes: no need to do that at every step
                self._watching = True
                self._change.notify()

    def rest(self) -> None:
        """The robot holds on purpose: silence is fine until the next :meth:`feed`."""
        with self._change:
            self._watching = False

    def end(self) -> None:
        """Stop watching for good."""
        with self._change:
            self._ended = True
            self._change.notify()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            with self._change:
                if self._ended:
                    return
                left = self._fed + self._limit_s - time.monotonic() if self._watching else None
                if left is None or left > 0:
                    self._change.wait(left)
                    continue
            with self._lock, self._change:
                if self._watching and time.monotonic() - self._fed >= self._limit_s:
                    self._watching = False
                    self.barks += 1
                    self._hold()

"""First Ctrl-C or SIGTERM: finish the step and save. Second: die."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """Context manager; :attr:`asked` becomes True at the first signal, the second one has its usual effect."""

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            self._before = {s: signal.signal(s, self._handle) for s in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for s, handler in self._before.items():
            signal.signal(s, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.asked = True

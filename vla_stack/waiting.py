"""What a person at a terminal sees of a command that has not said anything yet: that it is at work, and for how long.

Importing torch and loading a policy take seconds in which nothing can be reported. A command's seconds are counted on
the terminal's last line whenever it is silent; those of a command that goes on until it is interrupted, until its first
word on stdout. Bars are drawn anew while their first step is under way. Nothing of this goes into a file or a pipe.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

SILENT_S = 1.0  # before the first notice
EVERY_S = 0.5  # an import that lets no thread run for a second still leaves no two seconds of silence
ERASE = "\r\x1b[K"


class Waiting:
    """One command's silence.

    Args:
        name: Of the command.
        terminal: Where its seconds are counted.
        ends: Whether it ends by itself, so that silence after its first word is work as well.
        clock: Seconds.
    """

    def __init__(
        self, name: str, terminal: TextIO, ends: bool = True, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name, self._terminal, self._ends, self._clock = name, terminal, ends, clock
        self._lock = threading.RLock()
        self._begun = self._heard = clock()
        self._drawn = self._quiet = self._inside = False

    def heard(self, text: str, result: bool) -> None:
        """Something is about to be written: a result, on stdout, or a notice, on stderr."""
        with self._lock:
            if self._drawn:
                self._terminal.write(ERASE)
            spoken = result and not self._ends
            self._drawn, self._quiet, self._heard = False, self._quiet or spoken, self._clock()
            self._inside = not text.endswith(("\n", "\r"))  # a line that is not over is not to be erased

    def tick(self) -> None:
        """Say that the command is at work, where nobody else does."""
        tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
        if bars := list(getattr(tqdm, "_instances", ())):
            for bar in bars:
                if not bar.disable:
                    bar.refresh()
            return
        with self._lock:
            if not (self._quiet or self._inside) and self._clock() - self._heard >= SILENT_S:
                self._terminal.write(f"{ERASE}{self._name}: {self._clock() - self._begun:.0f} s")
                self._terminal.flush()
                self._drawn = True


class _Watched:
    """A stream whose every write is heard."""

    def __init__(self, stream: TextIO, waiting: Waiting, result: bool) -> None:
        self._stream, self._waiting, self._result = stream, waiting, result

    def write(self, text: str) -> int:
        self._waiting.heard(text, self._result)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def waiting(name: str, ends: bool = True) -> Iterator[None]:
    """A block in which a terminal is told that a command is at work; nothing where stderr is none.

    Args:
        name: Of the command.
        ends: Whether it ends by itself.
    """
    if not sys.stderr.isatty():
        yield
        return
    streams, done = (sys.stdout, sys.stderr), threading.Event()
    told = Waiting(name, sys.stderr, ends)
    sys.stdout, sys.stderr = (_Watched(s, told, result=s is streams[0]) for s in streams)  # type: ignore[assignment]

    def tell() -> None:
        while not done.wait(EVERY_S):
            told.tick()

    thread = threading.Thread(target=tell, name="waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        told.heard("\n", result=True)
        sys.stdout, sys.stderr = streams

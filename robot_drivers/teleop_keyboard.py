"""A terminal's keyboard as a teleoperator; over SSH and on any display, as it reads characters, not key states.

A terminal says that a key went down, again and again while it is held, never that it was let go: a key counts as held
for a moment after its last character.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from typing import Any

import numpy as np

from robot_drivers.teleop import Axes
from vla_stack.errors import UserError

INPUT_FLAGS, LOCAL_FLAGS = 0, 3  # indices in what ``termios.tcgetattr`` returns
HELD_S = 0.15  # longer than the pause between repeated characters (30 ms), short enough to stop at once
KEYS = {  # character -> (axis, direction)
    "w": (0, 1), "s": (0, -1), "a": (1, 1), "d": (1, -1), "r": (2, 1), "f": (2, -1),
    "u": (3, 1), "j": (3, -1), "i": (4, 1), "k": (4, -1), "q": (5, 1), "e": (5, -1),
}  # fmt: skip
GRIPPER = {"o": 1.0, "c": -1.0}
EVENTS = {"\r": "success", "\n": "success", "\x7f": "discard", "\x08": "discard", "\x1b": "end"}
SEQUENCE = re.compile(r"\x1b[\[O][0-9;]*[A-Za-z~]")  # arrow and function keys: neither Esc nor the letters in them
EVENTS_HELP = "Enter success, Backspace discards, Esc end"


class Keyboard:
    """Keys of the terminal that the program runs in.

    Args:
        fd: File descriptor to read; by default standard input.
    """

    HELP = f"w/s forward/back, a/d left/right, r/f up/down, q/e yaw, i/k pitch, u/j roll, o/c open/close; {EVENTS_HELP}"

    def __init__(self, fd: int | None = None) -> None:
        self._fd = sys.stdin.fileno() if fd is None else fd
        self._before: list[Any] | None = None
        self._seen: dict[str, float] = {}

    def connect(self) -> None:
        """Take characters one by one and unechoed.

        Raises:
            UserError: This is no terminal.
        """
        if not os.isatty(self._fd):
            raise UserError("the keyboard teleoperator needs a terminal", "run it in one, not in the background")
        self._before = termios.tcgetattr(self._fd)
        tty.setcbreak(self._fd)

    def axes(self) -> Axes:
        now, event = time.monotonic(), ""
        while select.select([self._fd], [], [], 0)[0] and (typed := os.read(self._fd, 64)):
            for character in SEQUENCE.sub("", typed.decode(errors="ignore")).lower():
                event = EVENTS.get(character, event)
                self._seen[character] = now
        held = {c for c, t in self._seen.items() if now - t < HELD_S}
        tool = np.zeros(6)
        for character in held & set(KEYS):
            axis, direction = KEYS[character]
            tool[axis] += direction
        gripper = sum(GRIPPER[c] for c in held & set(GRIPPER))
        return Axes(bool(tool.any() or gripper), tool, gripper, event)

    def disconnect(self) -> None:
        if self._before is not None:
            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)
            self._before = None


def terminal_keyboard() -> Keyboard | None:
    """The keyboard of the terminal that the program runs in, not connected; None where there is no terminal."""
    fd = _terminal()
    return None if fd is None else Keyboard(fd)


@contextlib.contextmanager
def whole_lines() -> Iterator[None]:
    """The terminal takes echoed lines in here, whatever a connected :class:`Keyboard` has made of it.

    What has been typed and not been read is dropped on both ways: keys that were meant for an episode answer no
    question, and a second Enter after the answer ends no episode.
    """
    if (fd := _terminal()) is None:
        yield
        return
    before = termios.tcgetattr(fd)
    lines = list(before)
    lines[INPUT_FLAGS] |= termios.ICRNL  # some versions of ``tty.setcbreak`` take it away: Enter would end no line
    lines[LOCAL_FLAGS] |= termios.ICANON | termios.ECHO
    termios.tcsetattr(fd, termios.TCSAFLUSH, lines)
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSAFLUSH, before)


def _terminal() -> int | None:
    """File descriptor of standard input where that is a terminal."""
    try:
        fd = sys.stdin.fileno()
    except (AttributeError, OSError, ValueError):  # there is no standard input, it is no file, or it is closed
        return None
    return fd if os.isatty(fd) else None

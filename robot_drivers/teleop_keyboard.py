"""A terminal's keyboard as a teleoperator; over SSH and on any display, as it reads characters, not key states.

A terminal says that a key went down, again and again while it is held, never that it was let go: a key counts as held
for a moment after its last character. It repeats the last key alone, so Space, the dead-man, cannot be seen held under
a steering key: the robot moves while a steering key repeats that followed a Space within a second, and holds when it
ends. After a second without either, it takes a new Space.
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
from vla_stack.key_map import COMMANDS, DEAD_MAN, MOTIONS, events_line, help_line

INPUT_FLAGS, LOCAL_FLAGS = 0, 3  # indices in what ``termios.tcgetattr`` returns
HELD_S = 0.15  # longer than the pause between repeated characters (30 ms), short enough to stop at once
CHAIN_S = 1.0  # from a Space, or a steering key after one, to the next; a keyboard repeats the last key alone
TOOL = {  # axis of the key map -> axis of the tool and its direction, seen from behind the robot
    **{"away": (0, 1), "right": (1, -1), "up": (2, 1), "roll": (3, 1), "pitch": (4, 1), "turn": (5, 1)},
}
SIGNALS = {"success": "success", "fail": "end", "discard": "discard", "rearm": "rearm", "estop": "estop"}
EVENTS = {COMMANDS[command][0]: event for command, event in SIGNALS.items()}
TYPED = {"\r": "enter", "\n": "enter", "\x1b": "escape"}  # what a terminal says -> key
ARROWS = {"A": "arrowup", "B": "arrowdown", "C": "arrowright", "D": "arrowleft"}
KEY = re.compile(r"\x1b[\[O](?:[0-9;]*)([A-Za-z~])|(.)", re.DOTALL)  # a function key is neither Esc nor letters
EVENTS_HELP = events_line("teleop")


class Keyboard:
    """Keys of the terminal that the program runs in.

    Args:
        fd: File descriptor to read; by default standard input.
    """

    HELP = f"{help_line('teleop')}; directions are those seen from behind the robot"

    def __init__(self, fd: int | None = None) -> None:
        self._fd = sys.stdin.fileno() if fd is None else fd
        self._before: list[Any] | None = None
        self._seen: dict[str, float] = {}
        self._armed_until = -np.inf

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
            for key in _keys(typed.decode(errors="ignore")):
                event = EVENTS.get(key, event)
                self._seen[key] = now
                if key == DEAD_MAN or (key in MOTIONS and now < self._armed_until):
                    self._armed_until = now + CHAIN_S
        tool, gripper, steered = np.zeros(6), 0, False
        for key, motion in MOTIONS.items():
            if now - self._seen.get(key, -np.inf) >= HELD_S:
                continue
            steered = True
            if motion.axis == "grip":
                gripper += motion.sign
            else:
                axis, direction = TOOL[motion.axis]
                tool[axis] += direction * motion.sign
        space = now - self._seen.get(DEAD_MAN, -np.inf) < HELD_S
        if not (space or (steered and now < self._armed_until)):
            return Axes(False, np.zeros(6), 0, event)
        return Axes(True, tool, gripper, event)

    def disconnect(self) -> None:
        if self._before is not None:
            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)
            self._before = None


def _keys(typed: str) -> list[str]:
    """The keys that what a terminal says stands for, named as in the key map."""
    keys = (ARROWS.get(arrow, "") if arrow else TYPED.get(one, one.lower()) for arrow, one in KEY.findall(typed))
    return [key for key in keys if key]


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

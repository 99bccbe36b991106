"""The person at the terminal of ``vla run``: sets scenes, re-arms, keeps seconds, says how an episode ended."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import tty
from collections.abc import Iterator

from vla_stack.errors import UserError

MAX_TYPED = 1 << 16  # bytes; whoever feeds us without end does not keep us from driving


class Keys:
    """Keys pressed while a robot runs. Enter is remembered for who asks for it; all others are taken one by one."""

    def __init__(self) -> None:
        self._enter = False

    def take(self) -> str:
        """Keys since the last call, Enter left out. At a terminal alone: in a pipe answers wait for their questions."""
        if not at_terminal():
            return ""
        text = _typed()
        self._enter |= b"\n" in text
        return text.decode(errors="ignore").replace("\n", "").lower()

    def entered(self) -> bool:
        """Whether Enter has been pressed since the last call or :meth:`forget`."""
        pressed, self._enter = self._enter or b"\n" in _typed(), False
        return pressed

    def forget(self) -> None:
        """What has been typed so far is no answer to what is asked next."""
        self._enter = False
        forget_typed()

    @contextlib.contextmanager
    def one_by_one(self) -> Iterator[None]:
        """Keys count at once and are not echoed in here; elsewhere the terminal hands out whole lines."""
        if (fd := _stdin()) is None or not os.isatty(fd):
            yield
            return
        before = termios.tcgetattr(fd)
        tty.setcbreak(fd)
        flags = termios.tcgetattr(fd)
        flags[0] |= termios.ICRNL  # some versions of ``tty.setcbreak`` take it away: Enter would be no newline
        termios.tcsetattr(fd, termios.TCSADRAIN, flags)
        try:
            yield
        finally:
            termios.tcsetattr(fd, termios.TCSADRAIN, before)


def at_terminal() -> bool:
    """Whether somebody may be there who answers; in a pipe answers wait for their questions."""
    return (fd := _stdin()) is not None and os.isatty(fd)


def wait_for_scene(question: str) -> None:
    """Ask on the terminal and wait for Enter, for robots that cannot reset their scene.

    What was typed at a terminal before is no answer; in a pipe the answers may wait.

    Raises:
        UserError: Nobody can answer.
    """
    if at_terminal():
        forget_typed()
    try:
        input(question)
    except EOFError:
        raise UserError("nobody is at the keyboard to set the scene", "run it in a terminal") from None


def ask_success() -> bool:
    """Ask whether the episode that has just ended succeeded.

    Raises:
        UserError: Nobody can answer.
    """
    forget_typed_at_terminal()
    while True:
        try:
            answer = input("did it succeed? y or n ").strip().lower()
        except EOFError:
            raise UserError("nobody is at the keyboard to say whether it succeeded", "run it in a terminal") from None
        if answer in ("y", "n"):
            return answer == "y"


def forget_typed() -> None:
    """Drop what was typed and not read."""
    forget_typed_at_terminal()
    _typed()


def forget_typed_at_terminal() -> None:
    """Drop it at a terminal; in a pipe it may answer what is asked later."""
    if (fd := _stdin()) is not None and os.isatty(fd):
        termios.tcflush(fd, termios.TCIFLUSH)  # also the beginning of a line, which cannot be read yet


def _typed() -> bytes:
    """What waits at standard input, read past Python's own buffer, in which a line could wait unseen."""
    fd, text = _stdin(), b""
    while fd is not None and len(text) < MAX_TYPED and select.select([fd], [], [], 0)[0]:
        if not (more := os.read(fd, 4096)):
            break  # the end of a file
        text += more
    return text


def _stdin() -> int | None:
    """File descriptor of standard input; None where there is none."""
    try:
        return sys.stdin.fileno()
    except (AttributeError, OSError, ValueError):
        return None

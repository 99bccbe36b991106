"""Whose turn it is: peers that were vouched for at once, strangers one in a call.

What strangers do then delays nobody who belongs there by more than the work for one of them, however many they are.
"""

from __future__ import annotations

import selectors
import socket
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from typing import Any

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
type Turn = tuple[Any, int]  # a name and what it may do now: READ, WRITE or both

_STRANGERS, _REMINDER = object(), object()


class Turns:
    """What a listener waits for, by name. One thread at a time."""

    def __init__(self) -> None:
        self._first, self._strangers = selectors.DefaultSelector(), selectors.DefaultSelector()
        self._first.register(self._strangers.fileno(), READ, _STRANGERS)  # type: ignore[attr-defined]
        self._watched: dict[Hashable, tuple[Any, selectors.BaseSelector, int]] = {}
        self._round: deque[Turn] = deque()  # strangers that have each one turn before any has its next
        self._waited = False  # whether strangers had none in the last call
        self._spare = socket.socketpair()  # can always be written to
        self._reminded = False

    def fileno(self) -> int:
        """Readable when :meth:`next` has somebody; not only then."""
        return self._first.fileno()  # type: ignore[attr-defined, no-any-return]

    def watch(self, name: Hashable, stream: Any, mask: int, stranger: bool = True) -> None:
        """Wait for this of a stream from now on, for nothing by 0."""
        wanted = self._strangers if stranger else self._first
        _, selector, before = self._watched.get(name, (stream, wanted, 0))
        if (selector, before) == (wanted, mask):
            return
        if before and mask and selector is wanted:
            selector.modify(stream, mask, name)
        else:
            if before:
                selector.unregister(stream)
            if mask:
                wanted.register(stream, mask, name)
        self._watched[name] = (stream, wanted, mask)

    def watched(self, name: Hashable) -> int:
        """What is waited for of a stream."""
        return self._watched[name][2] if name in self._watched else 0

    def forget(self, name: Hashable) -> None:
        """Wait for nothing of it; no error where that is so. Before it is closed."""
        stream, selector, mask = self._watched.pop(name, (None, self._first, 0))
        if mask:
            selector.unregister(stream)

    def remind(self, waiting: bool) -> None:
        """Be readable for a turn that no stream tells of: of this round, or of those who are ``waiting``."""
        if (wanted := waiting or bool(self._round)) == self._reminded:
            return
        if wanted:
            self._first.register(self._spare[0], WRITE, _REMINDER)
        else:
            self._first.unregister(self._spare[0])
        self._reminded = wanted

    def next(self, timeout_s: float, waiting: Callable[[], Iterable[Hashable]]) -> list[Turn]:
        """Everybody who is vouched for and may do something, and at most one stranger; waits at most ``timeout_s`` for
        somebody.

        Where both want a turn strangers are passed over, but never twice in a row: who was vouched for does not wait
        for them, and cannot keep them waiting.

        Args:
            waiting: Strangers that have something to do whatever their streams say; asked at the begin of a round.
        """
        if new := not self._round:
            self._round.extend((name, READ) for name in waiting())
        found = [(key.data, mask) for key, mask in self._first.select(0.0 if self._round else timeout_s)]
        turns = [turn for turn in found if turn[0] not in (_STRANGERS, _REMINDER)]
        if new and len(turns) < len(found):
            self._round.extend((key.data, mask) for key, mask in self._strangers.select(0.0))
        self._waited = bool(turns and self._round) and not self._waited
        if self._round and not self._waited:
            turns.append(self._round.popleft())
        return turns

    def close(self) -> None:
        for part in (self._strangers, self._first, *self._spare):
            part.close()

"""Says when a robot stands idle because its policy does not keep up: what is wrong, in figures, and what to do.

A robot without an action holds, which looks like a policy that thinks, or like one that has failed. The time of a STOP
is no part of it: a stop is told as one, and may wait for a person. Nor is the time before the policy is first asked in
an episode, in which a simulation lays its scene out.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

from vla_stack.runtime.dispatch import State

WINDOW_S = 2.0  # that is looked back over
REPEAT_S = 10.0  # from one line to the next, while it lasts
MOST = 0.5  # of that window, without an action


class _Span(NamedTuple):
    """Between two looks: seconds that count, those of them without an action, requests and chunks."""

    seconds: float
    idle: float
    asked: int
    answered: int


class Starvation:
    """How much of the last seconds a robot had no action.

    Args:
        mode: Of execution.
        clock: Monotonic seconds.
    """

    def __init__(self, mode: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._mode, self._clock = mode, clock
        self._spans: deque[_Span] = deque()
        self._state, self._at = State.STOP.value, clock()  # between episodes no time counts
        self._seconds = self._idle = 0.0
        self._asked = self._answered = 0
        self._silent_until = float("-inf")
        self._before: int | None = None  # requests before an episode that has begun and has asked nothing yet

    def begin(self, counters: Mapping[str, int]) -> None:
        """An episode begins; ``counters`` as for :meth:`look`."""
        self.note(State.STOP.value)
        self._before = _requests(counters)

    def note(self, state: str) -> None:
        """The robot's state is now this."""
        now, self._before = self._clock(), None
        if self._state != State.STOP.value:
            self._seconds += now - self._at
            self._idle += (now - self._at) * (self._state == State.HOLD.value)
        self._state, self._at = state, now

    def look(self, counters: Mapping[str, int]) -> str | None:
        """What to tell the person now, if anything; to be asked a few times within ``WINDOW_S``.

        Args:
            counters: Of the node: ``requests``, ``requests unsent`` and ``chunks`` since its start.
        """
        asked, answered = _requests(counters), counters["chunks"]
        if asked == self._before:
            return None
        self.note(self._state if self._before is None else State.HOLD.value)
        self._spans.append(_Span(self._seconds, self._idle, asked - self._asked, answered - self._answered))
        self._seconds = self._idle = 0.0
        self._asked, self._answered = asked, answered
        while sum(span.seconds for span in self._spans) - self._spans[0].seconds >= WINDOW_S:
            self._spans.popleft()
        seconds, idle, asked, answered = (sum(values) for values in zip(*self._spans, strict=True))
        if seconds < WINDOW_S or idle <= MOST * seconds or self._at < self._silent_until:
            return None
        self._silent_until = self._at + REPEAT_S
        return (
            f"no action for {idle / seconds:.0%} of the last {seconds:.0f} s: {asked} requests, {answered} answers -- "
            + self._remedy(answered)
        )

    def _remedy(self, answered: int) -> str:
        if not answered:
            return "see what the server says; it is gone, or busy with other robots or other programs"
        faster = "the server needs a faster --device, more cores, a smaller policy or fewer robots"
        return faster if self._mode == "sync" else f"{faster}; --mode sync waits for late answers"


def _requests(counters: Mapping[str, int]) -> int:
    return counters["requests"] + counters["requests unsent"]

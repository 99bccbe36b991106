"""Whose turn it is: exactly how often strangers and those who belong there are served."""

from __future__ import annotations

import select
import socket
from contextlib import ExitStack

import pytest

from vla_stack.serving.turns import READ, Turns


class Crowd:
    """Streams that are readable from the beginning, under a name each."""

    def __init__(self) -> None:
        self.turns, self._stack = Turns(), ExitStack()
        self.streams: dict[str, socket.socket] = {}

    def add(self, name: str, stranger: bool = True) -> None:
        ours, theirs = socket.socketpair()
        self._stack.enter_context(ours)
        self._stack.enter_context(theirs)
        theirs.send(b"x")
        self.streams[name] = ours
        self.turns.watch(name, ours, READ, stranger)

    def next(self, waiting: tuple[str, ...] = ()) -> list[str]:
        return [name for name, _ in self.turns.next(0.0, lambda: waiting)]

    def close(self) -> None:
        self.turns.close()
        self._stack.close()


@pytest.fixture
def crowd():
    crowd = Crowd()
    yield crowd
    crowd.close()


def test_strangers_have_one_turn_in_a_call_and_each_one_before_any_has_its_next(crowd):
    names = {f"s{i}" for i in range(20)}
    for name in names:
        crowd.add(name)
    for _ in range(3):
        calls = [crowd.next() for _ in names]
        assert all(len(call) == 1 for call in calls) and {call[0] for call in calls} == names


def test_who_is_vouched_for_has_every_turn_and_strangers_at_least_every_second(crowd):
    for name in ("s1", "s2"):
        crowd.add(name)
    crowd.add("robot", stranger=False)
    calls = [crowd.next() for _ in range(8)]
    assert all(call[0] == "robot" for call in calls)
    assert [len(call) for call in calls] == 4 * [1, 2]
    assert {call[1] for call in calls[1:4:2]} == {"s1", "s2"}


def test_what_waits_in_memory_has_its_turn_among_what_waits_in_sockets(crowd):
    crowd.add("socket")
    assert [crowd.next(("memory",)) for _ in range(4)] == 2 * [["memory"], ["socket"]]


def test_a_stranger_that_is_vouched_for_waits_no_longer_and_another_way_round(crowd):
    for name in ("a", "b", "c"):
        crowd.add(name)
    crowd.turns.watch("a", crowd.streams["a"], READ, stranger=False)
    assert crowd.next() == ["a"] and crowd.next()[0] == "a"
    crowd.turns.watch("a", crowd.streams["a"], READ)
    assert {crowd.next()[0] for _ in range(6)} == {"a", "b", "c"}


def test_nobody_is_waited_for_who_is_not_watched(crowd):
    crowd.add("s")
    crowd.add("robot", stranger=False)
    assert select.select([crowd.turns], [], [], 0)[0]
    crowd.turns.forget("robot")
    assert select.select([crowd.turns], [], [], 0)[0] and crowd.next() == ["s"]
    crowd.turns.watch("s", crowd.streams["s"], 0)
    assert crowd.turns.watched("s") == 0 and not crowd.next()
    assert not select.select([crowd.turns], [], [], 0)[0]
    crowd.turns.forget("s")
    crowd.turns.forget("s")


def test_a_reminder_is_readable_and_nobody_s_turn(crowd):
    crowd.turns.remind(False)
    assert not select.select([crowd.turns], [], [], 0)[0]
    crowd.turns.remind(True)
    assert select.select([crowd.turns], [], [], 0)[0] and not crowd.next()
    crowd.turns.remind(False)
    assert not select.select([crowd.turns], [], [], 0)[0]


def test_the_rest_of_a_round_is_reminded_of(crowd):
    assert crowd.next(("a", "b")) == ["a"]
    crowd.turns.remind(False)
    assert select.select([crowd.turns], [], [], 0)[0] and crowd.next() == ["b"]
    crowd.turns.remind(False)
    assert not select.select([crowd.turns], [], [], 0)[0]

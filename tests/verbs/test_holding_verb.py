"""A robot is let go when a person has asked twice, not before, and not where nobody can ask."""

import argparse
import sys
from types import SimpleNamespace

import pytest

from vla_stack.runtime.driver import Capabilities
from vla_stack.verbs import holding

ROBOT = argparse.Namespace(robot="arm")


class Arm:
    capabilities = Capabilities(releases=True)
    spec = released = None

    def connect(self): ...
    def read(self): ...
    def write(self, action): ...
    def hold(self): ...
    def stop(self): ...
    def disconnect(self): ...

    def release(self):
        Arm.released = True


@pytest.fixture
def person(monkeypatch):
    """Presses Ctrl-C in the waits whose numbers are given."""

    def presses(*waits, terminal=True, can=Arm.capabilities):
        count = iter(range(100))

        def sleep(_):
            if next(count) in waits:
                raise KeyboardInterrupt

        Arm.released = False
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: terminal))
        monkeypatch.setattr(holding, "time", SimpleNamespace(sleep=sleep))
        monkeypatch.setattr(holding, "capabilities", lambda args: can)
        monkeypatch.setattr(holding, "driver_maker", lambda args: Arm)

    return presses


def test_two_ctrl_c_and_a_countdown_let_it_go(person, capsys):
    person(0)
    holding.leave_holding(ROBOT, interrupted=True)
    out = capsys.readouterr().out
    assert Arm.released and "torque off in 3 s" in out and "torque off in 1 s" in out


@pytest.mark.parametrize(
    ("waits", "more"),
    [((), {}), ((0, 1), {}), ((0, 3), {}), ((0,), {"terminal": False}), ((0,), {"can": Capabilities()})],
)
def test_it_is_held_otherwise(person, waits, more):
    person(*waits, **more)
    holding.leave_holding(ROBOT, interrupted=True)
    assert not Arm.released


def test_a_session_that_ended_by_itself_asks_nothing(person, capsys):
    person(0)
    holding.leave_holding(ROBOT, interrupted=False)
    assert not Arm.released and "its torque on" in capsys.readouterr().out

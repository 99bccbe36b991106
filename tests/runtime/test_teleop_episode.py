"""A leader arm is followed where somebody means it: not from afar, and after a stop not before Enter is pressed."""

from dataclasses import replace

import numpy as np
import pytest
from runtime_fakes import FakeDriver

from robot_drivers.teleop import Intent
from vla_stack.runtime.clock import VirtualClock
from vla_stack.runtime.driver import Fault
from vla_stack.runtime.safety import SafetyEnvelope
from vla_stack.schema import Dim
from vla_stack.verbs.teleop import Episode

FAR, CLOSE = 0.21, 0.19  # rad


class Arm(FakeDriver):
    """One joint and a gripper; ``faults`` says what is wrong at which reading."""

    def __init__(self, clock, faults=()) -> None:
        super().__init__(clock)
        dims = (Dim("joint.pos", "rad", -3.0, 3.0, kind="angle"), Dim("gripper.pos", "ratio", 0, 1, kind="gripper"))
        self.spec = replace(self.spec, state=dims, action=dims)
        self.faults = dict.fromkeys(faults, Fault("load", "joint: too heavy", stop=True))

    @property
    def fault(self):
        return self.faults.get(self.calls["reads"])


class Leader:
    """``script(k)`` is the intent of tick k: an angle, or an angle and an event; None: it does not answer."""

    HELP = ""

    def __init__(self, script) -> None:
        self.script, self.k = script, -1

    def read(self, command):
        self.k += 1
        said = self.script(self.k)
        angle, event = said if isinstance(said, tuple) else (said, "")
        if angle is None:
            return Intent(False, target=np.zeros(2), event=event)
        return Intent(True, target=np.array([angle, 1.0]), event=event)


def play(script, ticks=40, faults=(), teleop=None):
    """The joint's commands by tick, NaN where none was sent, and the episode."""
    clock = VirtualClock(start_ns=7)
    arm = Arm(clock, faults)
    sent, write = np.full(ticks, np.nan), arm.write

    def note(action):
        sent[teleop.k] = action[0]
        return write(action)

    arm.write, teleop = note, teleop or Leader(script)
    end = Episode(arm, teleop, SafetyEnvelope(arm.spec), clock).run(0, ticks)
    return sent, end


def test_the_robot_moves_once_the_leader_has_been_near(capsys):
    sent, end = play(lambda k: FAR if k < 12 else CLOSE if k == 12 else 1.0)
    assert not sent[:12].any() and sent[12] == np.float32(CLOSE) and (sent[13:] == 1.0).all()
    assert "waiting for the leader: joint.pos is 0.21 rad from the robot's, 0.2 at most" in capsys.readouterr().out
    assert end.states["hold"] == 12


STOPPED = range(6, 9)  # readings with a fault; ticks 5 to 7


@pytest.mark.parametrize("leader", [0.1, FAR])
def test_a_stop_lasts_until_enter_is_pressed(leader):
    sent, end = play(lambda k: 0.0 if k < 5 else leader, faults=STOPPED)
    assert np.isnan(sent[5:]).all() and end.states["stop"] == 35 and not end.event


def test_enter_rearms_and_the_leader_must_be_near_then():
    def script(k):
        return {10: (0.0, "success"), 20: (FAR, "success"), 25: 0.05}.get(k, FAR if k < 25 else 0.3)

    sent, end = play(script, faults=STOPPED)  # at tick 10 the stop is not a second old: it is no answer
    assert np.isnan(sent[5:20]).all()
    np.testing.assert_allclose(sent[20:], [0.0] * 5 + [0.05] + [0.3] * 14, atol=1e-6)
    assert not end.event and not end.success


def test_a_leader_that_was_near_during_the_stop_but_is_no_longer_is_not_followed():
    sent, _ = play(lambda k: {20: (2.0, "success")}.get(k, 0.0 if k < 20 else 2.0), faults=STOPPED)
    assert not sent[20:].any()


def test_enter_while_the_fault_lasts_rearms_nothing():
    sent, end = play(lambda k: (0.0, "success") if k == 20 else 0.0, faults=range(6, 30))
    assert np.isnan(sent[5:]).all() and not end.event


def test_a_stopped_episode_can_be_discarded():
    _, end = play(lambda k: (0.0, "discard") if k == 20 else 0.0, faults=STOPPED)
    assert end.event == "discard" and end.ticks == 20


def test_a_leader_that_was_away_must_come_near_again():
    sent, _ = play(lambda k: 0.0 if k < 5 else None if k < 8 else 2.0)
    assert not sent.any()


class Stick:
    """Held but for the ticks in ``released``."""

    HELP = ""

    def __init__(self, released=()) -> None:
        self.released, self.k = released, -1

    def read(self, command):
        self.k += 1
        return Intent(self.k not in self.released, velocity=np.array([0.1, 0.0]))


def test_a_held_stick_moves_a_stopped_robot_once_it_was_let_go():
    sent, _ = play(None, faults=STOPPED, teleop=Stick())
    assert np.isnan(sent[5:]).all()
    sent, _ = play(None, faults=STOPPED, teleop=Stick(released=[20]))
    assert np.isnan(sent[5:20]).all() and sent[20] == sent[4] and sent[39] > sent[20]

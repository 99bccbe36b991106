"""A leader arm is followed where somebody means it: not from afar, and after a stop not before Enter is pressed.

The hand, the operator's lane and the control loop as ``vla teleop`` puts them together, in virtual time.
"""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from robot_drivers.teleop import Intent
from robot_drivers.teleop_clutch import Clutch
from vla_stack.runtime.clock import VirtualClock
from vla_stack.runtime.control import ControlLoop
from vla_stack.runtime.driver import Fault
from vla_stack.runtime.operator_lane import OperatorLane
from vla_stack.runtime.rewind import Rewinder
from vla_stack.runtime.safety import SafetyEnvelope
from vla_stack.schema import Dim

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))
from runtime_fakes import FakeDriver, FakePort

FAR, CLOSE = 0.21, 0.19  # rad
LATE = 1  # ticks from a state to the command that answers it


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
    """``script(k)`` is the intent of its k-th look: an angle, or an angle and an event; None: it does not answer."""

    HELP, RECORDED = "", False

    def __init__(self, script) -> None:
        self.script, self.k = script, -1

    def read(self, command):
        self.k += 1
        said = self.script(self.k)
        angle, event = said if isinstance(said, tuple) else (said, "")
        if angle is None:
            return Intent(False, target=np.zeros(2), event=event)
        return Intent(True, target=np.array([angle, 1.0]), event=event)


class Stick:
    """Held but for the looks in ``released``; ``events`` by look."""

    HELP, RECORDED = "", False

    def __init__(self, released=(), events=None) -> None:
        self.released, self.events, self.k = released, events or {}, -1

    def read(self, command):
        self.k += 1
        event = self.events.get(self.k, "")
        return Intent(self.k not in self.released, velocity=np.array([0.1, 0.0]), event=event)


class Played:
    """Commands of a recording."""

    HELP, RECORDED = "", True

    def __init__(self, rows) -> None:
        self.rows, self.k = rows, -1

    def read(self, command):
        self.k += 1
        if self.k == len(self.rows):
            return Intent(True, target=np.array([self.rows[-1], 0.0]), event="end")
        return Intent(True, target=np.array([self.rows[self.k], 0.0]))


class Wire:
    """A lane's console with the hand at its other end: each published state is answered before the next tick."""

    def __init__(self, clock, loses=()) -> None:
        self.clock, self.loses, self.clutch = clock, loses, None
        self.inbox = [{"kind": "event", "id": "start", "name": "start"}]
        self.replies, self.phases = {}, []

    def receive(self):
        inbox, self.inbox = self.inbox, []
        return inbox

    def post(self, kind, **fields):
        if kind == "reply":
            self.replies[fields["id"]] = fields
            return True
        self.phases.append(fields["phase"])
        if fields["tick"] in self.loses or fields["phase"].startswith("end"):
            return True
        said = self.clutch.step(fields, self.clock.now_ns() * 1e-9)
        message = {"kind": "teleop", "t_ns": self.clock.now_ns(), "engaged": said.engaged, "rewind": False}
        message |= {name: None if (v := getattr(said, name)) is None else list(v) for name in ("velocity", "target")}
        self.inbox.append(message)
        for event in said.events:
            message = {"kind": "event", "id": f"{event}@{fields['tick']}", "name": event, "stops": fields["stops"]}
            self.inbox.append(message)
        return True


def play(teleop, ticks=60, faults=(), said=None, loses=()):
    """The joint's commands by tick, NaN where none was sent, the log and the wire."""
    clock = VirtualClock(start_ns=7)
    arm, port, wire = Arm(clock, faults), FakePort(clock), Wire(clock, loses)
    wire.clutch = Clutch(teleop, arm.spec, (said if said is not None else []).append)
    lane = OperatorLane(arm.spec, wire, Rewinder(arm.spec))
    loop = ControlLoop(arm, None, SafetyEnvelope(arm.spec), clock, port, lane)
    sent, write = np.full(ticks + 1, np.nan), arm.write

    def note(action):
        sent[arm.calls["reads"] - 1] = action[0]
        return write(action)

    arm.write = note
    port.orders.append((ticks, "abort"))
    lane.begin("teleop")
    log = loop.run(seed=0)
    return sent[:ticks], log, wire


def test_the_robot_moves_once_the_leader_has_been_near():
    said = []
    sent, log, _ = play(Leader(lambda k: FAR if k < 12 else CLOSE if k == 12 else 1.0), said=said)
    assert not sent[: 12 + LATE].any() and sent[12 + LATE] == np.float32(CLOSE)
    assert (sent[13 + LATE :] == 1.0).all() and log.states["hold"] == 12 + LATE
    assert said[0] == "waiting for the leader: joint.pos is 0.21 rad from the robot's, 0.2 at most"
    assert len(said) == 1  # once a second


STOPPED = range(9, 12)  # readings with a fault; ticks 8 to 10


@pytest.mark.parametrize("leader", [0.1, FAR])
def test_a_stop_lasts_until_enter_is_pressed(leader):
    said = []
    sent, log, wire = play(Leader(lambda k: 0.0 if k < 7 else leader), faults=STOPPED, said=said)
    assert np.isnan(sent[8:]).all() and log.states["stop"] == 52 and wire.phases[-1] == "estop"
    assert said[0].startswith("STOP at step 8: ") and said[0].endswith("joint: too heavy; Enter goes on")


def test_enter_rearms_and_the_leader_must_be_near_then():
    def script(k):
        return {12: (0.0, "success"), 24: (FAR, "success")}.get(k, 0.0 if k < 8 else FAR if k < 35 else 0.05)

    sent, _, wire = play(Leader(script), faults=STOPPED)  # at look 12 the stop is not a second old: it is no answer
    assert np.isnan(sent[8:25]).all() and not sent[25 : 35 + LATE].any()
    np.testing.assert_allclose(sent[35 + LATE :], 0.05, atol=1e-6)
    assert list(wire.replies) == ["start", "rearm@24"]


def test_enter_while_the_fault_lasts_rearms_nothing():
    sent, _, wire = play(Leader(lambda k: (0.0, "success") if k == 24 else 0.0), faults=range(9, 40))
    assert np.isnan(sent[8:]).all() and wire.phases[-1] == "estop"


@pytest.mark.parametrize(("event", "phase"), [("discard", "end_discarded"), ("end", "end_demo")])
def test_a_stopped_episode_can_be_ended(event, phase):
    sent, log, wire = play(Leader(lambda k: (0.0, event) if k == 20 else 0.0), faults=STOPPED)
    assert wire.phases[-1] == phase and np.isnan(sent[8:]).all()
    assert log.operator["why"] == ("fail" if event == "end" else event)


def test_a_leader_that_was_away_must_come_near_again():
    sent, _, _ = play(Leader(lambda k: 0.0 if k < 8 else None if k < 11 else 2.0))
    assert not sent.any()


def test_a_leader_that_the_robot_has_let_go_of_must_come_near_again():
    def script(k):
        return 0.0 if k < 10 else 0.1 if k < 12 or k > 40 else 2.0

    sent, _, wire = play(Leader(script), loses=range(12, 16))
    assert "hold" in wire.phases[14:18]  # its messages stopped coming: the robot holds
    assert np.nanmax(sent) < 0.11 and wire.phases[-1] == "teleop"


def test_a_held_stick_moves_a_stopped_robot_once_it_was_let_go():
    sent, _, _ = play(Stick(released=[0]), faults=STOPPED)
    assert sent[6] > 0 and np.isnan(sent[8:]).all()
    sent, _, wire = play(Stick(released=[0, 20]), faults=STOPPED)
    assert np.isnan(sent[8:21]).all() and "rearm@20" in wire.replies
    assert sent[59] > sent[22] >= sent[7]


def test_a_recording_is_played_row_by_row_whatever_states_are_lost():
    rows = [round(0.01 * i, 2) for i in range(20)]
    sent, log, wire = play(Played(rows))
    begun = int(np.flatnonzero(sent > 0)[0])
    np.testing.assert_allclose(sent[begun : begun + 19], rows[1:], atol=1e-6)
    assert wire.phases[-1] == "end_demo" and log.operator["why"] == "fail"
    sent, _, _ = play(Played(rows), loses=[begun + 4])
    assert sent[begun + 5] == sent[begun + 4] and sent[begun + 6] == np.float32(rows[7])


def test_a_stop_of_the_hand_itself_is_not_undone_by_letting_go():
    said = []
    stop, enter = 10, 40
    _, _, wire = play(Stick(range(stop + 5, 50), {stop: "estop", enter: "rearm"}), ticks=80, said=said)
    stopped = [k for k, phase in enumerate(wire.phases) if phase == "estop"]
    assert stopped == list(range(stopped[0], stopped[-1] + 1)) and stopped[0] <= stop + 2 and stopped[-1] >= enter
    assert wire.phases[-1] == "teleop" and any("Enter goes on" in line for line in said)

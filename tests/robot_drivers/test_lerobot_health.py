"""Motors that say they are not well, or only behave so, stop the robot with the joint's name."""

from types import SimpleNamespace

import numpy as np
import pytest

from robot_drivers import lerobot_health
from robot_drivers.lerobot_health import Health
from vla_stack.errors import UserError
from vla_stack.schema import Dim, RobotSpec

DIMS = (Dim("elbow.pos", "rad", -1, 1), Dim("gripper.pos", "ratio", 0, 1, kind="gripper"))
SPEC = RobotSpec("test/arm", DIMS, DIMS, (), 30.0)
AT = np.array([0.0, 0.5], np.float32)


class Bus:
    motors = {name: SimpleNamespace(model="m") for name in ("elbow", "gripper")}
    model_ctrl_table = {"m": {"Present_Load": (60, 2), "Status": (65, 1), "Present_Position": (56, 2)}}

    def __init__(self):
        self.registers = {"Present_Load": {"elbow": 0, "gripper": 0}, "Status": {"elbow": 0, "gripper": 0}}

    def sync_read(self, register, normalize, num_retry):
        return self.registers[register]


@pytest.fixture
def clock(monkeypatch):
    time = SimpleNamespace(now=100.0)
    monkeypatch.setattr(lerobot_health, "time", SimpleNamespace(monotonic=lambda: time.now, sleep=lambda s: None))
    return time


def looked(health: Health, clock, times: int, at=AT) -> None:
    for _ in range(times):
        clock.now += 0.11
        health.check(at)


def test_a_load_over_its_limit_stops_and_passes_with_it(clock):
    bus = Bus()
    health = Health(SimpleNamespace(bus=bus), SPEC, {"elbow.pos": 0.6})
    looked(health, clock, 4)
    assert health.fault is None
    bus.registers["Present_Load"]["elbow"] = -740
    looked(health, clock, 2)
    assert health.fault is None  # one reading may be the start of a motion
    looked(health, clock, 2)
    assert health.fault == ("load", "elbow carries 74% of its rated torque, the limit is 60%", True)
    bus.registers["Present_Load"]["elbow"] = 100
    looked(health, clock, 2)
    assert health.fault is None


def test_an_alarm_of_a_motor_stops(clock):
    bus = Bus()
    health = Health(SimpleNamespace(bus=bus), SPEC, {})
    bus.registers["Status"] = {"elbow": 0b100100, "gripper": 0}
    looked(health, clock, 1)
    assert health.fault is None  # one may be an answer to another question
    looked(health, clock, 1)
    assert health.fault == ("motor", "alarm of elbow: over-temperature, overload", True)


def test_a_joint_that_does_not_follow_stops_but_a_gripper_may_hold_something(clock):
    health = Health(SimpleNamespace(bus=Bus()), SPEC, {})
    health.commanded(np.array([0.1, 0.0], np.float32))
    looked(health, clock, 30)
    assert health.fault is None
    health.commanded(np.array([0.6, 0.0], np.float32))
    looked(health, clock, 8)
    assert health.fault is None  # not for long enough
    looked(health, clock, 3)
    assert health.fault == ("following", "elbow does not follow: 34 degrees from its goal for 1 s", True)
    health.rest()
    looked(health, clock, 1)
    assert health.fault is None


def test_registers_are_left_alone_while_answers_are_late(clock):
    bus = Bus()
    bus.asked = 0

    def sync_read(register, normalize, num_retry):
        bus.asked += 1
        raise ConnectionError("no status packet")

    bus.sync_read, cleared = sync_read, []
    line = SimpleNamespace(is_open=True, in_waiting=0, reset_input_buffer=lambda: cleared.append(True))
    bus.port_handler = SimpleNamespace(ser=line)
    health = Health(SimpleNamespace(bus=bus), SPEC, {})
    for took_s in (0.001, 0.05, 0.001):
        clock.now += 1.0
        health.check(AT, took_s)  # a register that is not answered is no lost bus
    assert bus.asked == len(cleared) == 2 and health.fault is None


@pytest.mark.parametrize(
    ("state", "before", "words"),
    [
        ([0.5, 0.5], None, ""),
        ([0.5, 0.5], [0.1, 0.5], ""),
        ([-51.45, 0.5], None, "elbow.pos reads -2948 degrees"),  # a status byte and its checksum
        ([0.9, 0.5], [-0.2, 0.5], "elbow.pos jumps by 63 degrees"),
        ([0.5, 9.0], None, "gripper.pos reads 900%"),
        ([np.nan, 0.5], None, "elbow.pos reads nan"),
    ],
)
def test_readings_that_cannot_be(state, before, words):
    before = None if before is None else np.array(before, np.float32)
    found = lerobot_health.impossible(SPEC, np.array(state, np.float32), before)
    assert found.startswith(words) and bool(found) == bool(words)


def test_a_slow_joint_is_not_stuck(clock):
    health = Health(SimpleNamespace(bus=Bus()), SPEC, {})
    health.commanded(np.array([0.9, 0.5], np.float32))
    for i in range(40):
        looked(health, clock, 1, np.array([0.013 * i, 0.5], np.float32))
        assert health.fault is None


def test_limits_of_what_is_not_there_are_refused():
    with pytest.raises(UserError, match="no action dimension 'knee'"):
        Health(SimpleNamespace(bus=Bus()), SPEC, {"knee.pos": 0.5})
    with pytest.raises(UserError, match="does not report loads"):
        Health(SimpleNamespace(), SPEC, {"elbow.pos": 0.5})

"""One of our drivers as a LeRobot robot: what stops it, and for how long."""

import logging
import time
from dataclasses import replace

import numpy as np
import pytest

from robot_drivers.as_lerobot import VlaRobot, VlaRobotConfig
from robot_drivers.as_lerobot import robot as module
from vla_stack.runtime.driver import Capabilities, Fault
from vla_stack.schema import Dim, Observation, RobotSpec

DIMS = (Dim("a.pos", "rad", -1.0, 1.0, 2.0, "angle"), Dim("x.vel", "m/s", -0.5, 0.5))


class Arm:
    """Goes where it is sent."""

    capabilities = Capabilities()
    spec = RobotSpec("arm", DIMS, DIMS, (), 10.0)

    def __init__(self):
        self.fault, self.age_s, self.stops, self.at = None, 0.0, 0, np.array([0.0, 0.0], np.float32)

    def connect(self): ...

    def read(self):
        return Observation(self.at, {}, "", 0, time.monotonic_ns() - round(self.age_s * 1e9))

    def write(self, action):
        self.at = action
        return action

    def hold(self): ...

    def stop(self):
        self.stops += 1
        self.fault = None  # as a guardian's trip is then over

    def disconnect(self): ...


@pytest.fixture
def arms(monkeypatch):
    """The arms that were made, the newest last."""
    made = []
    monkeypatch.setattr(module, "make_driver", lambda *_, **__: made.append(Arm()) or made[-1])
    return made


@pytest.fixture
def robot(arms, tmp_path):
    robot = VlaRobot(VlaRobotConfig(id="t", calibration_dir=tmp_path))
    robot.connect()
    return robot


def step(robot, a=0.9, x=0.3):
    robot.get_observation()
    return robot.send_action({"a.pos": a, "x.vel": x})


def test_a_stop_lasts_until_it_is_connected_again(arms, robot, caplog):
    sent = step(robot)
    arms[-1].fault = Fault("guardian", "it was silent", True)
    with caplog.at_level(logging.WARNING):
        stopped = [step(robot) for _ in range(4)]
    assert arms[-1].fault is None and arms[-1].stops == 1
    assert stopped == [{"a.pos": sent["a.pos"], "x.vel": 0.0}] * 4  # it stands where it is
    assert [r.getMessage() for r in caplog.records if "is stopped" in r.getMessage() and "it was silent" in r.message]
    assert len(caplog.records) == 1
    robot.disconnect()
    robot.connect()
    assert len(arms) == 2 and step(robot)["a.pos"] > 0.0


def test_a_fault_that_passes_and_readings_that_are_old_hold_it(arms, robot):
    before = step(robot)["a.pos"]
    arms[-1].fault = Fault("camera", "blind", False)
    assert step(robot)["a.pos"] == before
    arms[-1].fault = None
    assert step(robot)["a.pos"] > before
    before, arms[-1].age_s = arms[-1].at[0], 5.0
    assert [step(robot)["a.pos"] for _ in range(4)] == [before] * 4 and arms[-1].stops == 0
    step(robot)
    assert arms[-1].stops == 1


@pytest.mark.parametrize("simulated", [True, False])
def test_a_real_robot_starts_softly(arms, tmp_path, monkeypatch, simulated):
    monkeypatch.setattr(Arm, "capabilities", replace(Arm.capabilities, simulated=simulated))
    robot = VlaRobot(VlaRobotConfig(id="t", calibration_dir=tmp_path))
    robot.connect()
    whole = 2.0 / 10.0
    assert step(robot)["a.pos"] == pytest.approx(whole if simulated else whole / 10, rel=1e-5)

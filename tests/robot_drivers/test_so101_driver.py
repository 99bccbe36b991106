"""LeRobot's SO-101 driver behind ours, on a bus that is spoilt or lost: nothing is misread, and no motor let go."""

import os
import shutil
import threading
import time

import numpy as np
import pytest

from robot_drivers import make_driver
from robot_drivers.feetech_servo import REGISTERS, TICKS
from robot_drivers.lerobot_reopen import reopen
from robot_drivers.so101_emulator import Emulator
from robot_drivers.teleop import make_teleop
from vla_stack.errors import UserError
from vla_stack.runtime.driver import Guard

READINGS = 150
PATIENCE_S = 120.0
STEP_S = 0.01
TORQUE, GOAL = REGISTERS["torque_enable"].address, REGISTERS["goal"].address
SERVOS = range(6)
pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def arm(tmp_path):
    with Emulator(tmp_path / "arm", leader=True, image_size=0) as emulator:
        yield emulator


@pytest.fixture
def driver(arm):
    d = make_driver("lerobot", robot_type="so101_follower", rate_hz=30.0, **arm.device())
    d.connect()
    yield d
    d.disconnect()


def test_a_variant_that_is_none_is_named_and_the_arm_goes_on(arm):
    with pytest.raises(UserError, match="has no variant {'colour': 'mauve'}"):
        arm.reset(0, {"colour": "mauve"})
    assert arm.reset(0) and "success" in arm.status()


def in_steps():
    """The steps of a control loop, not as many as the processor does: the driver's own threads have work to do."""
    deadline, never = time.monotonic() + PATIENCE_S, threading.Event()
    while time.monotonic() < deadline:
        yield
        never.wait(STEP_S)
    pytest.fail(f"not within {PATIENCE_S:g} s")


def read_until(driver, done):
    for _ in in_steps():
        if done():
            return
        driver.read()


def test_spoilt_statuses_never_shift_readings_or_raise_alarms(arm, driver):
    rest = np.array(arm.status()["angles"]["follower"])
    arm.inject("corruption", 0.05)
    arm.inject("loss", 0.005)
    for _ in range(READINGS):
        state = driver.read().state
        assert np.abs(state[:5] - rest[:5]).max() < 0.01
        assert driver.fault is None or driver.fault.kind == "bus"
    counters = arm.status()["bus"]["follower"]
    arm.mend()
    assert counters["corrupted"] > READINGS * 0.05


@pytest.mark.parametrize(("fault", "value"), [("unplug", None), ("loss", 1.0)])
def test_motors_hold_while_their_bus_is_lost_and_opened_again(arm, driver, fault, value):
    driver.read()
    limp_s = arm.status()["limp_s"]["follower"]  # LeRobot switches the motors off while it connects
    at = np.array(arm.status()["angles"]["follower"])
    arm.inject(fault, value)
    read_until(driver, lambda: driver.fault is not None and driver.fault.stop)
    arm.mend()
    read_until(driver, lambda: driver.fault is None)
    assert driver.reconnects == 1
    assert arm.status()["limp_s"]["follower"] == limp_s
    np.testing.assert_allclose(arm.status()["angles"]["follower"], at, atol=0.01)
    goal = driver.read().state.copy()
    goal[0] += 0.3

    def arrived():
        if driver.fault is not None and driver.fault.kind == "guardian":
            driver.stop()  # a busy machine held this process up: armed again, as by a person
        driver.write(goal)  # again and again, or its guardian holds it
        return abs(driver.read().state[0] - goal[0]) < 0.02

    read_until(driver, arrived)


def test_motors_that_lost_their_power_are_switched_on_again(arm, driver):
    driver.read()
    arm.inject("power")
    read_until(driver, lambda: driver.fault is not None and driver.fault.stop)
    arm.mend()
    read_until(driver, lambda: driver.fault is None)
    limp_s = arm.status()["limp_s"]["follower"]
    driver.read()
    assert arm.status()["limp_s"]["follower"] == limp_s


def test_one_motor_that_is_off_among_others_is_switched_on_where_it_is(arm, driver, monkeypatch):
    robot = driver._robot
    robot.bus.disable_torque("elbow_flex", num_retry=5)
    at = np.array(arm.status()["angles"]["follower"])
    monkeypatch.setattr(robot, "configure", lambda: pytest.fail("this switches all motors off"))
    reopen(robot)
    assert all(robot.bus.read("Torque_Enable", motor, num_retry=5) for motor in robot.bus.motors)
    np.testing.assert_allclose(arm.status()["angles"]["follower"], at, atol=0.01)


def test_two_arms_are_one_robot_and_neither_is_let_go(tmp_path):
    with Emulator(tmp_path / "arm", leader=True, image_size=32, fps=10.0) as arm:
        for side, name in (("left", "follower"), ("right", "leader")):
            device = arm.device(name)
            shutil.copy(f"{device['calibration_dir']}/{device['id']}.json", tmp_path / f"pair_{side}.json")
        front, wrist = (arm.cameras[name] for name in ("front", "wrist"))
        driver = make_driver(
            "lerobot",
            robot_type="bi_so_follower",
            id="pair",
            calibration_dir=str(tmp_path),
            left_arm_config={"port": str(arm.ports["follower"]), "cameras": {"wrist": wrist}},
            right_arm_config={"port": str(arm.ports["leader"])},
            cameras={"front": front},
            max_load={"right_shoulder_pan.pos": 0.9},
        )
        driver.connect()
        assert {c.name for c in driver.spec.cameras} == {"front", "left_wrist"}
        dims = {d.name: d for d in driver.spec.action}
        assert 0.5 < dims["left_elbow_flex.pos"].high < 3.0 and dims["right_elbow_flex.pos"].high < 3.0
        obs = driver.read()
        obs.check(driver.spec)
        assert set(obs.image_t_ns) == {"front", "left_wrist"}
        limp = arm.status()["limp_s"]
        arm.inject("unplug", arm="leader")
        read_until(driver, lambda: driver.fault is not None and driver.fault.stop and driver.fault.kind == "bus")
        arm.mend()
        read_until(driver, lambda: driver.reconnects > 0)
        assert arm.status()["limp_s"] == limp
        arm.inject("heat", 2, arm="leader")
        read_until(driver, lambda: driver.fault is not None and driver.fault.kind == "motor")
        assert "right_elbow_flex" in driver.fault.why
        driver.disconnect()


def test_a_leader_that_was_unplugged_is_opened_again(arm, driver, capsys):
    leader = make_teleop("lerobot", driver.spec, "", teleop_type="so101_leader", **arm.device("leader"))
    leader.connect()
    assert leader.read(np.zeros(6)).engaged
    arm.inject("unplug", arm="leader")
    for _ in in_steps():
        if not leader.read(np.zeros(6)).engaged and leader.trouble:
            break
    assert "so101_leader is lost" in leader.trouble and "the robot holds" in capsys.readouterr().err
    arm.mend()
    for _ in in_steps():
        if leader.read(np.zeros(6)).engaged:
            break
    assert leader.trouble == ""
    leader.disconnect()


def torque_off(arm):
    return [w for w in arm.written() if w[2] <= TORQUE < w[2] + len(w[3]) and not w[3][TORQUE - w[2]]]


def test_a_program_that_ends_leaves_the_arm_held_and_the_next_one_takes_it_so(arm):
    options = {"robot_type": "so101_follower", "rate_hz": 30.0, **arm.device()}
    first, second = (make_driver("lerobot", **options) for _ in range(2))
    first.connect()
    before = len(torque_off(arm))  # LeRobot configures servos that have no torque yet
    first.disconnect()
    second.connect()
    assert second.capabilities.guard is Guard.GUARDIAN
    second.read()
    second.disconnect()
    assert len(torque_off(arm)) == before
    second.release()
    assert len(torque_off(arm)) == before + len(SERVOS)


def test_one_program_drives_an_arm_and_another_is_told_which(arm, driver):
    options = {"robot_type": "so101_follower", "rate_hz": 30.0, **arm.device()}
    second = make_driver("lerobot", **options)
    driver.read()
    count = len(arm.written())
    with pytest.raises(UserError, match=f"follower is in use by process {os.getpid()} -- end that program"):
        second.connect()
    leader = make_teleop("lerobot", driver.spec, "", teleop_type="so101_leader", **arm.device())
    with pytest.raises(UserError, match=f"is in use by process {os.getpid()}"):
        leader.connect()
    assert len(arm.written()) == count
    arm.inject("unplug")
    read_until(driver, lambda: driver._lost)
    arm.mend()
    read_until(driver, lambda: not driver._lost)
    with pytest.raises(UserError, match="is in use by"):  # opened again it is claimed again
        second.connect()
    second.release()
    assert len(torque_off(arm)) >= len(SERVOS)
    driver.disconnect()
    second.disconnect()
    second.connect()  # it was left
    second.disconnect()


def test_a_trip_is_a_fault_that_stops_and_no_command_is_sent_before_the_stop(arm, driver):
    rest = driver.read().state
    goal = rest.copy()
    goal[0] += 0.1
    driver.write(goal)
    for _ in in_steps():
        if driver.fault is not None:  # nobody beats
            break
    assert driver.fault.kind == "guardian" and driver.fault.stop and "was silent for" in driver.fault.why
    count = len(arm.written())
    driver.write(goal + 0.1)
    newer = [w for w in arm.written()[count:] if w[2] == GOAL]
    assert all(abs(int.from_bytes(w[3], "little") - w[4]) < TICKS // 100 for w in newer)  # the guardian's, if any
    driver.stop()
    assert driver.fault is None
    read_until(driver, lambda: abs(driver.write(goal)[0] - goal[0]) < 1e-2)


def test_a_base_is_told_to_stand_still_when_its_driver_ends(tmp_path):
    with Emulator(tmp_path / "arm", image_size=0, base=True) as arm:
        driver = make_driver("lerobot", robot_type="lekiwi", rate_hz=30.0, cameras={}, **arm.device())
        driver.connect()
        assert driver.capabilities.guard is Guard.GUARDIAN
        ahead = driver.read().state.copy()
        ahead[[d.name for d in driver.spec.action].index("x.vel")] = 0.3
        read_until(driver, lambda: driver.write(ahead) is not None and arm.status()["velocity"][0] > 0.25)
        driver.disconnect()
        for _ in in_steps():
            if abs(arm.status()["velocity"][0]) <= 1e-3:
                break


@pytest.fixture
def rolling(tmp_path):
    """A LeKiwi that drives ahead, and its driver."""
    with Emulator(tmp_path / "arm", image_size=0, base=True) as arm:
        driver = make_driver("lerobot", robot_type="lekiwi", rate_hz=30.0, cameras={}, **arm.device())
        driver.connect()
        ahead = driver.read().state.copy()
        ahead[[d.name for d in driver.spec.action].index("x.vel")] = 0.3
        for _ in in_steps():
            if driver.fault is not None:
                driver.stop()  # a busy machine held this process up
            driver.read(), driver.write(ahead), driver.beat()
            if arm.status()["velocity"][0] > 0.25:
                break
        yield arm, driver
        arm.mend()
        driver.disconnect()


def test_a_stop_whose_answers_are_all_spoilt_stops_the_base_and_holds_the_arm_once_it_is_heard(rolling):
    arm, driver = rolling
    arm.inject("corruption", 1.0)
    count = len(arm.written())
    driver.stop()
    for _ in in_steps():  # nothing is said to it any more
        driver.beat()
        if abs(arm.status()["velocity"][0]) <= 1e-3:
            break
    assert driver._rest_due
    arm.mend()
    read_until(driver, lambda: driver.beat() or not driver._rest_due)
    last = {
        i: (int.from_bytes(data, "little"), at) for _, i, address, data, at in arm.written()[count:] if address == GOAL
    }
    assert set(last) == {1, 2, 3, 4, 5, 6} and all(abs(goal - at) < TICKS // 100 for goal, at in last.values())


def test_a_base_on_a_bus_that_was_lost_is_stopped_though_its_motors_are_not_heard(rolling):
    arm, driver = rolling
    arm.inject("corruption", 1.0)
    read_until(driver, lambda: driver.beat() or driver._lost)
    driver.stop()
    for _ in in_steps():
        driver.beat()
        if abs(arm.status()["velocity"][0]) <= 1e-3:
            break
    assert driver._lost and driver.reconnects == 0

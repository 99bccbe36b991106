"""The LeRobot adapter on a robot without hardware: units, order, limits, failures."""

import threading
import time

import cv2
import lerobot_dummy
import numpy as np
import pytest

from robot_drivers import make_driver
from vla_stack.errors import UserError
from vla_stack.runtime.driver import EpisodicDriver, Guard

PATIENCE_S = 60.0


@pytest.fixture
def driver(tmp_path):
    d = make_driver(
        "lerobot",
        robot_type="vla_dummy",
        module="lerobot_dummy",
        port="x",
        task="wave",
        rate_hz=1.0,
        calibration_dir=str(tmp_path),
    )
    d.connect()
    yield d
    d.disconnect()


def test_description_comes_from_the_features(driver):
    shoulder, gripper = driver.spec.action
    assert driver.spec.name == "lerobot/vla_dummy"
    assert (shoulder.name, shoulder.unit, shoulder.kind) == ("shoulder.pos", "rad", "angle")
    assert shoulder.high == -shoulder.low == pytest.approx(np.pi / 2, abs=1e-3)  # half of 2047 of 4095 ticks
    assert (gripper.unit, gripper.low, gripper.high, gripper.kind) == ("ratio", 0.0, 1.0, "gripper")
    assert [d.name for d in driver.spec.state] == ["shoulder.pos", "gripper.pos"]
    assert [(c.name, c.height, c.width) for c in driver.spec.cameras] == [("top", 4, 6)]  # depth is not a picture
    assert not isinstance(driver, EpisodicDriver)


def test_readings_are_si(driver):
    obs = driver.read()
    obs.check(driver.spec)
    np.testing.assert_allclose(obs.state, [np.pi / 2, 0.5], rtol=1e-6)
    assert obs.task == "wave" and obs.images["top"][0, 0, 0] == 7


def test_commands_are_converted_and_what_was_sent_comes_back(driver):
    sent = driver.write(np.array([-np.pi / 4, 1.0], np.float32))
    assert driver._robot.actions[-1] == pytest.approx({"shoulder.pos": -45.0, "gripper.pos": 100.0}, rel=1e-6)
    np.testing.assert_allclose(sent, [-np.pi / 4, 1.0], rtol=1e-6)
    clipped = driver.write(np.array([np.pi, 1.0], np.float32))  # the robot itself stops at 100 degrees
    assert clipped[0] == pytest.approx(np.deg2rad(100.0))


def test_hold_and_stop_command_where_it_is(driver):
    driver.hold()
    driver.stop()
    assert driver._robot.actions == [{"shoulder.pos": 90.0, "gripper.pos": 50.0}] * 2


def test_a_failed_reading_is_the_last_one_with_its_age(driver):
    first = driver.read()
    driver._robot.broken = True
    again = driver.read()
    assert again.t_capture_ns == first.t_capture_ns
    assert driver.read_errors == 1


def test_a_reading_that_cannot_be_is_a_failed_one(driver):
    first = driver.read()
    driver._robot.at["shoulder.pos"] = -2948.0
    assert driver.read() is first and driver.read_errors == 1
    driver.hold()  # and nobody is sent there
    assert driver._robot.actions == []


def test_without_any_reading_a_failure_is_a_failure(driver):
    driver._robot.broken = True
    with pytest.raises(UserError, match="cannot be read: incorrect status packet"):
        driver.read()
    driver._robot.broken = False


def test_a_bus_that_is_lost_stops_the_robot_and_is_opened_again(driver):
    driver.read()
    driver._robot.broken = driver._robot.gone = True
    faults = []
    for _ in range(4):
        driver.read()
        faults.append(driver.fault)
    assert faults[0] is None and not faults[1].stop  # one miss is a reading a step older
    assert faults[1].why == "vla_dummy does not answer: incorrect status packet"
    assert faults[-1].stop and "trying to reconnect" in faults[-1].why
    driver._robot.broken = driver._robot.gone = False
    deadline = time.monotonic() + PATIENCE_S
    while driver.fault is not None:
        assert time.monotonic() < deadline
    assert driver.reconnects == 1 and driver.read().state[0] == pytest.approx(np.pi / 2)


def test_a_robot_is_never_disconnected_because_it_is_lost(driver):
    """LeRobot's ``disconnect`` switches the motors off."""
    robot = driver._robot
    driver.read()
    robot.broken, robot.error = True, OSError("input/output error")
    driver.read()
    assert driver.fault.stop
    robot.broken = False
    deadline = time.monotonic() + PATIENCE_S
    while driver.fault is not None:
        assert time.monotonic() < deadline
    assert robot.disconnects == 0
    assert robot.actions[-1] == robot.at  # it is told to stay where it is


def test_a_picture_that_is_late_is_one_failed_reading(driver):
    first = driver.read()
    driver._robot.broken, driver._robot.error = True, TimeoutError("latest frame is too old")
    assert driver.read() is first and driver.fault is None
    driver._robot.broken = False
    driver.read()
    assert driver.fault is None and driver.reconnects == driver._robot.disconnects == 0


def test_a_command_that_is_not_sent_is_not_returned_as_sent(driver):
    driver.read()
    driver._robot.deaf = True
    np.testing.assert_allclose(driver.write(np.array([0.0, 0.0], np.float32)), [np.pi / 2, 0.5])  # where it is
    driver._robot.deaf = False
    sent = driver.write(np.array([-0.5, 1.0], np.float32))
    driver._robot.deaf = True
    np.testing.assert_array_equal(driver.write(np.array([0.5, 0.0], np.float32)), sent)
    driver._robot.deaf = False
    taken, done = threading.Event(), threading.Event()

    def use_the_bus():
        with driver._lock:
            taken.set()
            done.wait()

    other = threading.Thread(target=use_the_bus)
    other.start()
    taken.wait()
    np.testing.assert_array_equal(driver.write(np.array([0.5, 0.0], np.float32)), sent)
    done.set()
    other.join()
    driver.hold()  # a command too
    driver._robot.deaf = True
    np.testing.assert_allclose(driver.write(np.array([0.5, 0.0], np.float32)), sent, atol=1e-6)


def test_a_robot_that_answers_but_takes_no_commands_is_at_fault(driver):
    driver._robot.deaf = True
    faults = []
    for _ in range(3):
        driver.read()
        driver.write(np.array([0.5, 0.0], np.float32))
        faults.append(driver.fault)
    assert faults[0] is None
    assert faults[1] == ("bus", "vla_dummy takes no commands: port is in use", False)
    assert faults[2].stop
    driver._robot.deaf = False
    deadline = time.monotonic() + PATIENCE_S
    while driver.fault is not None:
        assert time.monotonic() < deadline
    assert driver.reconnects == 1


def test_commands_that_are_taken_again_are_found_though_nobody_writes_meanwhile(driver):
    driver._robot.deaf = True
    driver.read()
    for _ in range(2):
        driver.write(np.array([0.5, 0.0], np.float32))
    assert driver.fault is not None
    driver._robot.deaf = False
    driver.read()
    assert driver.fault is None and driver._robot.actions == [driver._robot.at]


def test_a_robot_whose_motors_no_guardian_can_reach_says_so(driver):
    assert driver.capabilities.guard is Guard.NONE and "NOT GUARDED" in driver.capabilities.guard.value
    with pytest.raises(UserError, match="cannot be released"):
        driver.release()


def test_degrees_are_chosen_where_nobody_chose(driver):
    assert driver._robot.config.use_degrees and driver._robot.config.hand.use_degrees


def test_cameras_are_taken_over_stamped_and_resized(tmp_path):
    film = tmp_path / "film.avi"
    writer = cv2.VideoWriter(str(film), cv2.VideoWriter.fourcc(*"MJPG"), 100, (32, 24))
    for value in range(0, 200, 20):
        writer.write(np.full((24, 32, 3), value, np.uint8))
    writer.release()
    driver = make_driver(
        "lerobot",
        robot_type="vla_dummy",
        module="lerobot_dummy",
        port="x",
        calibration_dir=str(tmp_path),
        cameras={"side": {"type": "video", "path": str(film)}},
        image_size=16,
    )
    before = time.monotonic_ns()
    driver.connect()
    assert [(c.name, c.height, c.width) for c in driver.spec.cameras] == [("top", 16, 16), ("side", 16, 16)]
    obs = driver.read()
    obs.check(driver.spec)
    assert before <= obs.image_t_ns["side"] <= driver._streams["side"].newest().t_ns
    assert "top" not in obs.image_t_ns  # the robot's own, taken with its joints
    assert (obs.images["side"][0] == 0).all() and obs.images["top"][8, 8, 0] == 7  # bars above and below
    driver.disconnect()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"robot_type": "no_such_arm"}, "knows no robot 'no_such_arm'.*so101_follower"),
        ({"port": "nowhere"}, "cannot be connected: no such port -- check port"),
        ({"calibrated": False}, "not calibrated -- run: vla robot calibrate"),
        ({"prt": "x"}, "vla_dummy has no option 'prt' -- the nearest option is 'port'"),
        ({"cameras": "side"}, "cameras='side' does not describe cameras -- write --robot.cameras="),
        ({"use_degrees": False}, "use_degrees=False"),
        ({"hand": {"use_degrees": False}}, "use_degrees=False"),
        ({"robot_type": "hope_jr_arm"}, "hope_jr_arm: motor 'shoulder_pitch' speaks percent .* no degrees for it"),
        ({"max_load": {"shoulder.pos": 0.5}}, "does not report loads"),
        ({"cameras": {"side": {"type": "video", "path": "none.mp4"}}}, "camera 'side': none.mp4 cannot be played"),
        ({"cameras": {"side": {"type": "video", "file": "x"}}}, "camera 'side': .*file"),
        ({"units": {"shoulder.pos": "turns"}}, "unit of 'shoulder.pos' is unknown"),
    ],
)
def test_mistakes_are_one_clear_line(config, words, tmp_path):
    base = {"robot_type": "vla_dummy", "module": "lerobot_dummy", "port": "x", "calibration_dir": str(tmp_path)}
    with pytest.raises(UserError, match=words):
        make_driver("lerobot", **(base | config)).connect()


def test_an_answer_that_is_lost_while_it_connects_is_asked_for_again(tmp_path, monkeypatch):
    asked = []

    def is_calibrated(self):
        asked.append(self.is_connected)
        if len(asked) < 3:
            raise ConnectionError("there is no status packet")
        return True

    monkeypatch.setattr(lerobot_dummy.Dummy, "is_calibrated", property(is_calibrated))
    monkeypatch.setattr("robot_drivers.lerobot_robot.DRAIN_S", 0.0)
    driver = make_driver(
        "lerobot", robot_type="vla_dummy", module="lerobot_dummy", port="x", calibration_dir=str(tmp_path)
    )
    driver.connect()
    assert asked == [True] * 3
    driver.disconnect()


def test_unknown_drivers_and_arguments():
    with pytest.raises(UserError, match="there is no robot 'so101_follower'.*--robot.type=so101_follower"):
        make_driver("so101_follower")
    with pytest.raises(UserError, match="robot 'replay' has no option 'rot' -- the nearest option is 'root'"):
        make_driver("replay", rot="data")
    with pytest.raises(UserError, match="robot 'lerobot': .*robot_type"):
        make_driver("lerobot")

"""Percent of a range is never read as an angle, nor an angle as percent."""

from types import SimpleNamespace

import numpy as np
import pytest
from lerobot.motors import MotorNormMode

from robot_drivers.lerobot_units import calibrated_range, check_units, describe
from vla_stack.errors import UserError

DEG, PERCENT, SIGNED = MotorNormMode.DEGREES, MotorNormMode.RANGE_0_100, MotorNormMode.RANGE_M100_100


def arm(**modes):
    """A LeRobot device whose motors speak so; its first two are features."""
    motors = {name: SimpleNamespace(norm_mode=mode, model="m") for name, mode in modes.items()}
    bus = SimpleNamespace(motors=motors, model_resolution_table={"m": 4096})
    calibration = {name: SimpleNamespace(range_min=1024, range_max=3071) for name in motors}
    features = {f"{name}.pos": float for name in list(modes)[:2]}
    return SimpleNamespace(bus=bus, calibration=calibration, action_features=features)


def pair(left, right):
    features = {f"{p}{n}": float for p, a in (("left_", left), ("right_", right)) for n in a.action_features}
    return SimpleNamespace(left_arm=left, right_arm=right, action_features=features)


GOOD = arm(elbow=DEG, gripper=PERCENT, base_wheel=SIGNED)  # a wheel has no position
CAN = SimpleNamespace(
    bus=object(),
    config=SimpleNamespace(joint_limits={"elbow": (-80.0, 9.0), "gripper": (-65.0, 0.0)}),
    action_features={"elbow.pos": float, "gripper.pos": float},
)
GLOVE = SimpleNamespace(joints={"thumb": SIGNED}, action_features={"thumb.pos": float})


def test_degrees_and_opening_ratios_are_accepted():
    check_units(GOOD, "arm", {})
    check_units(pair(GOOD, GOOD), "arms", {})
    check_units(arm(finger=PERCENT), "hand", {"finger.pos": "percent"})
    check_units(CAN, "can", {"gripper.pos": "deg"})
    check_units(SimpleNamespace(action_features={"x.vel": float}), "base", {})


@pytest.mark.parametrize(
    ("device", "units", "words"),
    [
        (arm(elbow=SIGNED, gripper=PERCENT), {}, "arm: motor 'elbow' speaks percent .* use a device that has"),
        (arm(elbow=SIGNED), {"elbow.pos": "percent"}, "motor 'elbow' speaks percent"),  # it is no ratio in [0, 1]
        (arm(elbow=DEG, gripper=SIGNED), {}, "motor 'gripper' speaks percent"),
        (arm(finger=PERCENT), {}, "motor 'finger' speaks percent.*units={'finger.pos': percent}"),
        (
            arm(elbow=DEG, gripper=DEG),
            {},
            "motor 'gripper' speaks degrees, not percent -- give units={'gripper.pos': d",
        ),
        (pair(GOOD, arm(elbow=SIGNED)), {}, "motor 'right_elbow' speaks percent"),
        (CAN, {}, "motor 'gripper' speaks degrees"),
        (GLOVE, {}, "motor 'thumb' speaks percent"),
    ],
)
def test_what_would_be_misread_is_refused(device, units, words):
    with pytest.raises(UserError, match=words):
        check_units(device, "arm", units)


def test_ranges_of_both_arms_and_of_arms_with_fixed_limits():
    for name in ("left_elbow.pos", "right_elbow.pos"):
        low, high = calibrated_range(pair(GOOD, GOOD), name)
        assert high == -low == pytest.approx(np.pi / 2, abs=1e-3)
    assert calibrated_range(CAN, "elbow.pos") == pytest.approx(np.deg2rad([-80.0, 9.0]))


def test_velocities_are_bounded_where_nobody_says_otherwise():
    """By what LeRobot's LeKiwi makes of any command, give or take a rounding."""
    from lerobot.robots.lekiwi import LeKiwi

    wheels = {"x.vel": "m/s", "y.vel": "m/s", "theta.vel": "rad/s"}
    for name, unit in wheels.items():
        dim = describe(name, {}, {}, 2.0, (-1.0, 1.0))
        told = [100.0 * (name == key) for key in wheels]
        raw = LeKiwi._body_to_wheel_raw(LeKiwi, *told[:2], 100 * told[2])
        got = LeKiwi._wheel_raw_to_body(LeKiwi, *raw.values())[name] * (np.pi / 180 if unit == "rad/s" else 1.0)
        assert dim.unit == unit and dim.high == -dim.low and got <= dim.high * 1.001 < 1.2 * got
    assert describe("x.vel", {}, {"x.vel": (-1.0, 2.0)}, 2.0, (0.0, 0.0)).high == 2.0


def test_a_gripper_in_degrees_is_a_joint_with_its_own_range():
    dim = describe("gripper.pos", {"gripper.pos": "deg"}, {}, 2.0, calibrated_range(CAN, "gripper.pos"))
    assert (dim.unit, dim.kind) == ("rad", "angle")
    assert (dim.low, dim.high) == pytest.approx((np.deg2rad(-65.0), 0.0))

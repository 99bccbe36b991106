"""Which robot a command line means."""

import argparse

import pytest

from robot_drivers.simulated import SimulatedRobot
from vla_stack.errors import UserError
from vla_stack.runtime.executor import ExecutorConfig
from vla_stack.verbs.robot_arguments import (
    add_execution_arguments,
    add_robot_arguments,
    driver_arguments,
    driver_maker,
    execution,
    robot_safety,
    translate_flags,
)


def arguments(*text: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_robot_arguments(parser)
    return parser.parse_args(translate_flags(text))


def test_lerobots_flags_are_ours():
    args = arguments(
        "--robot.type=so101_follower", "--robot.port=/dev/ttyACM0", "--robot.cameras={front: {type: opencv, fps: 30}}"
    )
    assert args.robot == "lerobot"
    assert driver_arguments(args) == {
        "robot_type": "so101_follower",
        "port": "/dev/ttyACM0",
        "cameras": {"front": {"type": "opencv", "fps": 30}},
    }
    assert translate_flags(["--teleop.type=so101_leader", "--root", "x"]) == [
        "--teleop", "lerobot", "--teleop-arg", "teleop_type=so101_leader", "--root", "x",
    ]  # fmt: skip


def test_a_flag_without_a_value_says_how_it_is_written():
    with pytest.raises(UserError, match=r"--robot.port: there is no '=' -- write --robot.port=/dev/ttyACM0"):
        translate_flags(["--robot.port", "/dev/ttyACM0"])


def test_options_of_a_robot_come_from_a_file(tmp_path):
    file = tmp_path / "arm.txt"
    file.write_text(
        "# the arm at the window\n--robot.type=so101_follower\n\n  --robot.cameras={front: {fps: 30}}\n--task=tidy up\n"
    )
    args = arguments(f"@{file}", "--robot-arg", "rate_hz=10")
    assert driver_arguments(args) == {
        "robot_type": "so101_follower",
        "cameras": {"front": {"fps": 30}},
        "rate_hz": 10,
        "task": "tidy up",
    }


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "arm.txt: No such file or directory -- @FILE stands for"),
        ("--robot.type=so101_follower\nport=/dev/ttyACM0\n", "arm.txt, line 2: 'port=/dev/ttyACM0' is no option"),
        (b"\xff\xfe", "arm.txt: not a text"),
    ],
)
def test_a_file_of_options_that_is_none_is_named(tmp_path, text, why):
    file = tmp_path / "arm.txt"
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=why):
        arguments(f"@{file}")


def test_real_robots_start_softly_and_limits_reach_the_driver(tmp_path):
    assert robot_safety(arguments()).soft_start_s == 0.0
    assert robot_safety(arguments("--robot", "lerobot")).soft_start_s == 1.0
    limits = tmp_path / "limits.yaml"
    limits.write_text("robot: x\ndimensions: {a.pos: {max_rate: 1, max_load: 0.5}}\n")
    args = arguments("--robot", "lerobot", "--limits", str(limits))
    assert robot_safety(args).max_rate == {"a.pos": 1.0} and robot_safety(args).robot == "x"
    assert robot_safety(args).soft_start_s == 1.0
    assert driver_arguments(args)["max_load"] == {"a.pos": 0.5}
    with pytest.raises(UserError, match="reports no loads"):
        driver_arguments(arguments("--limits", str(limits)))
    assert robot_safety(arguments("--limits", str(limits))).soft_start_s == 0.0
    limits.write_text("robot: x\nsoft_start_s: 0\n")
    assert robot_safety(args).soft_start_s == 0.0  # the file says so


def test_a_dry_run_sends_nothing():
    made = driver_maker(arguments("--task", "place"), dry=True)()
    assert isinstance(made, SimulatedRobot)
    made.hold()  # would raise: it is not connected


def test_execution_is_said_alike_under_either_flag():
    parser = argparse.ArgumentParser()
    add_robot_arguments(parser)
    add_execution_arguments(parser, "--execution")
    words = ["--robot", "lerobot", "--execution", "rtc", "--interpolate", "4", "--execute", "5", "--hold-s", "0.3"]
    args = parser.parse_args(words)
    assert execution(args, args.execution, 7) == ExecutorConfig("rtc", 5, hold_s=0.3, interpolate=4, seed=7)
    for robot in ("sim", "remote", "replay"):
        with pytest.raises(UserError, match=f"'{robot}' takes one command a control step"):
            execution(parser.parse_args(["--robot", robot, "--interpolate", "4"]), "rtc")

"""What a hand asks for becomes a robot's commands: keys, sticks, leader arms, recorded episodes."""

import os
import pty
import time
from types import SimpleNamespace

import numpy as np
import pytest

from robot_drivers import teleop_keyboard
from robot_drivers.teleop import Axes, ToolControl, make_teleop
from robot_drivers.teleop_gamepad import Gamepad
from robot_drivers.teleop_keyboard import CHAIN_S, Keyboard, _keys
from sim.arm import ARM7
from vla_stack.errors import UserError
from vla_stack.schema import Dim, RobotSpec

TOOL = ARM7.spec("ee_abs", (), 0, 10.0)
JOINTS = ARM7.spec("joint_abs", (), 0, 10.0)
PATIENCE_S = 20.0


@pytest.fixture
def terminal():
    ours, theirs = pty.openpty()
    yield SimpleNamespace(type=lambda text: os.write(ours, text.encode()), fd=theirs)
    os.close(ours)
    os.close(theirs)


def typed(keyboard: Keyboard, terminal, text: str) -> Axes:
    """The axes once the terminal has passed the characters on."""
    terminal.type(text)
    deadline = time.monotonic() + PATIENCE_S
    while not set(_keys(text)) <= set(keyboard._seen):
        assert time.monotonic() < deadline
        axes = keyboard.axes()
    return axes


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=10.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(teleop_keyboard, "time", clock)
    return clock


UP, RIGHT = "\x1b[A", "\x1bOC"


def test_keys_move_while_they_are_held_after_a_space_and_no_longer(terminal, clock):
    keyboard = Keyboard(terminal.fd)
    keyboard.connect()
    assert not typed(keyboard, terminal, f"{UP}e").engaged  # without the dead-man nothing moves
    axes = typed(keyboard, terminal, " ")
    assert axes.engaged and axes.tool.tolist() == [1, 0, 0, 0, 0, 0] and axes.gripper == 1.0
    clock.now += 0.9 * CHAIN_S
    assert not keyboard.axes().engaged
    axes = typed(keyboard, terminal, RIGHT)  # the terminal repeats this key alone now: Space is over
    assert axes.engaged and axes.tool.tolist() == [0, -1, 0, 0, 0, 0]
    clock.now += 0.1
    assert keyboard.axes().engaged
    clock.now += 0.1
    axes = keyboard.axes()
    assert not axes.engaged and not axes.tool.any()
    clock.now += CHAIN_S
    assert not typed(keyboard, terminal, "q").engaged
    keyboard.disconnect()


def test_opposite_keys_cancel_and_keys_say_what_the_key_map_says(terminal, clock):
    keyboard = Keyboard(terminal.fd)
    keyboard.connect()
    for text, event in (("\x1b", "estop"), ("s", "success"), ("f", "end"), ("x", "discard"), ("\r", "rearm")):
        terminal.type(text)
        axes, deadline = keyboard.axes(), time.monotonic() + PATIENCE_S
        while not axes.event:
            assert time.monotonic() < deadline
            axes = keyboard.axes()
        assert axes.event == event
    axes = typed(keyboard, terminal, " qa")
    assert axes.engaged and not axes.tool.any()
    keyboard.disconnect()


@pytest.mark.parametrize("key", ["\x1b[H", "\x1b[3~", "\x1bOP", "\x1b[1;5C"])  # Home, Delete, F1, Ctrl+arrow
def test_a_function_key_is_neither_a_stop_nor_the_letters_in_it(terminal, key):
    keyboard = Keyboard(terminal.fd)
    keyboard.connect()
    terminal.type(key)
    events, deadline = [], time.monotonic() + PATIENCE_S
    terminal.type("m")  # says nothing, but that what came before it has been read
    while "m" not in keyboard._seen:
        assert time.monotonic() < deadline
        events.append(keyboard.axes().event)
    assert not any(events) and set(keyboard._seen) <= {"m", "arrowright"}
    keyboard.disconnect()


def test_a_keyboard_needs_a_terminal():
    read, write = os.pipe()
    with pytest.raises(UserError, match="needs a terminal"):
        Keyboard(read).connect()
    os.close(read)
    os.close(write)


class Pad:
    def __init__(self, axes, buttons=(), hat=(0, 0)):
        self.axes, self.buttons, self.hat = axes, set(buttons), hat

    def get_axis(self, i):
        return self.axes.get(i, -1.0 if i in (2, 5) else 0.0)

    def get_button(self, i):
        return i in self.buttons

    def get_numhats(self):
        return 1

    def get_hat(self, i):
        return self.hat


def test_sticks_have_a_deadzone_and_the_bumper_is_the_dead_man():
    gamepad = Gamepad()
    gamepad._pygame = SimpleNamespace(event=SimpleNamespace(pump=lambda: None))
    gamepad._pad = Pad({0: 0.05, 1: -1.0, 2: 1.0}, buttons=[4], hat=(0, 1))
    axes = gamepad.axes()
    assert axes.engaged and axes.tool.tolist() == [1.0, 0.0, 0.0, 0.0, 1.0, 0.0] and axes.gripper == 1.0
    gamepad._pad = Pad({}, buttons=[0])
    assert (gamepad.axes().event, gamepad.axes().event) == ("success", "")  # a press counts once
    assert not gamepad.axes().engaged


class Hand:
    HELP = ""

    def __init__(self, tool, gripper=0.0):
        self._axes = Axes(True, np.array(tool, np.float64), gripper)

    def axes(self):
        return self._axes


def test_axes_move_the_tool_of_a_robot_that_takes_tool_commands():
    intent = ToolControl(Hand([1, 0, -1, 0, 0, 1], -1.0), TOOL).read(np.zeros(5))
    np.testing.assert_allclose(intent.velocity, [0.15, 0, -0.15, 0.8, -1.5])


def test_axes_move_the_tool_of_a_robot_that_takes_joint_commands():
    home = np.append(ARM7.posture, 1.0)
    control = ToolControl(Hand([0, 1, 0, 0, 0, 0], 1.0), JOINTS, "arm7")
    velocity = control.read(home).velocity
    np.testing.assert_allclose(control._kinematics.jacobian(home)[:3] @ velocity[:7], [0, 0.15, 0], atol=1e-6)
    assert velocity[7] == 1.5


def test_without_a_model_axes_turn_joints():
    velocity = ToolControl(Hand([0, 0, 1, 0, 0, 0]), JOINTS).read(np.append(ARM7.posture, 1.0)).velocity
    np.testing.assert_allclose(velocity, [0, 0, 0.5, 0, 0, 0, 0, 0])


def test_wheels_take_no_axis_of_a_joint():
    joints = tuple(Dim(f"joint_{i}.pos", "rad") for i in range(5))
    base = (Dim("x.vel", "m/s"), Dim("y.vel", "m/s"), Dim("theta.vel", "rad/s"))
    dims = (*joints, Dim("gripper.pos", "ratio", kind="gripper"), *base)
    control = ToolControl(Hand([1] * 6, 1.0), RobotSpec("mobile", dims, dims, (), 30.0))
    np.testing.assert_allclose(control.read(np.zeros(9)).velocity, [0.5] * 5 + [1.5] + [0.0] * 3)
    assert "x.vel, y.vel, theta.vel are not driven by hand" in control.HELP
    with pytest.raises(UserError, match="base has no joint that an axis could turn"):
        ToolControl(Hand([1] * 6), RobotSpec("base", base, base, (), 30.0))


def test_a_leader_says_where_to_be_in_si_and_a_lost_one_disengages(tmp_path):
    dims = (Dim("shoulder.pos", "rad"), Dim("gripper.pos", "ratio", kind="gripper"))
    robot = RobotSpec("lerobot/vla_dummy", dims, dims, (), 30.0)
    options = {"teleop_type": "vla_dummy_leader", "module": "lerobot_dummy", "calibration_dir": str(tmp_path)}
    leader = make_teleop("lerobot", robot, **options)
    leader.connect()
    np.testing.assert_allclose(leader.read(np.zeros(2)).target, [np.pi / 4, 0.25])
    leader._leader.broken = True
    assert [leader.read(np.zeros(2)).engaged for _ in range(5)] == [True, True, True, False, False]
    leader.disconnect()


def test_a_leaders_reading_that_cannot_be_is_no_target(tmp_path):
    dims = (Dim("shoulder.pos", "rad", -2, 2), Dim("gripper.pos", "ratio", 0, 1, kind="gripper"))
    robot = RobotSpec("lerobot/vla_dummy", dims, dims, (), 30.0)
    options = {"teleop_type": "vla_dummy_leader", "module": "lerobot_dummy", "calibration_dir": str(tmp_path)}
    leader = make_teleop("lerobot", robot, **options)
    leader.connect()
    first = leader.read(np.zeros(2)).target
    for shoulder, gripper in ((-2948.0, 25.0), (45.0, 900.0)):  # an answer to another question
        leader._leader.at = {"shoulder.pos": shoulder, "gripper.pos": gripper}
        np.testing.assert_array_equal(leader.read(np.zeros(2)).target, first)
    leader._leader.at = {"shoulder.pos": 46.0, "gripper.pos": 25.0}
    assert leader.read(np.zeros(2)).target[0] == pytest.approx(np.deg2rad(46.0))
    leader._last_s = np.inf  # just now
    leader._leader.at = {"shoulder.pos": 110.0, "gripper.pos": 25.0}
    assert leader.read(np.zeros(2)).target[0] == pytest.approx(np.deg2rad(46.0))
    leader.disconnect()


def test_a_leader_that_speaks_another_unit_than_the_robot_is_refused(tmp_path):
    dims = (Dim("shoulder.pos", "m", -2, 2),)
    options = {"teleop_type": "vla_dummy_leader", "module": "lerobot_dummy", "calibration_dir": str(tmp_path)}
    with pytest.raises(UserError, match="vla_dummy_leader gives 'shoulder.pos' in rad, r takes m"):
        make_teleop("lerobot", RobotSpec("r", dims, dims, (), 30.0), **options)
    with pytest.raises(UserError, match="has no 'knee.pos'"):
        make_teleop("lerobot", RobotSpec("x", dims, (Dim("knee.pos", "rad"),), (), 30.0), **options).connect()


@pytest.mark.parametrize(
    ("name", "kwargs", "words"),
    [
        ("so101_leader", {}, "there is no teleoperator 'so101_leader'.*--teleop.type=so101_leader"),
        ("gamepad", {"indx": 1}, "teleoperator 'gamepad': .*indx"),
        ("lerobot", {"teleop_type": "nobody"}, "LeRobot knows no teleoperator 'nobody'.*so101_leader"),
    ],
)
def test_mistakes_are_one_clear_line(name, kwargs, words):
    with pytest.raises(UserError, match=words):
        make_teleop(name, TOOL, **kwargs)

"""``vla robot`` and ``vla teleop`` on the simulated arm: what they print, write and record."""

import time

import numpy as np
import pytest
import yaml

from robot_drivers.jog import Jogged, jog
from vla_stack import registry
from vla_stack.cli import main
from vla_stack.data.dataset import open_dataset
from vla_stack.runtime.clock import VirtualClock
from vla_stack.runtime.driver import Capabilities, Fault
from vla_stack.runtime.safety import SafetyEnvelope
from vla_stack.schema import ACTION, Dim, Observation, RobotSpec
from vla_stack.serving.keys import KeyFolder

SMALL = ("--robot-arg", "image_size=16")


def test_check_describes_the_robot_and_writes_its_limits(tmp_path, capsys):
    limits = tmp_path / "limits.yaml"
    assert main(["robot", "check", *SMALL, "--seconds", "0.3", "--write", str(limits)]) == 0
    printed = capsys.readouterr().out
    assert "native/arm7: 5 commands, 12 measured values, 10 Hz" in printed and "camera wrist: 16 x 16" in printed
    assert "3 readings" in printed and "ready. Next:" in printed
    content = yaml.safe_load(limits.read_text())
    assert content["robot"] == "native/arm7" and content["dimensions"]["tcp_z.pos"]["max_acceleration"] == 5.0
    assert main(["robot", "check", *SMALL, "--seconds", "0.1", "--limits", str(limits)]) == 0  # it is read again
    assert "soft start 1 s" in capsys.readouterr().out
    assert main(["robot", "check", *SMALL, "--seconds", "0.1", "--write", str(limits)]) == 1
    assert f"{limits} exists" in capsys.readouterr().err


def test_a_limits_file_that_cannot_be_written_is_refused_before_the_arm_is_opened(tmp_path, monkeypatch, capsys):
    opened = []
    monkeypatch.setattr("vla_stack.verbs.robot.driver_maker", lambda args: lambda: opened.append(1))
    (tmp_path / "limits.yaml").write_text("mine")
    for name, words in (("limits.yaml", "limits.yaml exists"), ("none/limits.yaml", "there is no folder")):
        assert main(["robot", "check", "--write", str(tmp_path / name)]) == 1
        assert words in capsys.readouterr().err
    assert not opened


def test_cameras_are_named_one_by_one_or_with_commas(capsys):
    assert main(["robot", "check", *SMALL, "--seconds", "0.1", "--robot-arg", "cameras=wrist"]) == 0
    printed = capsys.readouterr().out
    assert "camera wrist" in printed and "camera front" not in printed
    assert main(["robot", "check", *SMALL, "--seconds", "0.1", "--robot-arg", "cameras=wrist,front"]) == 0
    assert "camera front" in capsys.readouterr().out


@pytest.mark.parametrize(("verb", "extra"), [("teleop", "hardware"), ("console", "console"), ("train", "train")])
def test_a_package_that_is_missing_is_named_with_its_extra(verb, extra, monkeypatch, capsys):
    def absent(name):
        raise ModuleNotFoundError("no module", name="pyarrow")

    monkeypatch.setattr(registry, "import_module", absent)
    assert main([verb]) == 1
    assert f"needs the package 'pyarrow' -- pip install \"vla-stack[{extra}]\"" in capsys.readouterr().err


def test_jog_moves_one_dimension_and_back(capsys):
    assert main(["robot", "jog", *SMALL, "--joint", "tcp_z.pos", "--by", "0.03"]) == 0
    printed = capsys.readouterr().out
    assert "it follows" in printed
    start, back = float(printed.split(": ")[1].split(" ->")[0]), float(printed.split("-> ")[-1].split()[0])
    assert abs(back - start) < 0.005
    assert main(["robot", "jog", *SMALL, "--joint", "knee", "--by", "0.03"]) == 1
    assert "there is no 'knee' -- the robot has tcp_x.pos" in capsys.readouterr().err


class Arm:
    """A robot that goes wrong: ``fault`` from the third reading ``until`` one, readings no newer than ``frozen_ns``."""

    def __init__(self, fault=None, frozen_ns=None, until=999):
        dims = (Dim("x.pos", "m", -1, 1, 0.5),)
        self.spec, self.fault = RobotSpec("test/arm", dims, dims, (), rate_hz=50.0), None
        self.later, self.until, self.frozen_ns, self.capabilities = fault, until, frozen_ns, Capabilities()
        self.at, self.reads, self.sent, self.stops = np.zeros(1, np.float32), 0, [], 0
        self.now_ns = time.monotonic_ns

    def connect(self): ...

    def disconnect(self): ...

    def hold(self): ...

    def read(self):
        self.reads += 1
        self.fault = self.later if 2 < self.reads < self.until else None
        return Observation(self.at.copy(), {}, "task", 0, self.frozen_ns or self.now_ns())

    def write(self, action):
        self.at = action.copy()
        self.sent.append(float(action[0]))
        return action

    def stop(self):
        self.stops += 1


def test_jog_is_one_motion_there_and_back():
    arm, clock = Arm(), VirtualClock(1)
    arm.now_ns = clock.now_ns
    moved = jog(arm, SafetyEnvelope(arm.spec), 0, 0.1, clock)
    assert (moved.start, moved.there, moved.back) == pytest.approx((0.0, 0.1, 0.0), abs=1e-6)
    assert arm.at == pytest.approx(0.0, abs=1e-6)
    way = np.diff([0.0, *arm.sent])
    assert not (way[np.argmin(way) :] > 0).any()  # nothing goes out again after the way back


def test_jog_beyond_a_limit_is_refused_before_anything_moves(monkeypatch, capsys):
    arm = Arm()
    monkeypatch.setattr("vla_stack.verbs.robot.driver_maker", lambda args: lambda: arm)
    assert main(["robot", "jog", "--joint", "x.pos", "--by", "9"]) == 1
    assert "x.pos would be 9.000 m, its limits are -1.000 to 1.000" in capsys.readouterr().err
    assert not arm.sent and not arm.stops


@pytest.mark.parametrize(
    ("back", "words"), [(0.0, "it follows\n"), (0.08, "it follows there, but is 0.080 m from its start")]
)
def test_jog_says_whether_the_joint_came_back(back, words, monkeypatch, capsys):
    monkeypatch.setattr("vla_stack.verbs.robot.driver_maker", lambda args: Arm)
    monkeypatch.setattr("vla_stack.verbs.robot.jog", lambda *_: Jogged(0.0, 0.1, back))
    assert main(["robot", "jog", "--joint", "x.pos", "--by", "0.1"]) == 0
    assert words in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arm", "words"),
    [(Arm(fault=Fault("load", "the shoulder is overloaded", True)), "overloaded"), (Arm(frozen_ns=1), "stale")],
)
def test_jog_stops_where_something_is_wrong(arm, words, monkeypatch, capsys):
    monkeypatch.setattr("vla_stack.verbs.robot.driver_maker", lambda args: lambda: arm)
    assert main(["robot", "jog", "--joint", "x.pos", "--by", "0.01"]) == 1
    assert words in capsys.readouterr().err
    assert arm.stops == 1 and max(arm.sent) < 0.01 + 1e-6
    if arm.frozen_ns:
        assert not any(arm.sent)


@pytest.mark.parametrize(("until", "code"), [(5, 0), (999, 1)])
def test_check_looks_again_where_a_fault_may_pass(until, code, monkeypatch, capsys):
    arm = Arm(fault=Fault("camera", "camera 'wrist' has sent no picture for 0.6 s", False), until=until)
    monkeypatch.setattr("vla_stack.verbs.robot.driver_maker", lambda args: lambda: arm)
    assert main(["robot", "check", "--seconds", "0.1"]) == code
    printed = capsys.readouterr().out
    assert "at first: camera 'wrist'" in printed
    assert ("FAULT camera 'wrist'" in printed, "not ready" in printed) == (bool(code), bool(code))


def test_a_served_robot_asks_for_keys_of_operators(tmp_path, monkeypatch):
    served = {}

    def serve(driver, envelope, socket, running, admission=None):
        served["admission"] = admission

    monkeypatch.setenv("VLA_KEYS", str(tmp_path))
    KeyFolder().create("arm")
    monkeypatch.setattr("vla_stack.verbs.robot.driver_maker", lambda args: Arm)
    monkeypatch.setattr("robot_drivers.remote_service.serve_driver", serve)
    assert main(["robot", "serve", "--endpoint", "tcp://0.0.0.0:*"]) == 0
    assert served["admission"] is not None


def test_a_recorded_episode_played_by_hand_is_recorded_again(tmp_path, capsys):
    first, second = tmp_path / "first", tmp_path / "second"
    collect = ["collect", "--task", "pick", "--episodes", "1", "--root", str(first), "--workers", "1"]
    assert main([*collect, "--seed", "5"]) == 0
    teleop = ["teleop", "--robot-arg", "image_size=64", "--teleop", "replay", "--teleop-arg", f"root={first}"]
    assert main([*teleop, "--root", str(second), "--seconds", "3"]) == 0
    assert "1 episodes recorded" in capsys.readouterr().out
    ours, theirs = open_dataset(first), open_dataset(second)
    assert theirs.num_episodes == 1 and theirs.features[ACTION]["names"] == ours.features[ACTION]["names"]
    # Commands of it are the episode's, though perhaps not its first: a busy machine gives way and takes over late.
    apart = np.abs(ours.columns[ACTION][None] - theirs.columns[ACTION][:, None]).max(axis=-1)
    assert apart.min() < 0.01


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["robot", "calibrate"], "only LeRobot devices are calibrated"),
        (["robot", "jog"], "jog needs a joint and a distance"),
        (["robot", "release"], "robot 'sim' has no torque that could be switched off"),
        (["robot", "check", "--robot.port", "/dev/x"], "write --robot.port=/dev/x"),
        (
            ["robot", "check", "--robot-arg", "imagesize=16"],
            "has no option 'imagesize' -- the nearest option is 'image_size'",
        ),
        (["robot", "check", "--robot-arg", "image_size=big"], "cannot be made with image_size='big'"),
        (["robot", "check", *SMALL, "--robot-arg", "cameras=side,front"], "cameras='side' is unknown -- choose one of"),
        (["teleop", "--robot-arg", "image_size=16", "--teleop", "mouse"], "there is no teleoperator 'mouse'"),
    ],
)
def test_mistakes_are_one_clear_line(argv, words, capsys):
    assert main(argv) == 1
    assert words in capsys.readouterr().err

"""``vla teleop`` with a robot that cannot reset its scene: a leader arm, and the keyboard beside it."""

import os
import pty
import select
import sys
import termios

import lerobot_dummy
import pytest

from vla_stack.cli import main
from vla_stack.data.dataset import open_dataset
from vla_stack.schema import SUCCESS
from vla_stack.verbs import teleop

ENTER, SUCCESS_KEY, FAIL_KEY, DISCARD_KEY = b"\r", b"s", b"f", b"x"
STEPS = 4  # recorded frames before a key is pressed


@pytest.fixture
def terminal(monkeypatch):
    """Types into the terminal that the program runs in."""
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "r") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        yield lambda text: os.write(ours, text)
    os.close(ours)


@pytest.fixture
def hand(monkeypatch, terminal):
    """Presses the next of its keys some recorded frames into each episode; None is Ctrl-C."""
    keys, frames, get_action = [], [], lerobot_dummy.DummyLeader.get_action
    waiting, record = [], teleop.TeleopSession._frame

    def note(self, frame):
        frames.append(frame)
        record(self, frame)

    def act(self):
        if len(frames) >= STEPS and waiting:
            waiting.clear()
            key = keys.pop(0)
            if key is None:
                raise KeyboardInterrupt
            terminal(key)
        return {**get_action(self), "shoulder.pos": 85.0}  # degrees, near the arm's 90

    def scene(question):
        assert termios.tcgetattr(sys.stdin)[3] & termios.ICANON  # whole lines, though a keyboard is connected
        scenes.append(question)
        frames.clear()
        waiting.append(None)
        terminal(ENTER)  # one too many: it is not for the episode that follows
        assert select.select([sys.stdin], [], [], 20.0)[0]

    scenes: list[str] = []
    monkeypatch.setattr(lerobot_dummy.DummyLeader, "get_action", act)
    monkeypatch.setattr(teleop.TeleopSession, "_frame", note)
    monkeypatch.setattr(teleop, "wait_for_scene", scene)
    return keys, scenes


def arguments(tmp_path, *more):
    robot = {"type": "vla_dummy", "module": "lerobot_dummy", "port": "x", "image_size": 16, "calibration_dir": tmp_path}
    leader = {"type": "vla_dummy_leader", "module": "lerobot_dummy", "calibration_dir": tmp_path}
    flags = [f"--robot.{k}={v}" for k, v in robot.items()] + [f"--teleop.{k}={v}" for k, v in leader.items()]
    return ["teleop", *flags, "--task", "wave", "--seconds", "60", *more]


def test_keys_end_episodes_and_nothing_finished_is_lost(tmp_path, hand, capsys):
    keys, scenes = hand
    keys += [SUCCESS_KEY, DISCARD_KEY, FAIL_KEY, None]
    root = tmp_path / "data"
    assert main(arguments(tmp_path, "--root", str(root), "--episodes", "5")) == 0
    out = capsys.readouterr().out
    assert "S Success, F Fail, X Discard, Esc STOP" in out
    for line in (
        "[1/5] success",
        "[2/5] discarded",
        "[3/5] no success",
        "interrupted; the episode that was running is",
    ):
        assert line in out
    assert [s.split(":")[0] for s in scenes] == [f"episode {i} of 5" for i in (1, 2, 3, 4)]
    data = open_dataset(root)
    assert data.num_episodes == 2
    assert data.columns[SUCCESS][data.episode_to - 1].tolist() == [True, False]
    assert (data.episode_to - data.episode_from).max() < 900  # no episode ran on to its last second
    assert termios.tcgetattr(sys.stdin)[3] & termios.ICANON  # the terminal is as it was


def test_ctrl_c_before_the_scene_is_set_loses_nothing(tmp_path, terminal, monkeypatch, capsys):
    def interrupt(question):
        raise KeyboardInterrupt

    monkeypatch.setattr(teleop, "wait_for_scene", interrupt)
    assert main(arguments(tmp_path)) == 0
    out = capsys.readouterr().out
    assert "interrupted" in out and "is not recorded" not in out

"""What ``vla run`` makes of its arguments and of its episodes."""

import argparse
import json
import os
import pty
import select
import subprocess
import sys

import pytest
from toy_robot import make

from vla_stack.data.sidecar import EpisodeFacts, facts_row, write_facts
from vla_stack.errors import UserError
from vla_stack.rollout.records import load_records
from vla_stack.verbs import run, run_session
from vla_stack.verbs.robot_arguments import driver_arguments
from vla_stack.verbs.terminal import Keys, wait_for_scene


def arguments(*argv):
    parser = argparse.ArgumentParser()
    run.add_arguments(parser)
    return parser.parse_args(argv)


def test_driver_arguments_are_yaml():
    args = arguments("--task", "place", "--robot-arg", "image_size=96", "--robot-arg", "cameras=[front]")
    assert driver_arguments(args) == {"task": "place", "image_size": 96, "cameras": ["front"]}
    assert driver_arguments(arguments()) == {"task": "pick"}
    assert driver_arguments(arguments("--robot", "lerobot")) == {}


def test_arguments_that_cannot_be_read_name_themselves():
    with pytest.raises(UserError, match="--robot-arg image_size: there is no '='"):
        driver_arguments(arguments("--robot-arg", "image_size"))
    assert run._box("z.pos=-0.1:0.3") == ("z.pos", (-0.1, 0.3))
    with pytest.raises(UserError, match="--workspace z cannot be read"):
        run._box("z")


def episode(success, steps, idle, delays, factor=1.0):
    return {
        "success": success,
        "duration_s": steps / 10,
        "steps": steps,
        "idle_ticks": idle,
        "delay_ticks": {"counts": delays},
        "ticks": {"run": steps - idle, "overrun": 1},
        "lateness_ms": {"p99": 1.0, "max": 2.0},
        "real_time_factor": factor,
    }


def test_summary_adds_up():
    s = run.summarise([episode(True, 20, 2, {"1": 3}), episode(False, 30, 3, {"1": 1, "4": 4}, factor=0.9)])
    assert (s["episodes"], s["successes"], s["success_rate"]) == (2, 1, 0.5)
    assert s["interval_95"] == pytest.approx([0.0945, 0.9055], abs=1e-3)
    assert s["median_seconds_to_success"] == 2.0
    assert s["idle_fraction"] == 0.1
    assert (s["delay_ticks_mean"], s["delay_ticks_max"]) == (20 / 8, 4)
    assert (s["overruns"], s["slower_than_real_time"], s["stops"]) == (2, 1, 0)


def test_what_nobody_judged_is_no_failure(tmp_path):
    unknown, won = episode(None, 20, 2, {}), episode(True, 20, 2, {})
    for e in (unknown, won):
        e |= {"seed": 1, "instruction": "pick", "delay_ticks": {"mean": 1.0, "counts": {}}}
    s = run.summarise([unknown])
    assert (s["episodes"], s["judged"], s["success_rate"], s["interval_95"]) == (1, 0, None, None)
    assert "[1/1] not judged in" in (line := run._line([unknown], 1)) and "%)" not in line
    assert run._closing(tmp_path, [unknown]).startswith("1 episodes not judged; idle")
    assert "1/1 = 100%" in run._line([won, unknown], 2)
    assert run._closing(tmp_path, [won, unknown]).startswith("1 of 1 episodes succeeded: 100%")
    (tmp_path / "records.json").write_text(json.dumps({"name": "a", "rate_hz": 10.0, "episodes": [won, unknown]}))
    (read,) = load_records(tmp_path / "records.json")
    assert (len(read.episodes), read.success_rate) == (1, 1.0) and "1 further" in read.notes[0]


@pytest.fixture
def terminal(monkeypatch):
    """Types into the terminal that the program runs in, and waits until it can be read there."""
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "r") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)

        def enter(text="\n"):
            os.write(ours, text.encode())
            assert select.select([stdin], [], [], 20.0)[0]

        yield enter
    os.close(ours)


def session(*argv):
    keys = Keys()
    return run_session.Session(arguments(*argv), keys, asks=True), keys


def test_only_an_enter_after_the_stop_rearms(terminal):
    told, keys = session()
    terminal("\n\n")  # out of impatience, while the robot drove
    told.tell(7, "stop", "camera")
    assert not keys.entered()
    terminal()
    assert keys.entered() and not keys.entered()
    told.tell(9, "hold", "camera")  # no stop: nothing is asked, nothing forgotten
    terminal()
    assert keys.entered()


def test_what_was_typed_before_the_question_does_not_set_the_scene(terminal, monkeypatch):
    terminal()
    monkeypatch.setattr("builtins.input", lambda question: asked.append(Keys().entered()))
    asked: list[bool] = []
    wait_for_scene("ready? ")
    assert asked == [False]


def test_without_standard_input_nobody_rearms(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    told, keys = session()
    told.tell(7, "stop", "camera")
    assert not keys.entered() and keys.take() == ""


def test_keys_of_a_recording_and_enter_do_not_take_each_other(terminal):
    keys = Keys()
    with keys.one_by_one():  # no Enter is needed for the others
        terminal("K")
        assert keys.take() == "k" and not keys.entered()
        terminal("y\n")
        assert keys.take() == "y" and keys.take() == ""
    assert keys.entered() and not keys.entered()


def test_the_person_has_the_last_word_on_success(monkeypatch):
    told, _ = session("--robot", "lerobot")
    told.recording = object()  # asks through a pipe too
    monkeypatch.setattr("builtins.input", lambda question: "n")
    assert not told._judged(True)  # a real robot knows nothing: it is asked
    told._said = True
    assert told._judged(False)
    assert session()[0]._judged(True)  # a simulated one knows


def test_a_real_robot_s_episode_is_judged_at_a_terminal_and_nowhere_else(terminal, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda question: "y")
    real = session("--robot", "lerobot")[0]
    assert real._judged(False) is True
    assert session("--robot", "lerobot", "--dry-run")[0]._judged(False) is None
    assert session("--dry-run")[0]._judged(False) is None  # a simulated arm has not moved either
    with open(os.devnull) as nobody:
        monkeypatch.setattr(sys, "stdin", nobody)
        assert real._judged(False) is None


def test_recording_and_its_folder_need_each_other(tmp_path):
    for odd in (["--record", "sentry"], ["--root", str(tmp_path)]):
        with pytest.raises(UserError, match="--record and --root need each other"):
            run_session.recording_opener(arguments(*odd))
    assert run_session.recording_opener(arguments()) is None


def test_a_recording_that_goes_on_takes_other_seeds(tmp_path, monkeypatch):
    root = tmp_path / "runs"
    recorded = ["--record", "episodic", "--root", str(root)]
    assert run_session.first_seed(arguments()) == run_session.first_seed(arguments(*recorded)) == 0
    make(root, lengths=(2, 2, 2))
    assert run_session.first_seed(arguments(*recorded)) == 3
    assert run_session.first_seed(arguments(*recorded, "--seed", "0")) == 0
    clips = [facts_row(EpisodeFacts(mode="run", seed=seed), uid, 0, 0) for uid, seed in enumerate((0, 40, 7))]
    write_facts(root, clips)
    assert run_session.first_seed(arguments(*recorded)) == 41  # of clips, seeds in between were run and not kept

    class Started(Exception):
        pass

    def start(server, driver, how, *_, **__):
        raise Started(how.seed)

    monkeypatch.setattr(run, "RobotNode", start)
    monkeypatch.setattr(run, "served", lambda server: None)
    monkeypatch.setattr(run.signal, "signal", lambda *_: None)
    args = arguments("--robot", "sim", *recorded)
    with pytest.raises(Started, match="41"):  # the policy's noise follows from it as well
        run.main(args)
    assert args.seed == 41


def test_the_robot_side_imports_neither_torch_nor_lerobot_nor_mujoco():
    code = (
        "import sys, vla_stack.verbs.run, vla_stack.runtime.control, robot_drivers.simulated;"
        "print([m for m in ('torch', 'lerobot', 'mujoco', 'gymnasium', 'cv2', 'av') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"

"""A command that has nothing to say yet says that it is at work, on a terminal alone."""

import io
import os
import pty
import re
import subprocess
import sys

from vla_stack.waiting import ERASE, Waiting, waiting


def shown(text: str) -> list[str]:
    """What stood on the last line, one after the other."""
    return [line for line in text.split(ERASE) if line]


def test_seconds_are_counted_until_the_first_word():
    terminal, now = io.StringIO(), 0.0
    told = Waiting("vla serve", terminal, ends=False, clock=lambda: now)
    for now in (0.5, 1.0, 2.0):  # noqa: B007  the clock reads it
        told.tick()
    assert shown(terminal.getvalue()) == ["vla serve: 1 s", "vla serve: 2 s"]
    told.heard("a notice\n", result=False)  # a notice on stderr: the line below it goes on
    now = 2.5
    told.tick()
    now = 3.0
    told.tick()
    assert shown(terminal.getvalue())[-1] == "vla serve: 3 s"
    told.heard("READY\n", result=True)
    now = 9.0
    told.tick()
    assert shown(terminal.getvalue())[-1] == "vla serve: 3 s" and terminal.getvalue().endswith(ERASE)


def test_a_command_that_ends_is_never_silent_but_its_lines_stay_whole():
    terminal, now = io.StringIO(), 0.0
    told = Waiting("vla eval", terminal, clock=lambda: now)
    told.heard("success 1.0\n", result=True)
    now = 1.5
    told.tick()
    assert shown(terminal.getvalue()) == ["vla eval: 2 s"]
    told.heard("which one? ", result=True)
    now = 5.0
    told.tick()
    assert terminal.getvalue().endswith(f"vla eval: 2 s{ERASE}")


def test_bars_move_while_their_first_step_is_under_way():
    from tqdm import tqdm

    drawn, terminal = io.StringIO(), io.StringIO()
    told = Waiting("vla eval", terminal)
    with tqdm(total=2, file=drawn) as bar:
        before = len(drawn.getvalue())
        told.tick()
        assert len(drawn.getvalue()) > before and bar.n == 0
    assert terminal.getvalue() == ""


def test_a_file_is_left_alone(monkeypatch):
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    with waiting("vla eval"):
        assert sys.stderr is stderr


CODE = """
import sys
from vla_stack import waiting
waiting.SILENT_S = waiting.EVERY_S = 0.01
with waiting.waiting("vla eval"):
    while waiting_for(): pass
    print("a notice", file=sys.stderr)
    print("done")
assert sys.stdout.write("after\\n")
"""


def test_on_a_terminal_it_ends_with_what_the_command_said():
    here, there = pty.openpty()
    # Until the thread has drawn, which is what it waits for.
    code = CODE.replace("waiting_for()", "not any(t.name == 'waiting' and drawn() for t in threading.enumerate())")
    head = "import threading\ndef drawn():\n    return sys.stderr._waiting._drawn\n"
    process = subprocess.Popen([sys.executable, "-c", head + code], stdin=there, stdout=there, stderr=there)
    os.close(there)
    said = b""
    try:
        while block := os.read(here, 1 << 16):
            said += block
    except OSError:  # how Linux says that the other end is closed
        pass
    assert process.wait() == 0
    os.close(here)
    text = said.decode().replace("\r\n", "\n")
    assert re.search(r"vla eval: \d+ s", text) and text.endswith("a notice\ndone\nafter\n")
    assert text.rindex(ERASE) < text.index("a notice")


def test_a_reader_that_has_read_enough_is_no_mistake():
    for argv in (["--list"], ["recipes"]):  # into a pipe that nobody reads, at once and with what is left at the end
        ours, theirs = os.pipe()
        os.close(ours)
        command = [sys.executable, "-m", "vla_stack.cli", *argv]
        done = subprocess.run(command, stdout=theirs, stderr=subprocess.PIPE, text=True)
        os.close(theirs)
        assert (done.returncode, done.stderr) == (141, "")

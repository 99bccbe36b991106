"""``vla serve`` as a process: one READY line, a served robot, a clean end on SIGTERM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from serving_fakes import WAIT_S, collect, observation

from vla_stack import cli
from vla_stack.verbs import serve
from vla_stack.verbs.serve import handled

# The process of `vla serve` with everything but the weights real.
SERVE = """
import sys
from serving_fakes import TickPolicy
from vla_stack import cli
from vla_stack.verbs import serve
serve.load_directory = lambda *_: TickPolicy()
sys.exit(cli.main(["serve", *sys.argv[1:]]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ready_line_service_and_signal(connect, tmp_path, number):
    (tmp_path / "config.json").write_text("{}")
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, "--policy", str(tmp_path), "--endpoint", "tcp://127.0.0.1:*"]
        + ["--metrics-port", "0"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
    )
    try:
        words = process.stdout.readline().split()
        assert words[0] == "READY" and words[2:5] == ["robot=test/two", "horizon=4", "model=m1"]
        assert words[5].startswith("metrics=http://127.0.0.1:")
        client = connect(words[1])
        client.request(observation(5), rid=0, epoch=0, origin=5, seed=0)
        assert collect(client, 1)[0].actions[0, 0] == 5
        process.send_signal(number)
        assert process.wait(WAIT_S) == 0
        assert process.stdout.read() == ""
    finally:
        process.kill()
        process.wait()


def test_errors_are_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("VLA_KEYS", str(tmp_path))
    assert cli.main(["serve", "--policy", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith(f"vla serve: '{tmp_path}' holds no policy (no config.json)")
    assert cli.main(["serve", "--policy", "shipped", "--endpoint", "tcp://127.0.0.1:*", "--device", "cuda:77"]) == 1
    assert "vla serve: device 'cuda:77' is not available" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{}")
    assert cli.main(["serve", "--policy", str(tmp_path), "--endpoint", "tcp://0.0.0.0:5555"]) == 1
    assert "this computer has no keys" in capsys.readouterr().err


def test_signals_are_given_back():
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before, asked = [signal.getsignal(number) for number in numbers], []
    server = SimpleNamespace(stop=lambda: asked.append("stop"), reload=lambda: asked.append("reload"))
    with handled(server):
        for number in numbers:
            os.kill(os.getpid(), number)
    assert asked == ["stop", "stop", "reload"]
    assert [signal.getsignal(number) for number in numbers] == before


def test_a_checkpoint_in_the_place_of_the_one_that_is_served_is_loaded_as_well(tmp_path, monkeypatch):
    """A learner that is stopped saves its last checkpoint anew, without the noise that it explored with."""
    at, loaded, tried = tmp_path / "policy", threading.Event(), []
    monkeypatch.setattr(serve, "FOLLOW_S", 0.001)
    monkeypatch.setattr(serve, "resolve_policy", lambda _: at)

    def reload() -> None:
        tried.append(serve._edition(at))
        loaded.set()

    at.mkdir()
    tried.append(serve._edition(at))
    with serve.following(str(at), tried, reload):
        assert not loaded.wait(0.05)
        at.rename(tmp_path / "before")
        at.mkdir()
        assert loaded.wait(WAIT_S)
    assert len(tried) == 2


def test_help_shows_an_example(capsys):
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    assert "vla serve --policy runs/pick" in capsys.readouterr().out

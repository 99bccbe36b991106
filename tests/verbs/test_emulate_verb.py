"""``vla emulate``: one folder, one emulator."""

import contextlib
import os
import signal

from vla_stack.cli import main
from vla_stack.locks import LOCK, locked
from vla_stack.verbs import emulate


def test_a_second_emulator_in_a_folder_is_refused_by_name(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(emulate.signal, "signal", lambda *_: signal.SIG_DFL)
    monkeypatch.setattr(emulate, "Emulator", lambda *_: contextlib.nullcontext())
    with locked(tmp_path / LOCK, tmp_path, "wait"):
        assert main(["emulate", "so101", "--folder", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert f"by process {os.getpid()} on" in said and "quit that emulator, or give another --folder" in said

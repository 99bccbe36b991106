"""``--help`` of the scripts that measure and ship says what they do, and starts nothing."""

import runpy
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[1] / "tools"
SCRIPTS = sorted(str(p.relative_to(TOOLS)) for p in TOOLS.rglob("*.py") if '__name__ == "__main__"' in p.read_text())


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_is_the_description_of_the_module(script, monkeypatch, capsys):
    path = TOOLS / script
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    monkeypatch.setattr(sys, "path", [str(path.parent), *sys.path])  # as for a script; what it adds is taken back
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(path), run_name="__main__")
    assert end.value.code == 0
    first = path.read_text().split('"""')[1].splitlines()[0]
    printed = capsys.readouterr().out
    assert printed.startswith(f"usage: {path.name}") and first in printed

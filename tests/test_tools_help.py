"""``--help`` of the scripts that measure and ship says what they do, and starts nothing."""

import runpy
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[1] / "tools"
SCRIPTS = sorted(str(p.relative_to(TOOLS)) for p in TOOLS.rglob("*.py") if '__name__ == "__main__"' in p.read_text())


def of_tools(path: str | None) -> bool:
    return Path(path or ".").resolve().is_relative_to(TOOLS)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_is_the_description_of_the_module(script, monkeypatch, capsys):
    path = TOOLS / script
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    # As for a script: what another test has put on the path, or imported, is not what this one would find.
    monkeypatch.setattr(sys, "path", [str(path.parent), *(p for p in sys.path if not of_tools(p))])
    for name, module in list(sys.modules.items()):
        if of_tools(getattr(module, "__file__", None)):
            monkeypatch.delitem(sys.modules, name)
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(path), run_name="__main__")
    assert end.value.code == 0
    first = path.read_text().split('"""')[1].splitlines()[0]
    printed = capsys.readouterr().out
    assert printed.startswith(f"usage: {path.name}") and first in printed

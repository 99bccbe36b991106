"""``--help`` of the scripts that measure and ship says what they do, and starts nothing."""

import os
import runpy
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[1] / "tools"
SCRIPTS = sorted(str(p.relative_to(TOOLS)) for p in TOOLS.rglob("*.py") if '__name__ == "__main__"' in p.read_text())


def of_tools(path: str | None) -> bool:  # thousands of modules are asked for each script: no look at the disk
    return os.path.join(os.path.abspath(path or "."), "").startswith(os.path.join(TOOLS, ""))


@pytest.fixture
def without_tools():
    """What other tests have imported of the tools is not there for a script, nor what a script imports for them."""

    def take() -> dict:
        return {n: sys.modules.pop(n) for n, m in list(sys.modules.items()) if of_tools(getattr(m, "__file__", None))}

    of_others = take()
    yield
    take()
    sys.modules.update(of_others)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_is_the_description_of_the_module(script, without_tools, monkeypatch, capsys):
    path = TOOLS / script
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    monkeypatch.setattr(sys, "path", [str(path.parent), *(p for p in sys.path if not of_tools(p))])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(path), run_name="__main__")
    assert end.value.code == 0
    first = path.read_text().split('"""')[1].splitlines()[0]
    printed = capsys.readouterr().out
    assert printed.startswith(f"usage: {path.name}") and first in printed

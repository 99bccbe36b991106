"""One command goes on with all that is reproduced, within a number of core hours."""

import json
import sys
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = {
    # a study that notes how it was called
    "quick": "import json, sys; open('quick.txt', 'a').write(json.dumps(sys.argv[1:]) + '\\n')",
    # one that ends only when it is told to, and then reports
    "endless": "import os, sys\nwhile '--report' not in sys.argv: pass\n"
    "open('reported', 'w').write(os.environ.get('REPRODUCE_ANEW', ''))",
    "broken": "raise SystemExit(3)",
}


@pytest.fixture
def everything(monkeypatch, tmp_path):
    """The module, in a project of three scripts, of which nothing is measured."""
    for folder in ("", "reproduce"):
        monkeypatch.syspath_prepend(str(ROOT / "tools" / folder))
    sys.modules.pop("all", None)
    import all as module

    (tmp_path / "tools").mkdir()
    (tmp_path / "results").mkdir()
    for name, text in SCRIPTS.items():
        (tmp_path / f"tools/{name}.py").write_text(text)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(module, "OUT", tmp_path / "out")
    monkeypatch.setattr(module, "POLL_S", 0.02)
    monkeypatch.setattr(module, "digest", lambda script: "code1")
    monkeypatch.setattr(module, "tree", lambda: None)
    monkeypatch.setattr(module.freshness, "changed", lambda record, now: record["stale"])
    return module


def calls(root):
    path = root / "quick.txt"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_every_result_is_of_a_step_or_wants_something_else(everything):
    there = {path.stem for path in (ROOT / "docs/results").glob("*.json")}
    steps = {step.result for step in everything.STEPS}
    assert there - steps <= set(everything.ELSEWHERE) and not steps & set(everything.ELSEWHERE)
    for step in everything.STEPS:
        text = (ROOT / "tools" / step.command.split()[0]).read_text()
        grid = "rl_grid" in text  # whose flags these scripts have
        assert all(f'"--{flag}"' in text or grid for flag in step.takes.split()), step


@pytest.mark.parametrize(
    ("takes", "stale", "there", "noted", "why"),
    [
        ("", [], False, {}, "never"),
        ("", [], True, {}, None),  # measured in one go, of this code
        ("out report", [], True, {}, "cells"),
        ("out report", [], True, {"over": True, "digest": "now"}, None),
        ("out report", [], True, {"over": False, "digest": "now"}, "cells"),
        ("", ["sim/env.py"], True, {"over": True, "digest": "before"}, "sim/env.py"),
        ("", ["a", "b", "c"], True, {}, "a, b and 1 more"),
    ],
)
def test_what_is_due(everything, takes, stale, there, noted, why):
    found = everything.due(everything.Step("a", "a.py", takes), stale, there, noted, "now")
    assert (found is None) if why is None else why in found.why
    assert found is None or found.anew == bool(stale)


def test_what_is_done_is_not_done_again_until_its_code_is_other(everything, tmp_path, monkeypatch, capsys):
    steps = [everything.Step("quick", "quick.py --seeds 1", "out report jobs")]
    assert everything.work(steps, 1.0, 2, listed=True) == 0 and not calls(tmp_path)
    for _ in range(2):
        assert everything.work(steps, 1.0, 2, listed=False) == 0
    folder = str(tmp_path / "out/quick-code1")
    assert calls(tmp_path) == [["--seeds", "1", "--out", folder, "--jobs", "2"]]
    monkeypatch.setattr(everything, "digest", lambda script: "code2")
    (tmp_path / "results/quick.json").write_text(json.dumps({"stale": ["sim/env.py"]}))
    assert everything.work(steps, 1.0, 1, listed=False) == 0
    assert calls(tmp_path)[1] == ["--seeds", "1", "--out", folder.replace("code1", "code2")]
    assert "other now: sim/env.py" in capsys.readouterr().out


def test_when_time_is_over_the_study_that_runs_reports_and_is_gone_on_with_later(everything, tmp_path, capsys):
    steps = [everything.Step("endless", "endless.py", "report"), everything.Step("quick", "quick.py")]
    assert everything.work(steps, 0.2 / 3600, 1, listed=False) == 0
    assert (tmp_path / "reported").exists() and not calls(tmp_path)
    assert "the same command goes on" in capsys.readouterr().out
    noted = json.loads((tmp_path / "out/all.json").read_text())["endless.py"]
    assert noted["core_s"] > 0.2 and not noted["over"]


def test_what_a_study_has_begun_in_a_session_of_its_own_counts_and_ends_with_it(everything, tmp_path):
    (tmp_path / "tools/training.py").write_text(
        "import subprocess, sys\nopen('pid', 'w').write(str(subprocess.Popen([sys.executable, '-c', "
        "'while True: pass'], start_new_session=True).pid))\nimport signal; signal.pause()"
    )
    everything.work([everything.Step("training", "training.py")], 0.2 / 3600, 1, listed=False)
    with pytest.raises(psutil.NoSuchProcess):
        psutil.Process(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize(("stale", "anew"), [(["sim/env.py"], "1"), ([], "")])
def test_cells_of_other_code_come_into_no_report(everything, tmp_path, monkeypatch, stale, anew):
    monkeypatch.delenv("REPRODUCE_ANEW", raising=False)
    (tmp_path / "results/endless.json").write_text(json.dumps({"stale": stale}))
    everything.work([everything.Step("endless", "endless.py", "report")], 0.1 / 3600, 1, listed=False)
    assert (tmp_path / "reported").read_text() == anew


def test_a_study_that_fails_does_not_keep_the_others_from_running(everything, tmp_path, capsys):
    steps = [everything.Step("broken", "broken.py"), everything.Step("quick", "quick.py")]
    assert everything.work(steps, 1.0, 1, listed=False) == 1
    assert calls(tmp_path) == [[]] and "failed: broken.py" in capsys.readouterr().out

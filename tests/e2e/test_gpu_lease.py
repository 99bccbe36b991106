"""The queue of measurements for a GPU that is at hand for minutes, with jobs that need none."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def lease(monkeypatch, tmp_path):
    spec = importlib.util.spec_from_file_location("lease", ROOT / "tools" / "gpu" / "lease.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "lease", module)
    spec.loader.exec_module(module)
    (tmp_path / "docs" / "results").mkdir(parents=True)
    good = "import sys; open(sys.argv[sys.argv.index('--out') + 1], 'w').write('{\"ran\": 1}'); print('a row')"
    scripts = {
        "good": good,
        "bad": "print('a row'); raise SystemExit(3)",
        "slow": "print('a row', flush=True)\nwhile 1: pass",
    }
    for name, text in scripts.items():
        (tmp_path / f"{name}.py").write_text(text)
    jobs = tuple(
        module.Job(name, (f"{name}.py",), 0.02 if name == "slow" else 1.0, name, name)
        for name in ("bad", "slow", "good")
    )
    monkeypatch.setattr(module, "JOBS", jobs)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "STARTING_S", 0.0)
    return module


def call(lease, monkeypatch, *words) -> int:
    monkeypatch.setattr(sys, "argv", ["lease.py", *words])
    return lease.main()


def test_a_job_that_fails_or_outlasts_its_time_costs_no_other(lease, monkeypatch, tmp_path, capsys):
    out = tmp_path / "out"
    assert call(lease, monkeypatch, "--out", str(out)) == 1
    assert json.loads((out / "good.json").read_text()) == {"ran": 1}
    for name in ("good", "bad", "slow"):
        assert (out / f"{name}.log").read_text().startswith("a row")
    assert "time was over" in (out / "slow.log").read_text()
    capsys.readouterr()
    (tmp_path / "good.py").write_text("raise SystemExit(1)")  # done: it is not run again
    assert call(lease, monkeypatch, "good", "--out", str(out)) == 0
    assert capsys.readouterr().out == ""


def test_results_are_adopted_into_the_tree(lease, monkeypatch, tmp_path):
    out = tmp_path / "out"
    call(lease, monkeypatch, "good", "--out", str(out))
    assert call(lease, monkeypatch, "--adopt", str(out)) == 0
    assert (tmp_path / "docs" / "results" / "good.json").is_file()
    assert not (tmp_path / "docs" / "results" / "bad.json").exists()


def test_without_time_nothing_is_begun(lease, monkeypatch, tmp_path, capsys):
    call(lease, monkeypatch, "--minutes", "0", "--out", str(tmp_path / "out"))
    assert capsys.readouterr().out.count("no time was left") == 3


def test_real_jobs_name_files_and_sections_that_are_there():
    spec = importlib.util.spec_from_file_location("real_lease", ROOT / "tools" / "gpu" / "lease.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["real_lease"] = module
    spec.loader.exec_module(module)
    assert len({job.name for job in module.JOBS}) == len(module.JOBS)
    for job in module.JOBS:
        text = (ROOT / job.command[0]).read_text()
        for section in job.command[2:]:
            assert f'"{section}":' in text

"""The horizons experiment at toy size, and its statistics on cases that are known."""

import json
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture
def tools(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(TOOLS))
    monkeypatch.syspath_prepend(str(TOOLS / "reproduce"))
    import horizons_report
    import mixture_of_horizons

    import results

    for module in (results, horizons_report):
        monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(sys, "argv", ["mixture_of_horizons.py", "--smoke"])
    return mixture_of_horizons, horizons_report


@pytest.mark.slow
def test_smoke_run_fills_every_cell_once_and_reports(tools, tmp_path):
    experiment, _ = tools
    flags = ["--smoke", "--seeds", "1", "--out", str(tmp_path / "out"), "--name", "smoke"]
    assert experiment.main(flags) == 0
    cells = {path: path.stat().st_mtime_ns for path in (tmp_path / "out/cells").glob("*.json")}
    settings = experiment.SMOKE
    assert {p.stem for p in cells} == {c.name for c in experiment.grid(settings, range(1))}

    result = json.loads((tmp_path / "results/smoke.json").read_text())
    assert set(result["data"]["arms"]) == set(experiment.arms(settings))
    assert result["data"]["arms"]["full"]["clip_norm"] == len(settings.horizons) + 1
    assert (tmp_path / "results/smoke.svg").exists()

    next(iter(cells)).unlink()  # a rerun does what is missing and nothing else
    assert experiment.main(flags) == 0
    again = {path: path.stat().st_mtime_ns for path in (tmp_path / "out/cells").glob("*.json")}
    assert again.keys() == cells.keys() and sum(again[p] != cells[p] for p in cells) == 1


def cell(seed, success):
    return {"seed": seed, "tasks": {"push": {"success": success}}}


def test_differences_pair_seeds_and_starts(tools):
    _, report = tools
    ours, theirs = [cell(0, [1, 1, 0, 1]), cell(1, [1, 0, 0, 1])], [cell(1, [0, 0, 0, 1]), cell(2, [1, 1, 1, 1])]
    shared = report.difference(ours, theirs)
    assert shared["seeds"] == [1] and shared["mean"] == 0.25 and (shared["wins"], shared["losses"]) == (1, 0)
    assert report.difference(ours, [cell(7, [0, 0, 0, 0])]) is None


@pytest.mark.parametrize(("wins", "losses", "p"), [(0, 0, 1.0), (5, 0, 0.0625), (3, 3, 1.0), (8, 2, 0.109375)])
def test_mcnemar_is_the_exact_sign_test_of_discordant_pairs(tools, wins, losses, p):
    _, report = tools
    assert report.mcnemar(wins, losses) == pytest.approx(p) == report.mcnemar(losses, wins)

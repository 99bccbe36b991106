"""The reinforcement learning experiments at toy size, and their statistics on cases that are known."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture
def tools(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(TOOLS))
    monkeypatch.syspath_prepend(str(TOOLS / "reproduce"))
    import expo
    import rl_grid
    import rl_report
    import wsrl

    import results

    (tmp_path / "results").mkdir()
    for module in (results, rl_report):
        monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
    return rl_grid, rl_report, {"wsrl": (wsrl, ("wsrl", "rlpd")), "expo": (expo, ("expo", "rlpd"))}


@pytest.mark.parametrize("name", ["wsrl", "expo"])
def test_smoke_run_fills_each_cell_once_and_reports(tools, tmp_path, monkeypatch, name):
    grid_module, _, experiments = tools
    experiment, arms = experiments[name]
    first = next(iter(experiment.GRID.tasks))
    grid = replace(experiment.GRID, tasks={first: experiment.GRID.tasks[first]}, order=(arms,))
    flags = ["--smoke", "--seeds", "1", "--out", str(tmp_path / "out"), "--name", "smoke"]
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *flags])
    assert grid_module.main(grid, None, experiment.report) == 0
    cells = {path.stem: path.stat().st_mtime_ns for path in (tmp_path / "out/cells").glob("*.json")}
    assert set(cells) == {c.name for c in grid.cells(range(1))}
    result = json.loads((tmp_path / "results/smoke.json").read_text())
    assert set(result["data"]["tasks"][first]) == set(arms) and (tmp_path / "results/smoke.svg").exists()
    states = [tmp_path / f"out/runs/{first}-{arm}-seed0/checkpoints/last/training_state/learner.json" for arm in arms]
    assert [json.loads(s.read_text())["pretrained"] for s in states] == [2, 0]  # one began with the offline training
    with pytest.raises(SystemExit, match="holds cells of other settings"):
        grid_module.same_settings(grid, ["gamma=0.5"], tmp_path / "out")
    assert grid_module.main(grid, None, experiment.report) == 0  # nothing is left to do
    assert cells == {path.stem: path.stat().st_mtime_ns for path in (tmp_path / "out/cells").glob("*.json")}


def runs(report, *curves):
    rows = [
        {"seed": i, "episodes": 10, "curve": [{"step": 100 * k, "eval/success": s} for k, s in enumerate(curve)]}
        for i, curve in enumerate(curves)
    ]
    return report.Runs(rows)


def test_a_threshold_is_reached_where_two_evaluations_hold_it(tools):
    _, report, _ = tools
    made = runs(report, [0.9, 0.2, 0.8, 0.9], [0.1, 0.9, 0.7, 0.9], [0.8, 0.8, 0.1, 0.1])
    assert made.to_threshold(0.8).tolist() == [200, 400, 0]  # 400: never, one evaluation beyond the end
    assert made.reached(0.8) == pytest.approx(2 / 3)


def test_ratio_of_steps_pairs_seeds(tools):
    _, report, _ = tools
    value, (low, high) = report.ratio(np.array([100, 200, 300]), np.array([200, 400, 600]))
    assert (value, low, high) == pytest.approx((0.5, 0.5, 0.5))


def test_a_dip_is_measured_from_the_start_and_after_the_warm_up(tools):
    _, report, experiments = tools
    wsrl, _ = experiments["wsrl"]
    made = runs(report, [0.5, 0.0, 0.4, 0.9], [0.5, 0.0, 0.3, 0.9])
    check = wsrl.dip("task", "wsrl", made, 100)
    assert check.interval[0] == pytest.approx(-0.2) and check.value == pytest.approx(-0.1) and check.holds is False
    assert wsrl.dip("task", "no_warmup", made, 100).holds is True
    rising = runs(report, [0.5, 0.5, 0.6, 0.9], [0.5, 0.5, 0.7, 0.9])
    assert wsrl.dip("task", "no_warmup", rising, 0).holds is False


def test_two_that_never_arrive_are_not_one_that_is_faster(tools):
    _, report, experiments = tools
    wsrl, _ = experiments["wsrl"]
    never, late = runs(report, [0.1, 0.2, 0.3, 0.4]), runs(report, [0.1, 0.2, 0.9, 0.9])
    assert wsrl.faster("task", never, never, "RLPD").holds is False
    assert wsrl.faster("task", late, never, "RLPD").holds is True

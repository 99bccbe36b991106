"""Figures of the RaC experiment from made-up records."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import numpy as np
import pytest

TOOLS = Path(__file__).parents[2] / "tools"
FRAMES = {"demo": 0, "autonomous": 9, "recovery": 10, "correction": 20}


@pytest.fixture
def report(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS / "reproduce"))
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module("rac_report")


def record(k: int, rate: float, recoveries: int = 0) -> dict:
    success = [int(i < rate * 40) for i in range(40)]
    outcome = {"success": success, "ticks": [50] * 40, "episode_recoveries": [recoveries] * 40}
    outcome["stage"] = [1 + i for i in success]  # of two
    means = {"progress": 0.5 + sum(success) / 80, "recoveries": float(recoveries), "takeovers": 3}
    counts = {"human_frames": 343 + 525 * k, "discarded": 1, "collected": 3, "frames": FRAMES, "supervision_s": 60.0}
    return {"iteration": k, **outcome, **means, **counts}


def runs(rates, seeds=3, recoveries=0):
    return {seed: [record(k, rate, recoveries) for k, rate in rates.items()] for seed in range(seeds)}


def test_checks_say_what_holds_and_why_not(report) -> None:
    records = {
        "rac": runs({0: 0.1, 1: 0.4, 2: 0.6}, recoveries=1),
        "hg_dagger": runs({0: 0.1, 1: 0.3, 2: 0.4}),
        "demos": runs({0: 0.1, 1: 0.5, 2: 0.8}),
        "masked": runs({2: 0.5}),
    }
    table = {arm: report.curve(of) for arm, of in records.items()}
    assert [r["human_frames"] for r in table["rac"]] == [343, 868, 1393]
    assert [r["operator_s"] for r in table["rac"]] == [60, 120, 180]
    assert table["rac"][1]["corrections_per_recovery"] == 2.0 and [r["iteration"] for r in table["masked"]] == [2]
    capped = {arm: [r["success"] for r in report.capped_curve(of, 2)] for arm, of in records.items()}
    assert capped["rac"] == pytest.approx([0.0, 0.6, 0.6, 0.6, 0.6]) and capped["demos"][0] == pytest.approx(0.8)
    checks = {c.name: c for c in report.checks(records, table)}
    assert checks["success after iteration 0, at most"].holds and checks["success after iteration 0, at least"].holds
    assert checks["RaC minus hg_dagger, from mid-budget"].value == pytest.approx(0.15)
    assert checks["RaC minus hg_dagger, lower end"].holds
    stages = checks["RaC minus hg_dagger, from mid-budget, share of the stages"]
    assert stages.value == pytest.approx(0.075) and stages.interval[0] < 0.075 < stages.interval[1]
    assert checks["seconds of an operator after the demonstrations: RaC over hg_dagger"].value == pytest.approx(1.0)
    assert not checks["RaC minus demos, from mid-budget"].holds and checks["RaC minus demos, from mid-budget"].why
    assert checks["RaC minus masked, from mid-budget"].value == pytest.approx(0.1)
    removed = checks["share of the gain that masking recovery removes"]
    assert removed.value == pytest.approx(0.2) and not removed.holds and removed.why


def test_episodes_of_one_policy_do_not_count_as_independent(report) -> None:
    rates = (0.4, 0.6, 0.9)
    uneven = {seed: [record(1, rate)] for seed, rate in enumerate(rates)}
    (row,) = report.curve(uneven)
    assert row["by_seed"] == pytest.approx(rates) and row["success"] == pytest.approx(np.mean(rates))
    low, high = row["interval"]
    assert low < 0.5 and high > 0.75  # Wilson's of 120 independent trials is 0.55 to 0.72


def test_what_recoveries_add_has_an_interval_and_is_held_against_the_other_arms(report) -> None:
    def recovering(rate: float, share: float):
        of = runs({0: 0.1, 1: rate})
        for run in of.values():
            run[-1]["episode_recoveries"] = [int(i < share * 40) for i in range(40)]
        return of

    records = {"rac": recovering(0.5, 0.1), "hg_dagger": recovering(0.9, 0.3), "demos": runs({0: 0.1})}
    table = {arm: report.curve(of) for arm, of in records.items()}
    checks = {c.name: c for c in report.checks(records, table)}
    own, against = checks["RaC, capped recoveries: S_4 minus S_0"], checks["S_4 minus S_0: RaC minus hg_dagger"]
    assert own.value == pytest.approx(0.1) and own.interval[0] < 0.1 < own.interval[1]
    assert against.value == pytest.approx(-0.2) and against.interval[1] < 0 and not against.holds and against.why
    assert "S_4 minus S_0: RaC minus demos" not in checks  # has not done the last iteration
    first, *_, last = report.capped_curve(records["rac"], 1)
    assert last["success"] - first["success"] == pytest.approx(0.1) and last["interval"][0] < 0.5 < last["interval"][1]


def test_cells_of_other_settings_are_not_mixed(report, monkeypatch, tmp_path) -> None:
    script = importlib.import_module("rac")
    monkeypatch.setattr(script, "together", lambda jobs, work: None)
    monkeypatch.setattr(report, "report", lambda *given, **options: None)
    with pytest.raises(SystemExit, match="holds no runs yet"):  # and what was published stays
        script.main(["human_frames=40", "--out", str(tmp_path)])
    monkeypatch.setattr(script, "load_records", lambda out: {"rac": {0: []}})
    for _ in range(2):
        assert script.main(["human_frames=40", "--out", str(tmp_path)]) == 0
    with pytest.raises(SystemExit, match="other settings"):
        script.main(["human_frames=50", "--out", str(tmp_path)])
    assert script.main(["--report", "--out", str(tmp_path)]) == 0


def test_what_another_machine_has_run_is_reported_and_not_run_again(report, monkeypatch, tmp_path) -> None:
    script, claims = importlib.import_module("rac"), importlib.import_module("claims")
    asked: list = []
    monkeypatch.setattr(claims, "RESULTS", tmp_path)
    monkeypatch.delenv("REPRODUCE_ANEW", raising=False)
    monkeypatch.setattr(script, "together", lambda jobs, work: asked.append(work.args[0]))
    written: dict = {}
    monkeypatch.setattr(report, "write", lambda name, checks, data, seeds: written.update(data))
    monkeypatch.setattr(report, "plot", lambda *given: None)
    these = json.loads(json.dumps(script.settings(list(script.SIZE))))
    runs = [("rac", 0, 5), ("hg_dagger", 0, 5), ("demos", 0, 4)]  # the last one was stopped
    cells = [{"arm": a, "seed": s, "iterations": [record(k, 0.5) for k in range(n + 1)]} for a, s, n in runs]
    data = {"settings": these, "cells": cells}
    (tmp_path / "rac.json").write_text(json.dumps({"data": data}))
    assert script.main(["--seeds", "1", "--out", str(tmp_path / "out")]) == 0
    (pairs,) = asked
    assert ("hg_dagger", 0) not in pairs and {("demos", 0), ("masked", 0)} <= set(pairs)
    assert ("rac", 0) in pairs  # the masked arm trains on its data
    assert set(written["arms"]) == {"rac", "hg_dagger"} and written["settings"] == these
    assert [(c["arm"], len(c["iterations"])) for c in written["cells"]] == [("rac", 6), ("hg_dagger", 6)]


def test_the_interval_of_a_difference_covers_chance(report) -> None:
    rng = np.random.default_rng(0)
    arms = [{s: [{"iteration": 1, "success": rng.integers(0, 2, 40).tolist()}] for s in range(3)} for _ in range(2)]
    e = report.difference(*arms, [1], report.succeeded)
    assert e.low < e.value < e.high and e.low < 0 < e.high

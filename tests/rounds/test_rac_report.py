"""Figures of the RaC experiment from made-up records."""

from __future__ import annotations

import importlib
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
    means = {"progress": 0.5 + rate / 2, "recoveries": float(recoveries), "takeovers": 3, "supervision_s": 60.0}
    counts = {"human_frames": 343 + 525 * k, "discarded": 1, "collected": 3, "frames": FRAMES}
    return {"round": k, **outcome, **means, **counts}


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
    assert table["rac"][1]["corrections_per_recovery"] == 2.0 and [r["round"] for r in table["masked"]] == [2]
    capped = {arm: report.capped_curve(of) for arm, of in records.items()}
    assert capped["rac"] == pytest.approx([0.0, 0.6, 0.6, 0.6, 0.6]) and capped["demos"][0] == pytest.approx(0.8)
    checks = {c.name: c for c in report.checks(records, table, capped)}
    assert checks["success after round 0, at most"].holds and checks["success after round 0, at least"].holds
    assert checks["RaC minus hg_dagger, from mid-budget"].value == pytest.approx(0.15)
    assert checks["RaC minus hg_dagger, lower end"].holds
    assert not checks["RaC minus demos, from mid-budget"].holds and checks["RaC minus demos, from mid-budget"].why
    assert checks["RaC minus masked, from mid-budget"].value == pytest.approx(0.1)
    removed = checks["share of the gain that masking recovery removes"]
    assert removed.value == pytest.approx(0.2) and not removed.holds and removed.why


def test_the_interval_of_a_difference_covers_chance(report) -> None:
    rng = np.random.default_rng(0)
    arms = [{s: [{"round": 1, "success": rng.integers(0, 2, 40).tolist()}] for s in range(3)} for _ in range(2)]
    value, (low, high) = report.difference(*arms, [1])
    assert low < value < high and low < 0 < high

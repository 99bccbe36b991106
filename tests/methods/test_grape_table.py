"""Figures of the GRAPE experiment from made-up records."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest

TOOLS = Path(__file__).parents[2] / "tools"
N = 60


@pytest.fixture
def table(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS / "reproduce"))
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module("grape_table")


def runs(success: float, collided: float, steps: int, iterations: int = 1, seeds: int = 3):
    def record(k: int) -> dict:
        won, hit = ([int(i < share * N) for i in range(N)] for share in (success, collided))
        means = {"success_rate": success, "collision_rate": collided, "mean_steps": float(steps)}
        ticks = [steps if w else 60 for w in won]
        return {"iteration": k, "pairs": 5, "success": won, "collided": hit, "steps": ticks, **means}

    return {seed: [record(k) for k in range(iterations + 1)] for seed in range(seeds)}


def test_checks_say_what_holds(table):
    records = {
        "base": runs(0.5, 0.4, 30, iterations=0),
        "filtered": runs(0.6, 0.4, 29),
        "grape-success": runs(0.7, 0.3, 28),
        "grape-safety": runs(0.5, 0.2, 31),
        "grape-efficiency": runs(0.5, 0.4, 18),
    }
    rows = {arm: table.row(of) for arm, of in records.items()}
    assert rows["base"]["success"] == pytest.approx(0.5) and rows["base"]["steps_of_successes"] == 30
    assert rows["grape-success"]["success_by_seed"] == pytest.approx([0.7] * 3)
    checks = {c.name: c for c in table.checks(records, rows, images=False)}
    assert checks["success: GRAPE minus SFT"].value == pytest.approx(0.2)
    assert checks["safety: collisions against SFT, relative"].value == pytest.approx(-0.5)
    assert checks["efficiency: steps of successes against SFT, relative"].value == pytest.approx(-0.4)
    assert all(c.holds for c in checks.values()), [c.name for c in checks.values() if not c.holds]
    assert checks["safety: GRAPE minus filtered, collisions"].value == pytest.approx(-0.2)
    seeing = {c.name: c for c in table.checks(records, rows, images=True)}  # of which more is asked
    assert seeing["success: GRAPE minus filtered, success"].holds is False
    assert seeing["safety: collisions against SFT, relative"].holds


def test_a_claim_that_fails_says_so(table):
    records = {"base": runs(0.5, 0.4, 30, 0), "filtered": runs(0.7, 0.1, 30), "grape-safety": runs(0.4, 0.35, 30)}
    checks = {c.name: c for c in table.checks(records, {a: table.row(r) for a, r in records.items()}, False)}
    for name in ("safety: collisions against SFT, relative", "safety: GRAPE minus filtered, collisions: near end"):
        assert checks[name].holds is False and checks[name].why


def test_intervals_cover_chance(table):
    rng = np.random.default_rng(0)
    arms = []
    for _ in range(2):
        of = runs(0.5, 0.5, 30)
        for run in of.values():
            run[-1]["success"] = rng.integers(0, 2, N).tolist()
        arms.append(of)
    e = table.compare(*arms, "success")
    assert e.low < e.value < e.high and e.low < 0 < e.high


def test_a_result_file_and_its_plot_are_written(table, monkeypatch, tmp_path):
    for module in (table, importlib.import_module("results")):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    table.report("toy", {"base": runs(0.5, 0.4, 30, 0), "filtered": runs(0.6, 0.4, 30)}, {"starts": 2})
    assert (tmp_path / "toy.json").is_file() and "svg" in (tmp_path / "toy.svg").read_text()[:400]

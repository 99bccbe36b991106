"""What the experiment on data quality says of outcomes that are known."""

from pathlib import Path

import numpy as np
import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture
def experiment(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    monkeypatch.syspath_prepend(str(TOOLS / "reproduce"))
    import data_quality

    return data_quality


def outcomes(rate, n=100):
    return [int(i < round(rate * n)) for i in range(n)]


def policy(i, n=24):
    rate = i / (n - 1)
    task = ("pick", "place", "push")[i % 3]
    known = {"open_loop": 1 - rate, "validation": 0.5, "quality": (7 * (i // 3)) % 8, "frames": 100 * i, "steps": 500}
    return {"task": task, "selection": "", "arm": str(i), "seed": 0, "bad": 0.0, "outcomes": outcomes(rate), **known}


def selection(arm, seed, rate):
    return {"task": "pick", "selection": arm, "arm": arm, "seed": seed, "bad": 0.3, "outcomes": outcomes(rate)}


def test_what_orders_policies_predicts_and_what_does_not_vary_says_nothing(experiment):
    records = [policy(i) for i in range(24)]
    found = {check.name: check for check in experiment.report(records, experiment.Settings())}
    said = {key: words for key, (words, _) in experiment.PREDICTORS.items()}
    error, frames = (found[f"{said[key]}: rank correlation with success"] for key in ("open_loop", "frames"))
    assert (error.value, frames.value) == pytest.approx((-1.0, 1.0))
    told = {key: found[f"{words}: predicts success, 1 for yes"].value for key, words in said.items()}
    assert told == {"open_loop": 1.0, "validation": 0.0, "quality": 0.0, "frames": 1.0, "steps": 0.0}
    assert np.isnan(found[f"{said['steps']}: rank correlation with success"].value)
    assert found["policies"].holds


@pytest.mark.parametrize(("better", "holds"), [(0.9, True), (0.5, False)])
def test_a_selection_gains_where_its_lower_end_is_above_nothing(experiment, better, holds):
    rates = {"random": 0.5, "quality": better, "quality-policy": 0.5}
    records = [selection(arm, seed, rate + 0.01 * seed) for arm, rate in rates.items() for seed in range(5)]
    found = {check.name: check for check in experiment.report(records, experiment.Settings())}
    gain = found["100 kept, quality minus random: success, lower end"]
    assert gain.holds is holds and bool(gain.why) is not holds
    assert not found["100 kept, quality-policy minus random: success, lower end"].holds

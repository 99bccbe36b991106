"""The world model's experiment: order of its cells, what they will cost, and checks from cells that are known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture
def experiment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    monkeypatch.syspath_prepend(str(TOOLS / "reproduce"))
    import world_cost
    import world_model
    import world_report
    import world_training

    return world_model, world_cost, world_report, world_training


def test_what_needs_one_model_comes_before_the_next_one_is_trained(experiment, tmp_path: Path) -> None:
    model, cost, _, training = experiment
    cells = model.grid(list(model.PARTS), range(2))
    assert len({c.name for c in cells}) == len(cells) == 3 + 2 + 7 + 2 + 3 + 2 + 2
    needed = [training.runs(c.part, c.arm, c.seed)[-1] for c in cells]
    assert needed[:7] == ["full-0"] * 7 and needed[7] == "hue-full-0"
    assert {c.part for c in cells if c.seed} == {"quality", "control", "memory"}

    plan = cost.plan(training.SMOKE, tmp_path, cells)
    assert plan.count("trains") == len(set(needed)) == 10
    for name in set(needed):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "finished").touch()
    assert "trains" not in cost.plan(training.SMOKE, tmp_path, cells)


def test_another_arm_is_trained_as_soon_as_there_is_an_autoencoder(
    experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _, _, training = experiment
    cell, trained = model.Cell("quality", "no_memory", 0), []

    def train(_: object, out: Path, name: str) -> None:
        trained.append(name)
        (out / "runs" / name).mkdir(parents=True, exist_ok=True)
        (out / "runs" / name / "finished").touch()

    monkeypatch.setattr(training, "train", train)
    monkeypatch.setitem(model.PARTS, "quality", lambda *_: {"rows": []})
    with training.claimed(tmp_path / "locks" / "full-0") as ours:  # another process is training it
        assert ours and not model.pass_over(training.SMOKE, [cell], tmp_path) and not trained
        (tmp_path / "runs" / "full-0" / "model").mkdir(parents=True)
        (tmp_path / "runs" / "full-0" / "model" / "world_model.json").touch()  # its first stage is over
        assert model.pass_over(training.SMOKE, [cell], tmp_path) and trained == ["no_memory-0"]
        assert not (tmp_path / "cells").exists()  # the probe is the first arm's
    assert model.pass_over(training.SMOKE, [cell], tmp_path) and trained == ["no_memory-0", "full-0"]
    assert (tmp_path / "cells" / f"{cell.name}.json").exists()


def test_known_cells_give_known_checks(experiment) -> None:
    _, _, report, _ = experiment
    arms = {"unchanged": 2, "imagined": 6, "real": 8, "planned": 0, "critics": None}
    outcomes = {arm: None if n is None else [k < n for k in range(10)] for arm, n in arms.items()}
    gains = {
        c.name: c
        for c in report.improvement([{"part": "improvement", "arm": a, "successes": s} for a, s in outcomes.items()])
    }
    assert gains["gain by imagined episodes"].value == pytest.approx(0.4)
    assert gains["gain by imagined episodes: lower end"].holds is True
    assert gains["imagined less as many real demonstrations"].value == pytest.approx(-0.2)
    assert gains["gain by planned episodes: lower end"].holds is False and "gain by critics episodes" not in gains
    same = {"part": "improvement", "arm": "imagined", "successes": outcomes["unchanged"]}
    for wins in (2, 3):  # a policy that has not changed has not gained, and one episode more is not told from none
        again = report.improvement([same | {"successes": [k < wins for k in range(10)]}, same | {"arm": "unchanged"}])
        assert {c.name: c.holds for c in again}["gain by imagined episodes: lower end"] is False

    row = {"start": 0, "view": "front", "k": 4, "psnr_moving": {"model": 20.0, "copy_last": 15.0}}
    row["psnr"] = {"model": 30.0, "copy_last": 31.0}
    other = row | {"psnr_moving": {"model": 18.0, "copy_last": 15.0}}
    table = [
        {"part": "quality", "arm": "full", "seed": 0, "rows": [row | {"start": i} for i in range(6)]},
        {"part": "quality", "arm": "no_memory", "seed": 0, "rows": [other | {"start": i} for i in range(6)]},
    ]
    quality = {c.name: c.value for c in report.quality(table)}
    assert quality["PSNR of moving pixels above no_memory, k = 4 (dB)"] == 2
    assert quality["PSNR of moving pixels above copy-last-frame, k = 4 (dB)"] == 5
    assert quality["PSNR of whole pictures above copy-last-frame, k = 4 (dB): lower end"] == -1
    assert np.isfinite(list(quality.values())).all()


def test_rows_of_a_clip_are_drawn_together(experiment) -> None:
    _, _, report, _ = experiment
    clips = np.random.default_rng(0).normal(0.0, 1.0, 40)
    alone = report.difference("d", list(enumerate(clips)))[1]
    repeated = report.difference("d", [(i, v) for i, v in enumerate(clips) for _ in range(10)])[1]
    assert repeated.interval == pytest.approx(alone.interval)  # ten rows of a clip are no ten clips


def test_a_ranking_is_held_over_policies_that_are_neither_good_nor_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    monkeypatch.syspath_prepend(str(TOOLS / "reproduce"))
    import world_ranking

    rng, records = np.random.default_rng(0), []
    for i, rate in enumerate((0.0, 0.2, 0.4, 0.6, 0.8, 1.0)):
        real = (np.arange(40) < 40 * rate).astype(int).tolist()
        ours = [0, *real[1:]]  # each of them misses one
        records.append(
            {
                "kind": "rolled_out",
                "of": f"pick-{i}",
                "real": real,
                "imagined": ours,
                "judged": [1] * 40 if i == 2 else real,
                "guards": [["distance"] if k == 39 or i == 3 else [] for k in range(40)],  # one has nothing left
                "open_loop": 1 - rate,
                "validation": 1.0,
                "instructions": ["red" if k % 2 else "blue" for k in range(40)],
            }
        )
        records.append({"kind": "fitted", "of": f"pick-{i}", "value": float(rng.random())})
    records.append({"kind": "filmed", "of": "wandering", "real": [0] * 100, "judged": [1] * 3 + [0] * 97})
    checks = {c.name: c for c in world_ranking.report(records)}
    who = "policies that succeed in 10 % to 90 %"
    assert checks[who].value == 4 and checks[who].holds is False
    assert checks[f"imagination, {who}: pearson"].value == pytest.approx(1)
    assert checks[f"imagination, rollouts that a guard ended left out, {who}: pearson"].value > 0.99
    assert checks[f"imagination, {who}: bias"].value == pytest.approx(-0.025)
    assert checks[f"imagination, {who}: size of the bias"].holds is True
    assert checks[f"open-loop error, {who}: pearson"].value == pytest.approx(1)
    assert np.isnan(checks[f"validation loss, {who}: pearson"].value)
    assert checks["imagination minus open-loop error: pearson, lower end"].holds is False  # both order them
    assert checks["precision of imagined successes, 'red'"].value == 1
    wandering = checks["simulated films, wandering: share of 100 failures that the judges call successes"]
    assert wandering.value == 0.03 and wandering.holds is False
    worst = "simulated films of the policy of which most are: share of failures that the judges call successes"
    assert checks[worst].value == 1 and checks[worst].holds is False

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
    assert len({c.name for c in cells}) == len(cells) == 3 + 2 + 8 + 7 + 2 + 3 + 2 + 2
    needed = [training.runs(c.part, c.arm, c.seed)[-1] for c in cells]
    assert needed[:15] == ["full-0"] * 15 and needed[15] == "hue-full-0"
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
    real = [[k < wins for k in range(10)] for wins in (1, 4, 9)]
    cells = [
        {
            "part": "ranking",
            "arm": f"policy {i}",
            "real": r,
            "model": r,
            "judged": [True] * 10,
            "tripped": [i == 0 and k == 0 for k in range(10)],
        }
        for i, r in enumerate(real)
    ]
    ranking = {c.name: c for c in report.ranking(cells)}
    assert ranking["share of imagined rollouts that no guard ended"].value == pytest.approx(29 / 30)
    assert ranking["share of imagined rollouts that no guard ended, policy 0"].value == pytest.approx(0.9)
    assert ranking["mmrv over 3 policies"].value == 0 and ranking["pearson over 3 policies"].value > 0.99
    assert ranking["bias over 3 policies"].value == pytest.approx(-1 / 30)
    assert ranking["share of simulated successes that the judges see as such"].value == 1
    assert ranking["share of simulated failures that the judges see as such"].value == 0
    for cell in cells[1:]:
        cell["tripped"] = [True] * 10
    ended = {c.name: c for c in report.ranking(cells)}
    assert ended["policies of which a rollout is left without tripped rollouts"].holds is False
    assert "pearson over 3 policies" in ended and len(ended) == len(ranking) - 4

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

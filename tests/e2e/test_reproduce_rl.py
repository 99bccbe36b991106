"""The reinforcement learning experiments at toy size, and their statistics on cases that are known."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture
def tools(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(TOOLS))
    monkeypatch.syspath_prepend(str(TOOLS / "reproduce"))
    import claims
    import expo
    import rl_grid
    import rl_report
    import wsrl

    import results

    (tmp_path / "results").mkdir()
    for module in (results, rl_report, claims):
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
        grid_module.same_settings(tmp_path / "out", grid_module.settings(grid, ["method.gamma=0.5"]))
    assert grid_module.main(grid, None, experiment.report) == 0  # nothing is left to do
    assert cells == {path.stem: path.stat().st_mtime_ns for path in (tmp_path / "out/cells").glob("*.json")}

    shutil.rmtree(tmp_path / "out")  # another machine: what the result file keeps is not run again
    assert grid_module.main(grid, None, experiment.report) == 0
    again = json.loads((tmp_path / "results/smoke.json").read_text())
    assert again["data"] == result["data"] and not (tmp_path / "out/runs").exists()
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *flags, "--report", "method.gamma=0.5"])
    shutil.rmtree(tmp_path / "out")
    with pytest.raises(SystemExit, match="no cells"):  # those of other settings are not taken
        grid_module.main(grid, None, experiment.report)


def runs(report, *curves, episodes=40):
    rows = [
        {"seed": i, "episodes": episodes, "curve": [{"step": 100 * k, "eval/success": s} for k, s in enumerate(curve)]}
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
    e = report.ratio(np.array([100, 200, 300]), np.array([200, 400, 600]))
    assert (e.value, e.low, e.high) == pytest.approx((0.5, 0.5, 0.5))


def test_a_dip_is_looked_for_where_learning_begins(tools):
    _, report, experiments = tools
    wsrl, _ = experiments["wsrl"]
    falls = runs(report, *[[0.6, 0.6, 0.2, 0.3, 0.5, 0.9], [0.5, 0.5, 0.1, 0.2, 0.4, 1.0]] * 2)
    keeps = runs(report, *[[0.6, 0.6, 0.6, 0.7, 0.8, 0.9], [0.5, 0.5, 0.5, 0.5, 0.6, 1.0]] * 2)
    np.testing.assert_allclose(falls.early(100), [-4 / 15, -4 / 15] * 2)
    np.testing.assert_allclose(keeps.early(0), [1 / 30, 0] * 2, atol=1e-12)
    good = wsrl.dips("task", {"wsrl": keeps, "no_warmup": falls}, 100)
    assert [c.holds for c in good] == [True, True, True]
    bad = wsrl.dips("task", {"wsrl": falls, "no_warmup": keeps}, 100)
    assert [c.holds for c in bad] == [False, False, False]
    # Two of five seeds collapse: that the others do not is no evidence that there is no dip.
    some = runs(report, *[[1.0, 1.0, 0.0, 0.0, 0.0, 0.0]] * 2, *[[1.0] * 6] * 3)
    assert [c.holds for c in wsrl.dips("task", {"wsrl": some}, 100)] == [False]


def test_evaluations_that_differ_by_chance_are_no_dip(tools):
    _, report, experiments = tools
    wsrl, _ = experiments["wsrl"]
    rng, found = np.random.default_rng(0), 0
    for _ in range(30):
        flat = runs(report, *(rng.binomial(40, 0.6, (5, 12)) / 40))
        found += wsrl.dips("task", {"wsrl": flat, "no_warmup": flat}, 0)[1].holds
    assert found <= 3


def test_all_of_forty_episodes_leave_something_open(tools):
    _, report, _ = tools
    low, high = runs(report, *[[1.0]] * 5).at(0).interval
    assert 0.9 < low < 0.99 and high <= 1


def test_evaluations_are_matched_by_their_steps(tools):
    _, report, _ = tools
    rows = [
        {"seed": s, "episodes": 10, "curve": [{"step": k, "eval/success": k / 100} for k in steps]}
        for s, steps in enumerate(([0, 10, 20], [0, 7, 10, 20]))
    ]
    made = report.Runs(rows)
    assert made.steps.tolist() == [0, 10, 20] and made.success.tolist() == [[0, 0.1, 0.2]] * 2


def test_two_that_never_arrive_are_not_one_that_is_faster(tools):
    _, report, experiments = tools
    wsrl, _ = experiments["wsrl"]
    never, late = runs(report, *[[0.1, 0.2, 0.3, 0.4]] * 3), runs(report, *[[0.1, 0.2, 0.9, 0.9]] * 3)
    assert wsrl.faster("task", never, never, "RLPD")[1].holds is False
    assert wsrl.faster("task", late, never, "RLPD")[1].holds is True
    there = runs(report, *[[0.9, 0.9, 0.9, 0.9]] * 3)
    assert wsrl.faster("task", there, never, "RLPD") == []  # who begins at the threshold needs no steps to get there


def test_curves_of_actors_are_held_against_local_ones(tools, tmp_path):
    import rl_ray

    def cell(arm, seed, *curve):
        points = [{"step": 10 * i, "eval/success": s, "lost_actors": float(i > 1)} for i, s in enumerate(curve)]
        return {"task": "pick", "arm": arm, "seed": seed, "episodes": 40, "curve": points}

    local = [cell("local", seed, 0.0, 0.5 + seed / 10, 0.9) for seed in range(4)]
    same = [cell("ray", seed, 0.0, 0.8 - seed / 10, 0.9) for seed in range(4)]
    worse = [cell("ray", seed, 0.0, 0.1, 0.2) for seed in range(4)]
    for name, ray in (("same", same), ("worse", worse)):
        rl_ray.report(rl_ray.GRID, name, local + ray, {})
    held = {}
    for name in ("same", "worse"):
        checks = json.loads((tmp_path / f"results/{name}.json").read_text())["checks"]
        held[name] = [c["holds"] for c in checks if c["holds"] is not None]
    assert held == {"same": [True, True, True], "worse": [True, False, True]}


def test_an_actor_is_killed_once_half_way(tools, monkeypatch):
    import rl_ray

    killed = []
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(kill=killed.append))
    loop = object.__new__(rl_ray.Bereft)
    loop.method, loop.episodes, loop.recent, loop.scenes = SimpleNamespace(steps=8), 0, [], None
    loop._actors, store = SimpleNamespace(actors=["first", "second"]), SimpleNamespace(total=0)
    loop.learner = SimpleNamespace(store=store)
    for store.total in (3, 4, 5):
        loop._note([])
    assert killed == ["first"]


def test_a_result_names_its_command_without_this_machine(tools, monkeypatch):
    import results

    script = str(results.ROOT / "tools/reproduce/wsrl.py")
    monkeypatch.setattr(sys, "argv", [script, "--report", "--out", "/somewhere/else", "--seeds", "3"])
    assert results.command() == "python tools/reproduce/wsrl.py --report --seeds 3"
    monkeypatch.setattr(sys, "argv", [script, "--out=/somewhere/else"])
    assert results.command() == "python tools/reproduce/wsrl.py"


def test_what_reinflow_publishes_reports_the_same_on_another_machine(tools, tmp_path, monkeypatch):
    import claims
    import reinflow_report

    monkeypatch.setattr(reinflow_report, "RESULTS", tmp_path / "results")

    def cell(arm, seed, first, last):
        evals = [
            {"step": i, "env_steps": 9 * i, "eval": np.mean(w), "eval_success": w} for i, w in enumerate((first, last))
        ]
        return {"task": "pick", "arm": arm, "seed": seed, "cpu_s": 1.0, "curve": [*evals, {"step": 2, "rollout": 0.5}]}

    cells = [cell(arm, seed, [1, 0, 1, 0], [1, 1, 1, seed]) for arm in ("k1", "k4") for seed in range(2)]
    kept = claims.published({"a": (1,)}, [reinflow_report.short(c) for c in cells])
    reinflow_report.report("one", kept["cells"], kept)
    claims.adopt("one", tmp_path / "other", {"a": (1,)})
    there = [json.loads(p.read_text()) for p in sorted((tmp_path / "other/cells").glob("*.json"))]
    for out, settings, taken in (("more", {"a": (1,), "b": {"c": 2}}, len(there)), ("others", {"a": (2,)}, 0)):
        claims.adopt("one", tmp_path / out, settings)
        assert len([*(tmp_path / out).glob("cells/*.json")]) == taken
    reinflow_report.report("two", there, kept)
    one, two = (json.loads((tmp_path / f"results/{name}.json").read_text()) for name in ("one", "two"))
    assert one["checks"] == two["checks"] and one["data"] == two["data"]
    gains = {c["name"]: c["value"] for c in one["checks"] if "gain" in c["name"]}
    assert gains == {"pick, ReinFlow, 1 step: gain": 0.375, "pick, ReinFlow, 4 steps: gain": 0.375}


def test_smoke_run_from_pictures_reports_runs_that_are_not_over_too(tools, tmp_path, monkeypatch):
    import claims
    import rl_vla
    import rl_vla_report

    for module in (rl_vla_report, claims):
        monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
    flags = ["--smoke", "--seeds", "1", "--out", str(tmp_path / "out"), "--name", "smoke"]
    monkeypatch.setattr(sys, "argv", ["rl_vla.py", *flags])
    assert rl_vla.main([*flags, "--tasks", "obstacle", "--arms", "dsrl", "expo", "reinflow", "bc"]) == 0
    cells = {path.stem: path.stat().st_mtime_ns for path in (tmp_path / "out/cells").glob("*.json")}
    assert set(cells) == {f"obstacle-{arm}-seed0" for arm in ("dsrl", "expo", "reinflow", "bc")}
    made = json.loads((tmp_path / "out/cells/obstacle-expo-seed0.json").read_text())
    assert [point["step"] for point in made["curve"]] == [0, 1] and len(made["served"]) == 2
    shutil.move(tmp_path / "out/cells/obstacle-dsrl-seed0.json", tmp_path)
    assert rl_vla.main([*flags[:-1], "other", "--report"]) == 0  # by its own name it would take what was published
    checks = json.loads((tmp_path / "results/other.json").read_text())["checks"]
    whole = {c["name"]: c["why"] for c in checks}
    assert whole["obstacle, DSRL: gain"] == "1 runs, 0 of them to the end"
    assert whole["obstacle, EXPO: gain"] == "1 runs, 1 of them to the end"
    assert any(c["name"] == "obstacle, ReinFlow: success in the end" and c["bound"] == 0.8 for c in checks)
    assert (tmp_path / "results/other.svg").exists()

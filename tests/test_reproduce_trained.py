"""A stopped experiment goes on: with a run that has a checkpoint, with what is published, and without what a killed one
has left.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[1] / "tools"


def test_a_run_goes_on_from_its_checkpoint_and_begins_anew_without(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    monkeypatch.syspath_prepend(str(TOOLS / "reproduce"))
    import progress

    told: list[tuple[str, ...]] = []
    monkeypatch.setattr(progress, "vla", lambda *words: told.append(words))
    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.yaml").touch()
    progress.trained(run, "pick", "seed=0")
    assert told.pop() == ("train", "pick", "seed=0") and not run.exists()
    (run / "checkpoints" / "last").mkdir(parents=True)
    progress.trained(run, "pick", "seed=0")
    assert told.pop() == ("train", "--resume", str(run)) and run.exists()


def test_rows_of_the_suite_are_gone_on_from_on_another_machine(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    monkeypatch.syspath_prepend(str(TOOLS / "reproduce"))
    import suite

    here, there = tmp_path / "here", tmp_path / "there"
    for name, success in (("a.json", [True, False]), ("shifts/b.json", [False])):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(json.dumps({"of": [name], "success": success}))
    (tmp_path / "suite.json").write_text(json.dumps({"data": {"runs": suite.kept(here)}}))
    monkeypatch.setattr(suite, "RESULTS", tmp_path)
    there.mkdir()
    (there / "a.json").write_text("run here already")
    suite.adopt(there)
    assert (there / "a.json").read_text() == "run here already"
    assert json.loads((there / "shifts/b.json").read_text()) == {"of": ["shifts/b.json"], "success": [False]}


def test_arms_of_an_experiment_change_what_its_method_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    monkeypatch.syspath_prepend(str(TOOLS / "reproduce"))
    import reinflow

    from vla_stack.methods.reinflow.recipe import ReinFlow

    for change in reinflow.ARMS.values():
        replace(ReinFlow(), **change)

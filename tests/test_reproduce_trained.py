"""A stopped experiment goes on: with a run that has a checkpoint, and without what a killed one has left."""

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

"""Processes that share what is trained: the same run as one, in any number of them, in the memory that was said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from side_by_side_runs import with_torchrun

from vla_stack.cli import main

pytestmark = pytest.mark.slow


def test_who_shares_the_weights_trains_as_one_process_does(recipe_file: Path, tmp_path: Path, monkeypatch) -> None:
    """Large layers by themselves, the others at once; moments, average, clipping and accumulation among it."""
    flat = [str(recipe_file), "method.optimizer.final_lr_ratio=1.0", "method.ema=0.9", "device=cpu", "precision=fp32"]
    flat += ["method.accumulate=2", "method.optimizer.clip_norm=0.5", "method.log_every=1", "method.batch_size=2"]
    flat += ["data.validation=0.2", "sharded=true"]
    assert main(["train", *flat, "method.steps=4", f"output_dir={tmp_path / 'one'}"]) == 0
    with_torchrun(*flat, "method.steps=4", f"output_dir={tmp_path / 'two'}", alike=True, large=64)
    for file in ("pretrained_model/model.safetensors", "training_state/optimizer.safetensors"):
        one, two = (load_file(tmp_path / run / "checkpoints/last" / file) for run in ("one", "two"))
        assert one.keys() == two.keys() and all(one[k].shape == two[k].shape for k in one)
        assert max(float((one[k] - two[k]).abs().max()) for k in one) < 1e-5
    one, two = (
        [json.loads(x) for x in (tmp_path / r / "metrics.jsonl").read_text().splitlines()] for r in ("one", "two")
    )
    for a, b in zip(one, two, strict=True):
        assert a.keys() == b.keys()
        assert all(
            b[k] == pytest.approx(a[k], rel=1e-4, abs=1e-6) for k in a if k in ("loss", "grad_norm", "validation/loss")
        )


def test_a_run_of_shared_weights_goes_on_in_any_number_of_processes(recipe_file: Path, tmp_path: Path, capsys) -> None:
    flat = [str(recipe_file), "method.optimizer.final_lr_ratio=1.0", "device=cpu", "precision=fp32", "sharded=true"]
    flat += ["method.batch_size=2", "method.save_every=2"]
    with_torchrun(*flat, "method.steps=4", f"output_dir={tmp_path / 'through'}", large=64)
    with_torchrun(*flat, "method.steps=2", f"output_dir={tmp_path / 'cut'}", large=64)
    with_torchrun("--resume", str(tmp_path / "cut"), "method.steps=4", large=64)
    file = "checkpoints/last/pretrained_model/model.safetensors"
    through, cut = (load_file(tmp_path / run / file) for run in ("through", "cut"))
    assert all(torch.equal(through[k], cut[k]) for k in through)
    assert main(["train", "--resume", str(tmp_path / "cut"), "method.steps=6"]) == 0
    assert json.loads((tmp_path / "cut/checkpoints/last/training_state/state.json").read_text())["step"] == 6
    with_torchrun("--resume", str(tmp_path / "cut"), "method.steps=8", large=64)  # of one process, in two
    state = json.loads((tmp_path / "cut/checkpoints/last/training_state/state.json").read_text())
    assert state["step"] == 8 and len({loader["seed"] for loader in state["loader"]}) == 2


def test_shared_weights_take_the_memory_that_was_said(recipe_file: Path, tmp_path: Path) -> None:
    """Parts of weights and moments as they lie in one of two processes, counted there."""
    flat = [str(recipe_file), "method.steps=1", "method.batch_size=2", "method.ema=0.9", "device=cpu", "sharded=true"]
    with_torchrun(*flat, f"output_dir={tmp_path / 'run'}", large=64, count=str(tmp_path / "bytes.json"))
    found = json.loads((tmp_path / "bytes.json").read_text())
    for what, counted in found["counted"].items():
        assert found["said"][what] == pytest.approx(counted, rel=0.1), what

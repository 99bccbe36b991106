"""The bench of world models on a GPU machine, tried out on a CPU."""

from __future__ import annotations

import json

import pytest
import torch

from vla_stack.errors import UserError


@pytest.fixture(scope="module")
def bench(load_tool):
    return load_tool("bench/world_gpu.py")


@pytest.mark.slow
def test_it_runs_small_on_a_cpu(bench, capsys):
    assert bench.main(["--smoke"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    found = {(section, name): row for of in rows for section, named in of.items() for name, row in named.items()}
    assert [found["tiny", f"{how}, rollouts 2"]["frames"] for how in ("float32", "through the backend")] == [8, 8]
    assert found["tiny", "training, batch 8"]["step_ms"] > 0
    for precision in ("float32", "bfloat16"):
        assert found["svd", f"{precision}, rollouts 2"]["frames_per_s"] > 0
    assert found["svd", "training, batch 1"]["estimate"].endswith("and activations")


def test_a_row_that_fails_takes_no_other_with_it(bench, monkeypatch, capsys):
    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(bench, "train", fail)
    assert bench.main(["--smoke", "--only", "tiny"]) == 1
    rows = [json.loads(line)["tiny"] for line in capsys.readouterr().out.splitlines()]
    assert rows[-1]["training, batch 8"]["failed"] == "OutOfMemoryError: CUDA out of memory"
    assert not any("failed" in row for named in rows[:-1] for row in named.values())


def test_it_says_that_it_needs_a_gpu(bench, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="needs a CUDA device.*world_gpu.py --smoke"):
        bench.main([])


def test_rows_that_no_time_is_left_for_are_named(bench, tmp_path, capsys):
    assert bench.main(["--smoke", "--only", "tiny", "--seconds", "-1"]) == 1
    assert "no time was left from 'weights' on" in capsys.readouterr().err

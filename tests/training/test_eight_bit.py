"""Moments in 8 bits: without the package, in a checkpoint, in the estimate of memory."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from vla_stack.errors import UserError
from vla_stack.training import checkpoint
from vla_stack.training.memory import estimate
from vla_stack.training.optimizer import make_optimizer
from vla_stack.training.optimizer_recipe import OptimizerRecipe
from vla_stack.training.recipe import Recipe, Training

EIGHT = OptimizerRecipe(eight_bit=True)


class Adam8(torch.optim.Optimizer):
    """Keeps what bitsandbytes' AdamW8bit keeps."""

    def __init__(self, groups, lr, betas, eps) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})
        table = torch.linspace(-1, 1, 256)  # one for all parameters
        for i, p in enumerate(p for g in self.param_groups for p in g["params"]):
            state = torch.arange(p.numel(), dtype=torch.uint8).reshape(p.shape)
            self.state[p] = {"step": 3 + i, "state1": state, "absmax1": torch.rand(2), "qmap1": table}


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(UserError, match="bitsandbytes.*pip install bitsandbytes"):
        make_optimizer(nn.Linear(2, 2), EIGHT)


def test_a_checkpoint_brings_back_its_slots_bit_for_bit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = SimpleNamespace(optim=SimpleNamespace(AdamW8bit=Adam8))
    monkeypatch.setitem(sys.modules, "bitsandbytes", fake)
    policy = nn.Linear(3, 4)
    before, after = make_optimizer(policy, EIGHT), make_optimizer(policy, EIGHT)
    (tmp_path / checkpoint.STATE).mkdir()
    checkpoint.save_state(tmp_path, checkpoint.state_of(policy, before, None))
    (tmp_path / checkpoint.STATE / "state.json").write_text("{}")
    for p in policy.parameters():
        after.state[p] = {}
    checkpoint.load_state(tmp_path, policy, after, None)
    for p in policy.parameters():
        for key, value in before.state[p].items():
            other = after.state[p][key]
            assert other == value if key == "step" else other.dtype == value.dtype and torch.equal(other, value)


def test_a_quarter_of_the_memory() -> None:
    policy = nn.Linear(256, 256)
    full = estimate(policy, Recipe())
    small = estimate(policy, Recipe(method=Training(optimizer=EIGHT)))
    assert full.optimizer == 2 * 4 * (256 * 256 + 256) + 8
    assert small.optimizer == 2 * (256 * 256 + 256 * 4 + 4 * 256) + 8  # a float a block; the bias stays

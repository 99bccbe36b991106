"""Fixtures of the training tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from training_fakes import record

from vla_stack.methods.imitation.recipe import Imitation
from vla_stack.training.optimizer_recipe import OptimizerRecipe
from vla_stack.training.recipe import DataRecipe, Recipe

TINY = """
name: tiny
policy:
  options: {chunk_size: 4, n_action_steps: 2, width: 16, expert_width: 16, depth: 1, heads: 2, head_dim: 8,
            vision_channels: [4, 8]}
method:
  optimizer: {lr: 1e-2, warmup_steps: 2}
  steps: 6
  batch_size: 4
  log_every: 2
  save_every: 4
threads: 1
device: cpu
"""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Several threads on a crowded machine make a step of these tiny policies a hundred times slower."""
    torch.set_num_threads(1)


@pytest.fixture
def recipe() -> Recipe:
    return Recipe(
        data=DataRecipe(root=("made-up",)),
        method=Imitation(
            optimizer=OptimizerRecipe(lr=1e-2, warmup_steps=2), steps=12, batch_size=4, log_every=2, save_every=4
        ),
        threads=1,
        device="cpu",
    )


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("data") / "arm")


@pytest.fixture
def recipe_file(tmp_path: Path, dataset: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(f"{TINY}data: {{root: {dataset}}}\n")
    return path

"""The recipe of the method ``own_loss``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vla_stack.methods.imitation.recipe import check_supervised
from vla_stack.training.recipe import Recipe, Training


@dataclass(frozen=True)
class OwnLoss(Training):
    """Train any LeRobot policy, one that is no flow policy too, by the loss that it brings along."""

    name: Literal["own_loss"] = "own_loss"

    def check_recipe(self, recipe: Recipe) -> None:
        """There are demonstrations, and something to evaluate on; raises :class:`UserError`."""
        check_supervised(recipe)

    def run(self, recipe: Recipe, run_dir: Path) -> None:
        """Train on the recipe's demonstrations."""
        from vla_stack.methods.own_loss.loss import loss
        from vla_stack.training.train import train

        train(recipe, loss, run_dir)

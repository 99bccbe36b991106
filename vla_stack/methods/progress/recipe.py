"""The recipe of the method ``progress``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from vla_stack.errors import UserError
from vla_stack.training.recipe import Recipe
from vla_stack.training.recipe_tree import Above, Count


@dataclass(frozen=True)
class Progress:
    """How far recorded episodes have come and whether they succeed, from what a frozen policy sees: values of frames.

    Attributes:
        folds: Parts of the episodes; a frame is valued by what was learnt from the other parts.
        steps: Optimiser steps of a fold.
        batch_size: Frames of a step.
        lr: Learning rate.
    """

    name: Literal["progress"] = "progress"
    folds: Annotated[int, Above(1)] = 4
    steps: Count = 1000
    batch_size: Count = 256
    lr: Annotated[float, Above(0)] = 1e-3

    def check_recipe(self, recipe: Recipe) -> None:
        """There are a policy and episodes; raises :class:`UserError`."""
        if not recipe.policy.pretrained:
            raise UserError("'policy.pretrained' is missing", "give policy=DIR, a policy whose features are read")
        if not recipe.data.root:
            raise UserError("'data.root' is missing", "give data.root=DIR, episodes that say whether they succeeded")
        for key, chosen in (("episodes", recipe.data.episodes), ("validation", recipe.data.validation)):
            if chosen:
                remedy = "leave it out; `lerobot-edit-dataset --operation.type delete_episodes` writes one of fewer"
                raise UserError(f"'data.{key}' leaves out, and `progress` values all frames of a dataset", remedy)

    def run(self, recipe: Recipe, run_dir: Path) -> None:
        """Value the frames of the recipe's datasets."""
        from vla_stack.methods.progress.fit import fit

        fit(recipe, self, run_dir)
        roots = ",".join(recipe.data.root)
        print(f"values: {run_dir}; train by them: vla train ... data.root=[{roots}] data.progress={run_dir}")

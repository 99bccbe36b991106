"""What RaC is given: the recipe of the method ``rac``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import sim
from vla_stack.errors import UserError
from vla_stack.methods.imitation.recipe import Imitation
from vla_stack.methods.practice import check_evaluated_where_it_practises
from vla_stack.training.recipe import Recipe
from vla_stack.training.recipe_tree import Count, Natural


@dataclass(frozen=True)
class Rac(Imitation):
    """Recover and correct (arXiv:2509.07953) with a simulated operator, iteration after iteration.

    Each iteration trains anew, by imitation, on all data so far; ``data`` says what of it counts. With
    ``task.options={cameras: [], privileged: true}`` the poses of objects are in the state and no camera is needed.

    Attributes:
        mode: ``rac``; ``hg_dagger`` hands control back to the policy after an intervention; ``teleop`` demonstrates.
        recover: Rule 1: the operator goes back to familiar states before correcting.
        rewind: The operator asks for a guarded auto-rewind before recovering by hand.
        iterations: Iterations after iteration 0, which is demonstrations and the policy trained on them.
        demos: Demonstrations of iteration 0.
        human_frames: Frames in which the operator acts, for each iteration.
        num_envs: Episodes that advance side by side.
        workers: Processes, or actors, that hold their environments; 0 keeps them in this one.
        rollouts: Where the workers are: ``local`` processes or actors on ``ray``.
    """

    name: Literal["rac"] = "rac"  # type: ignore[assignment]
    mode: Literal["rac", "hg_dagger", "teleop"] = "rac"
    recover: bool = True
    rewind: bool = False
    iterations: Natural = 5
    demos: Count = 30
    human_frames: Count = 800
    num_envs: Count = 20
    workers: Natural = 0
    rollouts: Literal["local", "ray"] = "local"

    def check_recipe(self, recipe: Recipe) -> None:
        """The task is one of ``sim``, and there is no data yet; raises :class:`UserError`."""
        check_evaluated_where_it_practises(recipe)
        if all(task.id != recipe.task.id for task in sim.TASKS.values()):
            known = ", ".join(task.id for task in sim.TASKS.values())
            raise UserError(f"method 'rac' has no operator for the task '{recipe.task.id}'", f"the tasks are {known}")
        if recipe.data.root or recipe.data.sources or recipe.data.episodes:
            remedy = "leave data.root, data.sources and data.episodes out"
            raise UserError("method 'rac' records its own data", remedy)
        if recipe.data.weights == "sirius" and recipe.data.interventions != "all":
            raise UserError("'data.weights' sirius needs the policy's own frames", "set data.interventions=all")
        if recipe.data.weights == "balanced" and not (self.mode == "rac" and self.recover):
            raise UserError("'data.weights' balanced needs recoveries, here are none", "set data.weights=iwr")

    def run(self, recipe: Recipe, run_dir: Path) -> None:
        """Do the iterations that are missing."""
        from vla_stack.methods.rac.loop import RacLoop

        RacLoop(recipe, run_dir).run()

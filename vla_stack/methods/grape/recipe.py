"""What GRAPE is given: the recipe of the method ``grape``."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from vla_stack.errors import UserError
from vla_stack.evaluation.constraints.score import Weights
from vla_stack.methods.practice import check_evaluated_where_it_practises
from vla_stack.training.recipe import Recipe, Training
from vla_stack.training.recipe_tree import Count, Decay, Natural, NotNegative


@dataclass(frozen=True)
class PairRecipe:
    """Which rollouts become pairs; see ``data.preferences.make_pairs``.

    Attributes:
        how: Best against worst of a start; ``random``, ``shuffled`` and ``success`` are controls.
        m: Best, and worst, rollouts of each start, of which each is paired with each: m * m pairs at most.
        delta: Least difference of the scores.
        winner_succeeds: Only pairs whose better rollout succeeded.
    """

    how: Literal["best_worst", "random", "shuffled", "success"] = "best_worst"
    m: Count = 1
    delta: NotNegative = 0.0
    winner_succeeds: bool = False


@dataclass(frozen=True)
class Grape(Training):
    """Preferences between rollouts that constraints judge: GRAPE (arXiv:2411.19309), iteration after iteration.

    ``policy.pretrained`` is aligned in the task; every iteration trains on pairs, which ``batch_size`` counts.

    Attributes:
        constraints: YAML file, see ``vla constraints``.
        objective: Preset of weights and thresholds: ``success``, ``safety`` or ``efficiency``.
        weights: Of the score's terms.
        pairs: Which rollouts become pairs.
        iterations: Iterations after iteration 0, which evaluates the policy that is to be aligned.
        starts: Starts that are rolled out in each iteration.
        rollouts_per_start: Rollouts from each start.
        start_seed: Seed of the first start; every iteration has starts of its own.
        num_envs: Episodes that advance side by side; no result depends on it.
        workers: Processes, or actors, that hold their environments; 0 keeps them in this one.
        rollouts: Where the workers are: ``local`` processes or actors on ``ray``.
        execute: Actions executed of each chunk; null leaves it to the policy.
        beta: 0 calibrates it in iteration 1 with ``calibration`` updates.
        calibration: See there.
        sigma: Noise that is injected after each step of the flow's sampler in rollouts, whose chains are then kept and
            scored exactly; 0 rolls out as deployed and scores by the surrogate.
        films: Starts that the report shows before and after.
        aggregate: How a trajectory's decisions are summed up: ``sum``, ``mean``, ``truncate_min`` or ``window``.
        window: Decisions of a window.
        preference: Weight of the preference loss.
        proximal: Weight of the tie to the reference.
        sft: Weight of the imitation error of the winners' decisions.
        draws: (t, noise) pairs a decision, for flow heads.
        micro: Decisions whose activations are held at a time.
    """

    shares_batches: ClassVar[bool] = False

    name: Literal["grape"] = "grape"
    ema: Decay = 0.0
    constraints: str = "obstacle"
    objective: Literal["success", "safety", "efficiency"] = "success"
    weights: Weights = field(default_factory=Weights)
    pairs: PairRecipe = field(default_factory=PairRecipe)
    iterations: Natural = 3
    starts: Count = 64
    rollouts_per_start: Count = 8
    start_seed: Natural = 100_000
    num_envs: Count = 16
    workers: Natural = 0
    rollouts: Literal["local", "ray"] = "local"
    execute: int | None = None
    beta: NotNegative = 0.0
    calibration: Count = 40
    sigma: NotNegative = 0.0
    films: Natural = 3
    aggregate: Literal["sum", "mean", "truncate_min", "window"] = "sum"
    window: Count = 8
    preference: NotNegative = 1.0
    proximal: NotNegative = 0.0
    sft: NotNegative = 0.0
    draws: Count = 4
    micro: Count = 256

    def check_recipe(self, recipe: Recipe) -> None:
        """There is a policy and a task, and starts are not evaluated on; raises :class:`UserError`."""
        check_evaluated_where_it_practises(recipe)
        if not recipe.policy.pretrained:
            raise UserError("'policy.pretrained' is missing", "name the policy to align, for example policy=shipped")
        if not recipe.task.id:
            raise UserError("'task' is missing", "for example task=sim/obstacle-v0")
        e = recipe.eval
        trained_on = range(self.start_seed, self.start_seed + self.starts * max(1, self.iterations))
        measured_on = range(e.seed, e.seed + e.episodes)
        if shared := range(max(trained_on.start, measured_on.start), min(trained_on.stop, measured_on.stop)):
            raise UserError(
                f"'eval.seed' {e.seed} evaluates on {len(shared)} of the starts, {shared[0]} to {shared[-1]}",
                "choose another eval.seed",
            )

    def run(self, recipe: Recipe, run_dir: Path) -> None:
        """Do the iterations that are missing, and write the report."""
        from vla_stack.methods.grape.loop import GrapeLoop
        from vla_stack.methods.grape.report import write_grape_report

        loop = GrapeLoop(recipe, run_dir)
        loop.run()
        print(f"report: {write_grape_report(loop)}")

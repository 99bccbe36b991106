"""What off-policy methods around a frozen flow policy are given alike."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from vla_stack.errors import UserError
from vla_stack.methods.practice import Reward, check_evaluated_where_it_practises, is_imagined, simulated
from vla_stack.methods.sac import SacRecipe
from vla_stack.training.recipe import Recipe
from vla_stack.training.recipe_tree import Count, Natural, Within

if TYPE_CHECKING:
    from vla_stack.methods.on_flow.decisions import Decisions
    from vla_stack.methods.on_flow.learner import FlowLearner


def small_sac(temperature: float) -> SacRecipe:
    """Critics and actor on features that are learnt already: RLPD's ten critics, four updates of them a decision."""
    return SacRecipe(
        actor=(128, 128), critic=(128, 128), num_critics=10, layer_norm=True, temperature=temperature,
        target_entropy=-0.5, entropy_backup=False, actor_q="mean", batch=128, utd=4, actor_rows="last",
    )  # fmt: skip


@dataclass(frozen=True)
class OnFlow:
    """What learners share that act around the frozen ``policy.pretrained`` and read its features and the state.

    Attributes:
        name: Of the method.
        sac: Networks and rates of critics and actor; ``batch`` rows for each of ``utd`` critic steps a decision.
        reward: ``step`` pays -1 a step until success, ``success`` 1 at success, ``task`` the environment's own reward.
        judge: Directory of a world model whose judges say what success is in training; evaluations ask the task.
        live: Dataset that a robot is recording into (``vla run --record episodic``, or a console): it acts, and nothing
            is simulated or evaluated; an iteration is ``episodes`` that were recorded.
        gamma: Discount of a control step.
        iterations: Iterations of rollouts and updates.
        episodes: Episodes an iteration.
        warmup: Iterations in which the policy acts as it is; the updates of all of their decisions follow the last.
        num_envs: Episodes that advance side by side; no result depends on it.
        workers: Processes, or actors, that hold the environments; 0 keeps them in the training's.
        rollouts: Where workers are: ``local`` processes, or ``ray``.
        save_every: Iterations between checkpoints.
        keep: Checkpoints kept on disk.
    """

    remembers: ClassVar[bool] = True  # demonstrations where there are any, half of each batch

    name: str = ""
    sac: SacRecipe = field(default_factory=SacRecipe)
    reward: Reward = "step"
    judge: str = ""
    live: str = ""
    gamma: Annotated[float, Within(0, 1, closed=False)] = 0.98
    iterations: Natural = 40
    episodes: Count = 16
    warmup: Count = 1
    num_envs: Count = 16
    workers: Natural = 0
    rollouts: Literal["local", "ray"] = "local"
    save_every: Count = 5
    keep: Count = 1

    def check_recipe(self, recipe: Recipe) -> None:
        """There are a policy and a task, and something is learnt; raises :class:`UserError`."""
        if 0 < self.iterations < self.warmup:
            raise UserError(
                f"'method.warmup' is {self.warmup}, of {self.iterations} iterations: nothing would be learnt",
                f"set method.warmup={self.iterations} or less",
            )
        check_evaluated_where_it_practises(recipe)
        if not recipe.policy.pretrained:
            raise UserError("'policy.pretrained' is missing", "give policy=DIR, a trained policy to start from")
        if not (recipe.task.id or self.live):
            raise UserError("'task' is missing", "for example task=sim/place-v0")
        if self.remembers and len(recipe.data.root) > 1:
            raise UserError(
                f"'data.root' names {len(recipe.data.root)} datasets, method '{self.name}' remembers one",
                "give data.root=DIR, the demonstrations of one dataset, or none: data.root=[]",
            )
        if self.live and not self.remembers:
            raise UserError(
                f"what a robot records does not tell '{self.name}' what it acts by", "use dsrl_na, expo_vla or rlpd_vla"
            )
        if self.live and (self.judge or self.reward == "task"):
            raise UserError("a robot records success alone", "leave 'method.judge' out, and set method.reward=step")
        if self.judge and is_imagined(recipe.task):
            raise UserError(f"task={recipe.task.id} has judges of its own", "leave 'method.judge' out")
        if self.judge and self.reward == "task":
            raise UserError(
                "'method.judge' says what success is, method.reward=task pays none", "set method.reward=success"
            )
        if self.remembers and recipe.data.root and self.reward == "task":
            raise UserError("method.reward=task, and demonstrations tell success alone", "set method.reward=step")

    def learner(self, base: Any, seen: int, steps: int, offline: Decisions | None, seed: int) -> FlowLearner:
        """What learns.

        Args:
            base: The frozen flow policy.
            seen: Width of what it observes.
            steps: Actions of a chunk that are executed.
            offline: Demonstrations, where it remembers any.
            seed: Of weights, noise and batches.
        """
        raise NotImplementedError

    def run(self, recipe: Recipe, run_dir: Path) -> None:
        """Do the iterations that are missing."""
        from vla_stack.methods.episodes_loop import CURVE
        from vla_stack.methods.on_flow.live import LiveLoop
        from vla_stack.methods.on_flow.loop import FlowLoop
        from vla_stack.training.checkpoint import PRETRAINED

        if self.live:
            LiveLoop(recipe, run_dir).run()
            print(f"curve: {run_dir / CURVE}; serve it: vla serve --policy {run_dir} --follow")
            return
        policy = FlowLoop(recipe, run_dir).run() / PRETRAINED
        env = simulated(recipe.task).id
        print(f"curve: {run_dir / CURVE}; try it: vla eval --policy {policy} --env {env} --mode sync")

"""What ReinFlow is given: the recipe of the method ``reinflow``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from vla_stack.errors import UserError
from vla_stack.methods.practice import check_evaluated_where_it_practises, is_imagined, simulated
from vla_stack.training.recipe import Recipe
from vla_stack.training.recipe_tree import Above, AtLeast, Count, Natural, NotNegative, Positive, Share, Within


@dataclass(frozen=True)
class ReinFlow:
    """PPO on a flow policy through the likelihood of its noisy Euler chain: ReinFlow (arXiv:2505.22094).

    Starts from ``policy.pretrained``, a flow policy. In an imagined task the evaluation is in the task itself.

    Attributes:
        name: Of the method.
        reward: ``success``: 1 at success, else 0; ``task``: the environment's own.
        judge: Directory of a world model whose judges say what success is in training; evaluations ask the task.
        iterations: Iterations of rollouts and update.
        episodes: Episodes an iteration.
        num_envs: Episodes that advance side by side; no result depends on it.
        workers: Processes, or actors, that hold the environments; 0 keeps them in the training's.
        rollouts: Where workers are: ``local`` processes, or ``ray``.
        save_every: Iterations between checkpoints.
        keep: Checkpoints kept on disk.
        denoising_steps: K, Euler steps of the chain and of the policy that is deployed.
        sigma_schedule: ``learn``: the noise within its bounds; ``learn_decay``: the upper bound falls later on;
            ``fixed``: the geometric mean of the bounds, an ablation.
        sigma_low: Least standard deviation of the injected noise, in normalised action units.
        sigma_high: Largest.
        fit_episodes: Rollouts for each size of noise that is tried before training, see ``noise.py``: the bounds are
            then fitted to the policy, in the proportion of those given; 0 takes these.
        limit: Bound of the mean of each transition, in normalised action units.
        gamma: Discount for each environment step.
        gae_lambda: lambda of the advantages, for each decision.
        clip: Clip range of the ratio of an entry, epsilon.
        epochs: Passes over an iteration's decisions.
        minibatch: Decisions an optimiser step, at least 2: advantages are normalised over them.
        actor_lr: Learning rate of policy and noise.
        critic_lr: Learning rate of the value.
        critic_warmup: Iterations in which the value alone is trained.
        entropy: Weight of the chain's entropy an entry.
        bc: Weight of the squared distance to the pretrained policy's chunk from the same noise (the "W2" term).
        target_kl: Mean of half the squared log-ratio of the whole chain at which the actor's passes end.
        clip_norm: Largest gradient norm, of the actor and of the critic each.
    """

    name: Literal["reinflow"] = "reinflow"
    reward: Literal["success", "task"] = "success"
    judge: str = ""
    iterations: Natural = 60
    episodes: Count = 48
    num_envs: Count = 16
    workers: Natural = 0
    rollouts: Literal["local", "ray"] = "local"
    save_every: Count = 5
    keep: Count = 1
    denoising_steps: Count = 4
    sigma_schedule: Literal["learn", "learn_decay", "fixed"] = "learn"
    sigma_low: Positive = 0.08
    sigma_high: Positive = 0.2
    fit_episodes: Natural = 0
    limit: Positive = 5.0
    gamma: Annotated[float, Above(0), Within(0, 1)] = 0.99
    gae_lambda: Share = 0.95
    clip: Positive = 0.01
    epochs: Count = 6
    minibatch: Annotated[int, AtLeast(2)] = 128
    actor_lr: Positive = 5e-5
    critic_lr: Positive = 1e-3
    critic_warmup: Natural = 2
    entropy: NotNegative = 0.0
    bc: NotNegative = 0.0
    target_kl: Positive = 1.0
    clip_norm: Positive = 1.0

    def check(self) -> None:
        """Options go together; raises :class:`UserError`."""
        if self.sigma_high < self.sigma_low:
            raise UserError(
                f"'method.sigma_high' is {self.sigma_high}, expected at least method.sigma_low, {self.sigma_low}",
                f"set method.sigma_high={self.sigma_low} or more, or a lower method.sigma_low",
            )
        if self.judge and self.reward == "task":
            raise UserError("'method.judge' says what success is, reward=task pays none", "set method.reward=success")

    def check_recipe(self, recipe: Recipe) -> None:
        """There is a policy and a task; raises :class:`UserError`."""
        check_evaluated_where_it_practises(recipe)
        if not recipe.policy.pretrained:
            raise UserError("'policy.pretrained' is missing", "give policy=DIR, a trained policy to start from")
        if not recipe.task.id:
            raise UserError("'task' is missing", "for example task=sim/place-v0")
        if self.judge and is_imagined(recipe.task):
            raise UserError(f"task={recipe.task.id} has judges of its own", "leave 'method.judge' out")

    def run(self, recipe: Recipe, run_dir: Path) -> None:
        """Do the iterations that are missing."""
        from vla_stack.methods.episodes_loop import CURVE
        from vla_stack.methods.reinflow.loop import ReinFlowLoop
        from vla_stack.training.checkpoint import PRETRAINED

        policy = ReinFlowLoop(recipe, run_dir).run() / PRETRAINED
        env = simulated(recipe.task).id
        print(f"curve: {run_dir / CURVE}; try it: vla eval --policy {policy} --env {env} --mode sync")

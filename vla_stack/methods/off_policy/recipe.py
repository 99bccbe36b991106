"""What the loop is given, and what of it is refused when the environment is known."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from vla_stack.errors import UserError
from vla_stack.methods.expo import ExpoRecipe
from vla_stack.methods.off_policy.scripted import OfflineRecipe
from vla_stack.methods.off_policy.state_env import EnvRecipe
from vla_stack.methods.wsrl import WsrlRecipe
from vla_stack.training.recipe_tree import plain


@dataclass(frozen=True)
class RayRecipe:
    """Rollout actors on Ray.

    Attributes:
        workers: Actors, of ``num_envs`` environments each.
        fragment: Control steps a request.
        max_lag: Published versions that a fragment may be behind.
    """

    workers: int = 2
    fragment: int = 20
    max_lag: int = 2


@dataclass(frozen=True)
class OffPolicyRecipe:
    """A run.

    Attributes:
        loop: ``off_policy``.
        name: Of the run.
        method: ``wsrl`` or ``expo``, with its baselines.
        env: Environment and reward.
        offline: Stored episodes.
        wsrl: Settings of that method.
        expo: Settings of that method.
        horizon: Steps of a chunk, which is one action to the critics, h.
        gamma: Discount of a control step.
        steps: Control steps online, of all environments together.
        num_envs: Environments side by side.
        scenes: Training scenes that are drawn by the variance of their success; 0 meets a new scene each episode.
        rollouts: ``local``: environments in this process; ``ray``: in actors.
        ray: Its settings.
        operator: Endpoint at which a person may intervene in the first environment, e.g. ``tcp://127.0.0.1:5560``.
        eval_every: Control steps between evaluations; each also saves a checkpoint, from which a stopped run goes on.
        eval_episodes: Episodes of an evaluation.
        eval_seed: Seed of the first of them, the same at every evaluation.
        eval_envs: Environments of an evaluation side by side.
        log_every: Offline steps between records of losses; online there is one at each evaluation.
        seed: Of networks, noise, batches and training scenes.
        device: Torch device of the networks, or ``auto``; stored experience stays in main memory.
        threads: CPU threads.
        wandb: Weights & Biases project; empty does not log there.
        output_dir: Run directory; empty makes ``outputs/rounds/<name>-<time>``.
    """

    loop: Literal["off_policy"] = "off_policy"
    name: str = "off_policy"
    method: Literal["wsrl", "expo"] = "wsrl"
    env: EnvRecipe = field(default_factory=EnvRecipe)
    offline: OfflineRecipe = field(default_factory=OfflineRecipe)
    wsrl: WsrlRecipe = field(default_factory=WsrlRecipe)
    expo: ExpoRecipe = field(default_factory=ExpoRecipe)
    horizon: int = 4
    gamma: float = 0.99
    steps: int = 20_000
    num_envs: int = 1
    scenes: int = 0
    rollouts: Literal["local", "ray"] = "local"
    ray: RayRecipe = field(default_factory=RayRecipe)
    operator: str = ""
    eval_every: int = 2000
    eval_episodes: int = 50
    eval_seed: int = 900_000_000
    eval_envs: int = 10
    log_every: int = 200
    seed: int = 0
    device: str = "cpu"
    threads: int = 1
    wandb: str = ""
    output_dir: str = ""

    @property
    def slots(self) -> int:
        """Environments that the learner hears of."""
        return self.num_envs * (self.ray.workers if self.rollouts == "ray" else 1)


def check_evaluations(r: OffPolicyRecipe, limit: int) -> None:
    """Refuse evaluations so close together that no episode between them would reach its limit.

    Raises:
        UserError: They are.
    """
    least = r.num_envs * limit
    if r.rollouts == "local" and r.eval_every < least:
        raise UserError(
            f"'eval.every' is {r.eval_every}, and an evaluation begins new episodes: in {r.num_envs} environments none "
            f"would reach its limit of {limit} steps",
            f"set eval.every={least} or more, or task.options.max_episode_steps={max(1, r.eval_every // r.num_envs)}",
        )


def check_resumed(r: OffPolicyRecipe, before: dict[str, Any]) -> None:
    """Refuse to go on with a run whose stored experience is of something else.

    Args:
        r: The recipe now.
        before: That of the checkpoint.

    Raises:
        UserError: It is.
    """
    now = plain(dataclasses.asdict(r))
    for key in ("env", "offline", "horizon", "gamma", "num_envs", "seed"):
        if now[key] != before[key]:
            raise UserError(
                f"the run that is to go on has {key}={before[key]}, not {now[key]}",
                "start a new run, with an output_dir of its own",
            )

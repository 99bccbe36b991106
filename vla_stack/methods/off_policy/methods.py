"""What off-policy reinforcement learning is given: the recipes of the methods ``wsrl`` and ``expo``."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from vla_stack.errors import UserError
from vla_stack.methods.cal_ql import CalQlRecipe
from vla_stack.methods.expo import ExpoRecipe
from vla_stack.methods.off_policy.recipe import OffPolicyRecipe, RayRecipe
from vla_stack.methods.off_policy.scripted import OfflineRecipe
from vla_stack.methods.off_policy.state_env import EnvRecipe
from vla_stack.methods.sac import SacRecipe
from vla_stack.methods.wsrl import ARMS, ArmName, WsrlRecipe
from vla_stack.training.recipe import Recipe
from vla_stack.training.recipe_tree import Count, Natural, NotNegative, Within


@dataclass(frozen=True)
class Stored:
    """Episodes that are there before anything is learnt: of the dataset ``data.root``, else of the scripted expert.

    Attributes:
        episodes: How many are kept; of a dataset at most, the first ones.
        noise: Noise of the expert, in turns; see ``sim.make_expert``.
        failures: Whether unsuccessful episodes are kept.
        seed: Of the expert's episodes.
    """

    episodes: Natural = 40
    noise: tuple[float, ...] = (0.3, 0.6, 1.0)
    failures: bool = True
    seed: Natural = 0


@dataclass(frozen=True)
class OffPolicy:
    """What learners share that act, remember and learn from what they remember.

    Attributes:
        name: Of the method.
        reward: ``step`` pays -1 a step until success, ``success`` 1 at success, ``own`` the environment's reward.
        judge: Directory of a world model whose judges say what success is, from its cameras, in place of the task.
        features: Directory of a flow policy; observations are its frozen features and the robot's state, from its
            cameras. Empty observes the state with the poses of the objects, and no cameras.
        offline: Stored episodes.
        horizon: Steps of a chunk, which is one action to the critics, h.
        gamma: Discount of a control step.
        steps: Control steps online, of all environments together.
        num_envs: Environments side by side, of each worker.
        scenes: Training scenes that are sampled by the variance of their success; 0 meets a new scene each episode.
        rollouts: ``local``: environments in this process; ``ray``: in actors.
        workers: Actors on Ray.
        fragment: Control steps a request to an actor.
        max_lag: Published versions that a fragment may be behind.
        operator: Endpoint at which a person may intervene in the first environment, e.g. ``tcp://127.0.0.1:5560``.
        log_every: Offline steps between records of losses; online there is one at each evaluation.
        wandb: Weights & Biases project to log to as well; empty does not.
    """

    name: str = ""
    reward: Literal["step", "success", "own"] = "step"
    judge: str = ""
    features: str = ""
    offline: Stored = field(default_factory=Stored)
    horizon: Count = 4
    gamma: Annotated[float, Within(0, 1, closed=False)] = 0.99
    steps: Natural = 20_000
    num_envs: Count = 1
    scenes: Natural = 0
    rollouts: Literal["local", "ray"] = "local"
    workers: Count = 2
    fragment: Count = 20
    max_lag: Natural = 2
    operator: str = ""
    log_every: Count = 200
    wandb: str = ""

    @property
    def learns_from_stored(self) -> str:
        """What learns from the stored episodes, for a message; empty where nothing does."""
        return f"method '{self.name}'"

    def check_recipe(self, recipe: Recipe) -> None:
        """What would fail later, and only after minutes or never; raises :class:`UserError`."""
        if not recipe.task.id:
            raise UserError("'task' is missing", "for example task=sim/pick-v0")
        if not recipe.eval.every:
            raise UserError(
                "'eval.every' is 0, and a run saves its checkpoints at evaluations", "set eval.every=2000 control steps"
            )
        if len(recipe.data.root) > 1:
            raise UserError("'data.root' names several datasets, stored episodes are of one", "vla data merge")
        if (what := self.learns_from_stored) and not self.offline.episodes:
            raise UserError(
                f"'method.offline.episodes' is 0, and {what} learns from stored episodes",
                "set method.offline.episodes=40, or method=wsrl method.arm=sac",
            )
        if self.offline.episodes and not self.offline.noise and not recipe.data.root:
            raise UserError(
                "'method.offline.noise' is empty, expected a noise for episodes to take in turns",
                "set method.offline.noise=0.3",
            )
        if self.offline.episodes and not self.offline.failures and self.reward == "own":
            raise UserError(
                "'method.offline.failures' is false, and reward=own knows no success",
                "set method.offline.failures=true or method.reward=step",
            )
        if self.rollouts == "ray":
            self._check_ray()

    def _check_ray(self) -> None:
        here, install = "set method.rollouts=local", "in the clone: pip install -e '.[scale]'"
        if self.scenes:
            raise UserError(f"'method.scenes' is {self.scenes}, which needs rollouts=local", f"set 0, or {here}")
        if self.operator:
            raise UserError(f"'method.operator' is {self.operator}, which needs rollouts=local", here)
        if importlib.util.find_spec("ray") is None:
            raise UserError("'method.rollouts' is ray, and Ray is not installed", f"{install}; or {here}")

    def settings(self) -> dict[str, Any]:
        """The method's own part of the loop's recipe."""
        raise NotImplementedError

    def run(self, recipe: Recipe, run_dir: Path) -> None:
        """Learn offline, then online, until the steps are done."""
        from vla_stack.methods.off_policy import loop

        loop.main(self.loop_recipe(recipe), run_dir)

    def loop_recipe(self, recipe: Recipe) -> OffPolicyRecipe:
        """What the loop is given."""
        stored, options = self.offline, dict(recipe.task.options)
        limit, rate = options.pop("max_episode_steps", 0), options.pop("control_hz", 0.0)
        return OffPolicyRecipe(
            name=recipe.name,
            env=EnvRecipe(recipe.task.id, limit, rate, self.reward, self.features, self.judge, options),
            offline=OfflineRecipe(
                "".join(recipe.data.root), stored.episodes, stored.noise, stored.failures, stored.seed
            ),
            horizon=self.horizon,
            gamma=self.gamma,
            steps=self.steps,
            num_envs=self.num_envs,
            scenes=self.scenes,
            rollouts=self.rollouts,
            ray=RayRecipe(self.workers, self.fragment, self.max_lag),
            operator=self.operator,
            eval_every=recipe.eval.every,
            eval_episodes=recipe.eval.episodes,
            eval_seed=recipe.eval.seed,
            eval_envs=recipe.eval.num_envs,
            log_every=self.log_every,
            seed=recipe.seed,
            device=recipe.device,
            threads=recipe.threads or 1,
            wandb=self.wandb,
            **self.settings(),
        )


@dataclass(frozen=True)
class WsrlMethod(OffPolicy):
    """Offline reinforcement learning, a warm-up, and online learning without old data: WSRL (arXiv:2412.07762).

    Attributes:
        arm: WSRL, or one of its baselines.
        sac: Networks and rates, the same offline and online.
        cal_ql: The conservative loss.
        offline_steps: Steps of offline training.
        warmup: K, control steps of the frozen policy that begin the online buffer.
    """

    name: Literal["wsrl"] = "wsrl"
    arm: ArmName = "wsrl"
    sac: SacRecipe = field(default_factory=lambda: WsrlRecipe().sac)
    cal_ql: CalQlRecipe = field(default_factory=CalQlRecipe)
    offline_steps: Natural = 20_000
    warmup: Natural = 5000

    @property
    def learns_from_stored(self) -> str:
        arm = ARMS[self.arm]
        return f"method.arm={self.arm}" if arm.retain or (arm.pretrain and self.offline_steps > 0) else ""

    def settings(self) -> dict[str, Any]:
        own = WsrlRecipe(self.arm, self.sac, self.cal_ql, self.offline_steps, self.warmup)
        return {"method": "wsrl", "wsrl": own}


@dataclass(frozen=True)
class ExpoMethod(OffPolicy):
    """A flow policy that imitates, an edit policy, and the best of what they offer: EXPO (arXiv:2507.07986).

    Attributes:
        sac: Networks and rates of critics and edit policy.
        base: Hidden widths of the base.
        euler_steps: Steps of a base sample.
        lr_base: Learning rate of the base, cosine in the imitation, constant online.
        base_ema: Step of the base's average, which acts; targets use the base itself.
        base_steps: Imitation steps before the critics' first.
        samples: N, base samples that are chosen from.
        edits: How many of them are edited as well; 0 is best-of-N.
        beta: Largest edit, in normalised action units.
        unedited: Whether base samples themselves may be chosen; without them, and with N = 1, only edits act.
        successes: Whether the base imitates, online, chunks of successful episodes alone.
        learn: Whether anything is learnt online; without, the base acts as it is.
        warmup: Control steps before the first update.
    """

    name: Literal["expo"] = "expo"
    sac: SacRecipe = field(default_factory=lambda: ExpoRecipe().sac)
    base: tuple[int, ...] = (256, 256, 256)
    euler_steps: Count = 4
    lr_base: float = 3e-4
    base_ema: float = 0.001
    base_steps: Natural = 2000
    samples: Count = 8
    edits: Natural = 8
    beta: NotNegative = 0.1
    unedited: bool = True
    successes: bool = False
    learn: bool = True
    warmup: Natural = 0

    def check(self) -> None:
        """Options go together; raises :class:`UserError`."""
        if self.edits > self.samples:
            raise UserError(
                f"'method.edits' is {self.edits}, there are {self.samples} samples to edit, 'method.samples'",
                f"set method.edits={self.samples} or less",
            )
        if not self.edits and not self.unedited:
            raise UserError(
                "'method.edits' is 0 and 'method.unedited' is false: there is nothing to choose",
                "set method.unedited=true",
            )
        if self.successes and self.reward == "own":
            raise UserError(
                "'method.successes' is true, and reward=own knows no success",
                "set method.successes=false or method.reward=step",
            )

    def settings(self) -> dict[str, Any]:
        own = ExpoRecipe(**{name: getattr(self, name) for name in ExpoRecipe.__dataclass_fields__})
        return {"method": "expo", "expo": own}

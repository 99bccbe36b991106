"""What the off-policy methods, ``methods/wsrl.py`` and ``methods/expo.py``, are given alike."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from vla_stack.errors import UserError
from vla_stack.methods.practice import LIMIT, Reward, check_evaluated_where_it_practises, is_imagined
from vla_stack.training.recipe import Recipe
from vla_stack.training.recipe_tree import Count, Natural, Within

if TYPE_CHECKING:
    from vla_stack.methods.off_policy.learner import Learner
    from vla_stack.methods.replay_buffer import ReplayBuffer


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
        reward: ``step`` pays -1 a step until success, ``success`` 1 at success, ``task`` the environment's own reward.
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
    reward: Reward = "step"
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

    @property
    def slots(self) -> int:
        """Environments that the learner hears of."""
        return self.num_envs * (self.workers if self.rollouts == "ray" else 1)

    def check_recipe(self, recipe: Recipe) -> None:
        """What would fail later, and only after minutes or never; raises :class:`UserError`."""
        check_evaluated_where_it_practises(recipe)
        if not recipe.task.id:
            raise UserError("'task' is missing", "for example task=sim/pick-v0")
        if not recipe.eval.every:
            raise UserError(
                "'eval.every' is 0, and a run saves its checkpoints at evaluations", "set eval.every=2000 control steps"
            )
        if len(recipe.data.root) > 1:
            raise UserError("'data.root' names several datasets, stored episodes are of one", "vla data merge")
        self._check_task(recipe)
        self._check_offline(recipe)
        if self.rollouts == "ray":
            self._check_ray()

    def _check_task(self, recipe: Recipe) -> None:
        if is_imagined(recipe.task):
            if not self.features:
                raise UserError(
                    f"{recipe.task.id} shows pictures, no poses of objects",
                    "set method.features=POLICY, which looks at them",
                )
            if self.judge or self.reward == "task" or set(recipe.task.options) - {LIMIT}:
                raise UserError(
                    f"{recipe.task.id} has a rate and judges of its own",
                    "leave out method.judge, task.options and method.reward=task",
                )
        if self.judge and self.reward == "task":
            raise UserError(
                "'method.judge' says what success is, method.reward=task pays none", "set method.reward=success"
            )

    def _check_offline(self, recipe: Recipe) -> None:
        if recipe.data.root and self.reward == "task":
            raise UserError(
                f"method.reward=task, and {recipe.data.root[0]} tells success alone",
                "set method.reward=step or method.reward=success",
            )
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
        if self.offline.episodes and not self.offline.failures and self.reward == "task":
            raise UserError(
                "'method.offline.failures' is false, and reward=task knows no success",
                "set method.offline.failures=true or method.reward=step",
            )

    def _check_ray(self) -> None:
        here, install = "set method.rollouts=local", 'pip install "vla-stack[scale]"'
        if self.scenes:
            raise UserError(f"'method.scenes' is {self.scenes}, which needs rollouts=local", f"set 0, or {here}")
        if self.operator:
            raise UserError(f"'method.operator' is {self.operator}, which needs rollouts=local", here)
        if importlib.util.find_spec("ray") is None:
            raise UserError("'method.rollouts' is ray, and Ray is not installed", f"{install}; or {here}")

    def learner(self, offline: ReplayBuffer, store: ReplayBuffer, seed: int, device: str) -> Learner:
        """What learns.

        Args:
            offline: Stored episodes.
            store: The online buffer, empty.
            seed: Of weights, noise and batches.
            device: Where the networks are.
        """
        raise NotImplementedError

    def run(self, recipe: Recipe, run_dir: Path) -> None:
        """Learn offline, then online, until the steps are done."""
        from vla_stack.methods.off_policy import loop

        loop.main(recipe, run_dir)

"""What training a world model is given: the recipe of the method ``world_model``."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from vla_stack.errors import UserError
from vla_stack.training.optimizer_recipe import OptimizerRecipe
from vla_stack.training.recipe import Recipe, Training
from vla_stack.training.recipe_tree import Count, Decay, Natural, Positive, build
from vla_stack.world_model.config import DynamicsConfig, HeadsConfig, SvdConfig, VaeConfig

QUARTERS = 4  # least batch of the heads


@dataclass(frozen=True)
class Stage:
    """How long and how fast one stage is trained; the rest is the method's.

    Attributes:
        steps: Optimiser steps.
        batch_size: Samples per forward pass.
        accumulate: Forward passes per optimiser step.
        ema: Decay of the average of the weights, which is what the stage leaves.
        lr: Peak learning rate.
        warmup_steps: Steps of linear warm-up.
    """

    steps: Count = 1000
    batch_size: Count = 32
    accumulate: Count = 1
    ema: Decay = 0.999
    lr: Positive = 3e-4
    warmup_steps: Natural = 100


class Shapes(NamedTuple):
    """Configurations of a world model's parts."""

    vae: VaeConfig
    dynamics: DynamicsConfig
    heads: HeadsConfig
    svd: SvdConfig


@dataclass(frozen=True)
class World:
    """A world model: what cameras will see, given the poses that the tool will take (Ctrl-World, arXiv:2510.10125).

    Three trainings, one after another: autoencoder, dynamics, heads; each is frozen when the next one begins. Learns
    from one dataset, ``data.root`` and ``data.cameras``. ``task`` is what was recorded, for first frames; empty for a
    real robot. ``eval.every`` measures the dynamics on held-out episodes.

    Attributes:
        name: Of the method.
        start: ``tiny`` trains all from scratch; ``svd`` begins with Stable Video Diffusion.
        calibration: Where the cameras are: ``auto`` is as the simulator has them, for its tasks; ``none``; or a file
            (docs/world_model.md). A camera on the tool then knows where in its view to look for what was seen before.
        vae: Shape of the autoencoder: fields of :class:`VaeConfig`.
        dynamics: Shape, training noise and sampler of the dynamics: fields of :class:`DynamicsConfig`.
        heads: Sizes of probe and judges: fields of :class:`HeadsConfig`.
        svd: Weights that ``start: svd`` begins with: fields of :class:`SvdConfig`. Its autoencoder is not trained.
        train_vae, train_dynamics, train_heads: Trainings.
        optimizer: Of all three, but for what a training says itself.
        generated: Rollouts imagined after the dynamics' training that judges learn from as well.
        vae_from: World model whose autoencoder is taken over instead of training one.
        log_every: Steps between log records.
        save_every: Steps between checkpoints.
    """

    name: Literal["world_model"] = "world_model"
    start: Literal["tiny", "svd"] = "tiny"
    calibration: str = "auto"
    vae: dict[str, Any] = field(default_factory=dict)
    dynamics: dict[str, Any] = field(default_factory=dict)
    heads: dict[str, Any] = field(default_factory=dict)
    svd: dict[str, Any] = field(default_factory=dict)
    train_vae: Stage = field(default_factory=Stage)
    train_dynamics: Stage = field(default_factory=Stage)
    train_heads: Stage = field(default_factory=Stage)
    optimizer: OptimizerRecipe = field(default_factory=OptimizerRecipe)
    generated: Count = 96
    vae_from: str = ""
    log_every: Count = 20
    save_every: Count = 250

    def check(self) -> None:
        """Shapes are those of the model's configuration classes; raises :class:`UserError`."""
        dynamics = self.shapes().dynamics
        if dynamics.width % dynamics.heads:
            what = f"'method.dynamics.width' {dynamics.width} is no multiple of its {dynamics.heads} heads"
            raise UserError(what, f"use {dynamics.width // dynamics.heads * dynamics.heads or dynamics.heads}")
        if self.train_heads.batch_size < QUARTERS:
            what = f"'method.train_heads.batch_size' is {self.train_heads.batch_size}"
            raise UserError(what, f"use at least {QUARTERS}: a quarter of a batch is imagined, another decoded")

    def shapes(self) -> Shapes:
        """The model's configurations."""
        given = ((VaeConfig, "vae"), (DynamicsConfig, "dynamics"), (HeadsConfig, "heads"), (SvdConfig, "svd"))
        return Shapes(*(build(kind, getattr(self, key), "", f"method.{key}.") for kind, key in given))

    def check_recipe(self, recipe: Recipe) -> None:
        """There is one dataset; raises :class:`UserError`."""
        if not recipe.data.root:
            raise UserError("'data.root' is missing", "give data.root=DIR, a dataset of `vla collect --mixed`")
        if len(recipe.data.root) > 1:
            raise UserError("'data.root' names several datasets, a world model learns from one", "vla data merge")
        ignored = {"data.episodes": recipe.data.episodes, "data.validation": recipe.data.validation}
        for key in (key for key, value in ignored.items() if value):
            remedy = "leave it out; `lerobot-edit-dataset --operation.type delete_episodes` writes a dataset of fewer"
            raise UserError(f"'{key}' is not for a world model, which holds every tenth episode out itself", remedy)

    def run(self, recipe: Recipe, run_dir: Path) -> None:
        """Train the stages that are missing."""
        from vla_stack.world_model.train import WorldTraining

        WorldTraining(recipe, run_dir).run()
        print(f"done: {run_dir / 'model'}; try: vla eval --env imagined:{run_dir}, or: vla imagine --model {run_dir}")

    def training(self, stage: str) -> Training:
        """What the training loop is given in a stage."""
        s: Stage = getattr(self, f"train_{stage}")
        optimizer = replace(self.optimizer, lr=s.lr, warmup_steps=s.warmup_steps)
        shape = (stage, s.steps, s.batch_size, s.accumulate, optimizer, s.ema)
        return Training(*shape, log_every=self.log_every, save_every=self.save_every)

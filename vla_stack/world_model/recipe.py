"""The recipe of a world model: ``vla train configs/world_model_tiny.yaml``."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

import yaml

from vla_stack.training.recipe import OptimizerRecipe, Recipe
from vla_stack.training.recipe_tree import plain
from vla_stack.world_model.dynamics import DynamicsConfig
from vla_stack.world_model.heads import HeadsConfig
from vla_stack.world_model.svd import SvdConfig
from vla_stack.world_model.vae import VaeConfig

STAGES = ("vae", "dynamics", "heads")


@dataclass(frozen=True)
class StageRecipe:
    """How long and how fast one stage is trained; see :class:`vla_stack.training.recipe.Recipe`."""

    steps: int = 1000
    batch_size: int = 32
    accumulate: int = 1
    ema: float = 0.999
    save_every: int = 250
    eval_every: int = 0
    optimizer: OptimizerRecipe = field(default_factory=lambda: OptimizerRecipe(lr=3e-4))


@dataclass(frozen=True)
class StagesRecipe:
    """The stages, in the order in which they are trained; each is frozen when the next one begins."""

    vae: StageRecipe = field(default_factory=StageRecipe)
    dynamics: StageRecipe = field(default_factory=StageRecipe)
    heads: StageRecipe = field(default_factory=StageRecipe)


@dataclass(frozen=True)
class WorldDataRecipe:
    """What is learned from: a dataset of ``vla collect --mixed``, and the cameras that are imagined (null: all)."""

    root: str = ""
    cameras: tuple[str, ...] = ()


@dataclass(frozen=True)
class WorldRecipe:
    """Everything that decides what ``vla train`` computes for a world model.

    Attributes:
        world_model: ``tiny`` trains all from scratch; ``svd`` begins with Stable Video Diffusion.
        name: Of the run.
        env: gymnasium id of what was recorded, for first frames; empty for a real robot.
        calibration: Where the cameras are: ``auto`` is as the simulator has them, for its tasks; ``none``; or a file
            (docs/world_model.md). A camera on the tool then knows where in its view to look for what was seen before.
        data: Episodes.
        vae, dynamics, heads: Shapes.
        svd: Weights that ``world_model: svd`` begins with; its autoencoder is not trained.
        stages: Trainings.
        generated: Rollouts imagined after the dynamics' training that judges learn from as well.
        vae_from: World model whose autoencoder is taken over instead of training one.
        seed, device, threads, precision, log_every, output_dir: As in every recipe.
    """

    world_model: Literal["tiny", "svd"] = "tiny"
    name: str = "world_model"
    env: str = "sim/pick-v0"
    calibration: str = "auto"
    data: WorldDataRecipe = field(default_factory=WorldDataRecipe)
    vae: VaeConfig = field(default_factory=VaeConfig)
    dynamics: DynamicsConfig = field(default_factory=DynamicsConfig)
    heads: HeadsConfig = field(default_factory=HeadsConfig)
    svd: SvdConfig = field(default_factory=SvdConfig)
    stages: StagesRecipe = field(default_factory=StagesRecipe)
    generated: int = 96
    vae_from: str = ""
    seed: int = 0
    device: str = "auto"
    threads: int = 0
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    log_every: int = 20
    output_dir: str = ""

    def to_yaml(self) -> str:
        """The resolved recipe."""
        return yaml.safe_dump(plain(dataclasses.asdict(self)), sort_keys=False)

    def of_stage(self, stage: str, precision: Literal["auto", "fp32", "bf16"]) -> Recipe:
        """The training loop's recipe of one stage."""
        s: StageRecipe = getattr(self.stages, stage)
        return Recipe(
            name=f"{self.name}-{stage}",
            method=stage,
            optimizer=s.optimizer,
            steps=s.steps,
            batch_size=s.batch_size,
            accumulate=s.accumulate,
            ema=s.ema,
            precision=precision,
            seed=self.seed,
            log_every=self.log_every,
            save_every=s.save_every,
        )

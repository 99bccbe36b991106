"""A training run as data: frozen dataclasses read from one YAML file and ``key=value`` overrides.

    recipe = load(Path("configs/pick.yaml"), ["steps=500", "optimizer.lr=3e-4"])

Every key that a recipe may hold is a field below; anything else is an error that names the nearest valid key.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from vla_stack.errors import UserError
from vla_stack.training.augmentation import Augmentation
from vla_stack.training.recipe_tree import build, plain, read_tree


@dataclass(frozen=True)
class LoraRecipe:
    """Low-rank adapters in place of full fine-tuning (training/lora.py). The defaults fit LeRobot's VLAs.

    Attributes:
        rank: r of the adapters; 0 trains without them.
        alpha: Scale of the adapters, times r.
        targets: Regular expression of the linear layers that get one; the default is all of language model and expert.
        train: Regular expression of parameters that are trained in full beside them, being small or new; the default
            is the projections of actions, time and state, and the gate of a mixture of horizons.
    """

    rank: int = 0
    alpha: int = 32
    targets: str = r".*(?<!encoder)\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)"
    train: str = r"(base\.)?model\.(action|state|time)_.*|gate\..*"


@dataclass(frozen=True)
class PolicyRecipe:
    """Which policy to train.

    Attributes:
        type: Registered LeRobot policy type: ``vla`` (native), ``smolvla``, ``pi0``, ``pi05``, ``act``, ...
        pretrained: What to start from: a policy directory or a run's, the name of a shipped policy, or a hub id; empty
            trains from scratch.
        options: Fields of that policy's configuration class, e.g. ``{chunk_size: 16}``.
        lora: Adapters to train instead of the policy's own weights.
    """

    type: str = "vla"
    pretrained: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    lora: LoraRecipe = field(default_factory=LoraRecipe)

    @property
    def weights(self) -> str:
        """What it starts from: ``pretrained``, or what a policy around another one starts that from."""
        return self.pretrained or str((self.options.get("base") or {}).get("pretrained_path") or "")


@dataclass(frozen=True)
class SourceRecipe:
    """One dataset of a mixture.

    Attributes:
        root: LeRobotDataset directory.
        weight: Share of the samples, relative to the weights of the other sources; null for all of them takes their
            number of frames.
        embodiment: Name of the robot; sources of one name share one normalisation and have to agree in cameras, state
            and action. Empty takes the name in the dataset's ``meta/robot.json``.
        cameras: Camera slot of the policy -> camera of the dataset; null feeds all, each to the slot of its own name.
            Datasets that see the same from cameras of different names share a slot; a slot that a source does not fill
            is masked. The first source that fills a slot decides its size, others are fitted into it.
        episodes: Episode indices to use; null uses all.
        relative_exclude_joints: Action dimensions that stay absolute; null takes the policy's option of that name.
    """

    root: str = ""
    weight: float | None = None
    embodiment: str = ""
    cameras: dict[str, str] | None = None
    episodes: tuple[int, ...] | None = None
    relative_exclude_joints: tuple[str, ...] | None = None


@dataclass(frozen=True)
class TextPairsRecipe:
    """Image-text pairs that a pretrained backbone is trained on beside the demonstrations, to keep what it knows.

    Attributes:
        root: Folder of pictures and ``metadata.jsonl``, see ``vla_stack.data.text_pairs``; empty trains without.
        weight: What the cross entropy of the answers counts beside the method's loss.
        batch_size: Pairs per forward pass and process.
    """

    root: str = ""
    weight: float = 0.1
    batch_size: int = 8


@dataclass(frozen=True)
class DataRecipe:
    """What to train on: ``root``, or ``sources`` where datasets differ in robot, cameras or weight.

    Attributes:
        root: One LeRobotDataset directory or a list of them, all of one robot; several are mixed by their number of
            frames. Short for ``sources`` that name nothing but a root.
        episodes: Episode indices to use, of every root; null uses all.
        cameras: Cameras to feed; null feeds all that the dataset has.
        sources: Datasets of a mixture.
        text_pairs: Image-text pairs to train on as well.
        opening_frames: Frames at the start of each episode that are drawn more often.
        opening_weight: How much more often. Once the arm moves, its motion gives the goal away, and a policy that
            learns from such frames alone reads the goal off the motion instead of the instruction and the scene
            (causal confusion, de Haan et al. 2019, arXiv:1905.11979); only the opening frames teach it to look.
        interventions: What is trained on of datasets with intervention labels: ``rac``, ``hg_dagger``,
            ``no_recovery`` or ``all`` (methods/rac.py). Datasets without labels are demonstrations.
        weights: How frames are drawn: ``uniform``, ``iwr``, ``sirius`` or ``balanced``.
        augmentation: How pictures are changed at random, so that the policy holds up in other light.
        branched: Learn the chunk labels of datasets that have them (``vla collect --noise``); false learns the series
            of actions from every frame, of any length.
    """

    root: tuple[str, ...] = ()
    episodes: tuple[int, ...] | None = None
    cameras: tuple[str, ...] | None = None
    sources: tuple[SourceRecipe, ...] = ()
    text_pairs: TextPairsRecipe = field(default_factory=TextPairsRecipe)
    opening_frames: int = 0
    opening_weight: float = 1.0
    interventions: Literal["rac", "hg_dagger", "no_recovery", "all"] = "rac"
    weights: Literal["uniform", "iwr", "sirius", "balanced"] = "uniform"
    augmentation: Augmentation = field(default_factory=Augmentation)
    branched: bool = True


@dataclass(frozen=True)
class OptimizerRecipe:
    """AdamW (Loshchilov & Hutter, arXiv:1711.05101) under a cosine schedule with linear warm-up.

    Attributes:
        lr: Peak learning rate.
        betas: Decay rates of the first and second moment.
        eps: Denominator offset.
        weight_decay: Decoupled weight decay; matrices only, norms, biases and scalars are exempt.
        clip_norm: Largest global gradient norm; 0 does not clip.
        warmup_steps: Steps of linear warm-up from 0 to ``lr``.
        final_lr_ratio: Learning rate of the last step, as a fraction of ``lr``.
        backbone_lr_scale: Learning rate of a pretrained backbone (what is trained of modules named ``backbone``,
            adapters included), as a fraction of ``lr``.
        backbone_from_step: Steps before which the backbone's learning rate is 0, so that a new expert settles first.
        eight_bit: Keep the moments of large matrices in 8 bits (Dettmers et al., arXiv:2110.02861), a quarter of the
            memory; needs the package bitsandbytes.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 1e-4
    clip_norm: float = 1.0
    warmup_steps: int = 100
    final_lr_ratio: float = 0.05
    backbone_lr_scale: float = 1.0
    backbone_from_step: int = 0
    eight_bit: bool = False


@dataclass(frozen=True)
class EvalRecipe:
    """Rollouts during training, with the weights of a checkpoint.

    Attributes:
        every: Steps between evaluations; 0 never evaluates.
        envs: gymnasium ids, e.g. ``[sim/pick-v0]``. A policy of several robots is evaluated as each of them, or as the
            one named before an ``@``: ``[arm7_joints@sim/pick-v0]``.
        episodes: Episodes per environment.
        seed: Seed of the first episode; the same at every evaluation, so that checkpoints are compared on equal starts.
    """

    every: int = 0
    envs: tuple[str, ...] = ()
    episodes: int = 20
    seed: int = 10_000


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what a training run computes.

    Attributes:
        name: Name of the run; the default output directory carries it.
        method: Module of ``vla_stack.methods`` whose ``loss`` is minimised.
        method_options: Keyword arguments of that ``loss``, e.g. ``{draws: 1}``.
        policy: Which policy.
        data: Which demonstrations.
        optimizer: How to minimise.
        eval: Rollouts on the way.
        steps: Optimiser steps.
        batch_size: Samples per forward pass and process.
        accumulate: Forward passes per optimiser step; gradients are averaged.
        ema: Decay of the exponential moving average of the weights that a checkpoint serves; 0 serves the raw weights.
        precision: ``fp32``, ``bf16`` for autocast (weights and optimiser stay fp32), or ``auto``: ``bf16`` where the
            device computes in it, else ``fp32``; a processor that only emulates it is nearly three times slower in it.
        seed: Seed of weights, data order and noise. With ``steps`` it fixes the result bit for bit on a CPU.
        device: ``auto``, ``cpu``, ``cuda``, ``cuda:1``, ``mps``.
        threads: CPU threads of the training process; 0 takes every physical core that the process may use.
        log_every: Steps between log records.
        save_every: Steps between checkpoints; the last step is always saved.
        keep: Checkpoints kept on disk.
        launcher: ``local`` is one process; ``accelerate`` hands device placement and data parallelism to Accelerate
            (chosen by itself under ``torchrun`` and ``accelerate launch``).
        wandb: Weights & Biases project to log to as well; empty does not.
        output_dir: Run directory; empty makes ``outputs/train/<name>-<time>``.
    """

    name: str = "run"
    method: str = "imitation"
    method_options: dict[str, Any] = field(default_factory=dict)
    policy: PolicyRecipe = field(default_factory=PolicyRecipe)
    data: DataRecipe = field(default_factory=DataRecipe)
    optimizer: OptimizerRecipe = field(default_factory=OptimizerRecipe)
    eval: EvalRecipe = field(default_factory=EvalRecipe)
    steps: int = 2000
    batch_size: int = 64
    accumulate: int = 1
    ema: float = 0.999
    precision: Literal["auto", "fp32", "bf16"] = "fp32"
    seed: int = 0
    device: str = "auto"
    threads: int = 0
    log_every: int = 20
    save_every: int = 500
    keep: int = 2
    launcher: Literal["local", "accelerate"] = "local"
    wandb: str = ""
    output_dir: str = ""

    def to_yaml(self) -> str:
        """The resolved recipe; :func:`load` of this text gives an equal recipe."""
        return yaml.safe_dump(plain(dataclasses.asdict(self)), sort_keys=False)


def load(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe.

    Args:
        path: YAML file.
        overrides: ``dotted.key=value`` strings; values are YAML, applied in order.

    Raises:
        UserError: Missing file, broken YAML, unknown key, value of the wrong type or out of range.
    """
    tree = read_tree(path, overrides)
    recipe = build(Recipe, tree, str(path))
    _check(recipe, path)
    return recipe


def _check(recipe: Recipe, path: Path) -> None:
    positive = {
        "steps": recipe.steps,
        "batch_size": recipe.batch_size,
        "accumulate": recipe.accumulate,
        "log_every": recipe.log_every,
        "save_every": recipe.save_every,
        "keep": recipe.keep,
        "optimizer.lr": recipe.optimizer.lr,
        "optimizer.backbone_lr_scale": recipe.optimizer.backbone_lr_scale,
        "data.opening_weight": recipe.data.opening_weight,
        "data.text_pairs.weight": recipe.data.text_pairs.weight,
        "data.text_pairs.batch_size": recipe.data.text_pairs.batch_size,
    }
    for key, value in positive.items():
        if not value > 0:
            raise UserError(f"{path}: '{key}' is {value}, expected more than 0")
    if recipe.policy.lora.rank and not recipe.policy.weights:
        raise UserError(f"{path}: 'policy.lora' needs weights to adapt", "give policy.pretrained=DIR, or a hub id")
    change = recipe.data.augmentation
    shifts = {"shift": change.shift, **{f"camera_shift.{k}": v for k, v in change.camera_shift.items()}}
    for key, value in {"strength": change.strength, **shifts}.items():
        if not value >= 0:
            raise UserError(f"{path}: 'data.augmentation.{key}' is {value}, expected at least 0")
    if not 0.0 <= recipe.ema < 1.0:
        raise UserError(f"{path}: 'ema' is {recipe.ema}, expected a decay in [0, 1)")
    _check_data(recipe.data, path)
    if recipe.eval.every and not recipe.eval.envs:
        raise UserError(f"{path}: 'eval.every' is set and 'eval.envs' is empty", "for example eval.envs=[sim/pick-v0]")


def _check_data(data: DataRecipe, path: Path) -> None:
    if not data.sources:
        if not data.root:
            raise UserError(f"{path}: 'data.root' is missing", "give data.root=DIR, a dataset of `vla collect`")
        return
    if data.root or data.episodes is not None or data.cameras is not None:
        key = "root" if data.root else "episodes" if data.episodes is not None else "cameras"
        raise UserError(f"{path}: both 'data.sources' and 'data.{key}' are set", f"set '{key}' of each source")
    for i, source in enumerate(data.sources):
        key = f"data.sources[{i}]"
        if not source.root:
            raise UserError(f"{path}: '{key}.root' is missing", "give a dataset directory")
        if source.weight is not None and not source.weight > 0:
            raise UserError(f"{path}: '{key}.weight' is {source.weight}, expected more than 0", "or drop the source")
        if (source.weight is None) != (data.sources[0].weight is None):
            unweighted = next(n for n, s in enumerate(data.sources) if s.weight is None)
            raise UserError(
                f"{path}: 'data.sources[{unweighted}].weight' is missing and others have one", "weigh all or none"
            )

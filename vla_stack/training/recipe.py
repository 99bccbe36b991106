"""A training run as data: frozen dataclasses read from one YAML file and ``key=value`` overrides.

    recipe = load(Path("pick.yaml"), ["method.steps=500", "method.optimizer.lr=3e-4"])

One schema for every way to train. ``method`` is typed by the dataclass that the registry has under its name: see
:class:`Method`. Every key that a recipe may hold is a field of these classes; anything else is an error that names the
nearest valid key, or, for a key of old recipes, what it is called now.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol

import yaml

from vla_stack.errors import UserError
from vla_stack.registry import METHODS
from vla_stack.training.optimizer_recipe import OptimizerRecipe
from vla_stack.training.recipe_tree import (
    Above,
    Count,
    Decay,
    Natural,
    NotNegative,
    Positive,
    Share,
    Within,
    build,
    check_names,
    plain,
    read_tree,
    with_overrides,
)

DEFAULT_METHOD = "imitation"


@dataclass(frozen=True)
class TaskRecipe:
    """The environment that a run is about: what methods that roll out learn in, and what is evaluated by default.

    Attributes:
        id: ``sim/<task>-v0``, a benchmark's task, any gymnasium id (``module:id``), or ``imagined:`` and the run of a
            world model. ``task: sim/pick-v0`` is short for ``task: {id: sim/pick-v0}``.
        options: Further keyword arguments of the environment, e.g. ``{max_episode_steps: 200}``.
    """

    id: str = ""
    options: dict[str, Any] = field(default_factory=dict)


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

    rank: Natural = 0
    alpha: Count = 32
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

    def check(self) -> None:
        """Adapters adapt something; raises :class:`UserError`."""
        if self.lora.rank and not self.weights:
            raise UserError("'policy.lora' needs weights to adapt", "give policy.pretrained=DIR, or a hub id")


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
    weight: Annotated[float | None, Above(0)] = None
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
    weight: Positive = 0.1
    batch_size: Count = 8


@dataclass(frozen=True)
class Augmentation:
    """Random changes of the pictures and instructions that a policy is trained on.

    Attributes:
        strength: Of all changes, 1 being those at the top of ``training/augmentation.py``; 0 leaves pictures alone.
        shift: Largest shift along each axis (DrQ, Yarats et al. 2021) of a 64 px picture, pixels; larger pictures shift
            by more.
        camera_shift: The same for cameras that bear less: where one stands still, and the task is a matter of a few
            pixels, what shifts the picture shifts the goal.
        words: Share of the words of an instruction that are replaced by words that mean nothing, or get one before
            them, so that the policy holds up to verbs that it has not been trained with; and of the instructions that
            begin with another of their words, what stood before it coming last, so that it holds up to other orders.
    """

    strength: NotNegative = 1.0
    shift: NotNegative = 3.0
    camera_shift: dict[str, float] = field(default_factory=dict)
    words: Share = 0.0

    def check(self) -> None:
        """Shifts are not negative; raises :class:`UserError`."""
        for camera, shift in self.camera_shift.items():
            if not shift >= 0:
                raise UserError(f"'data.augmentation.camera_shift.{camera}' is {shift}, expected at least 0")


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
            ``no_recovery`` or ``all`` (data/trainable.py). Datasets without labels are demonstrations. Of any dataset
            ``succeeded`` takes the episodes that succeeded, whoever acted.
        weights: How frames are drawn: ``uniform``, ``iwr``, ``sirius`` or ``balanced``.
        progress: Run of ``vla train progress`` on the same datasets: frames are drawn by what they are worth.
        augmentation: How pictures are changed at random, so that the policy holds up in other light.
        validation: Share of each dataset's episodes that are held out of training. The loss on them, of the weights
            that a checkpoint serves, is logged with each checkpoint (docs/recipes.md).
        branched: Learn the chunk labels of datasets that have them (``vla collect --noise``); false learns the series
            of actions from every frame, of any length.
        cache_gb: What the decoded frames of a dataset may take on the disk. Where they would take more, frames of
            videos are decoded when they are sampled; the batches are the same.
        cached_views: Where what reads pictures is not trained, how many augmented views of each frame it encodes, once,
            before the first step; a step then draws one of them and encodes none. 0: every picture at every step.
    """

    root: tuple[str, ...] = ()
    episodes: tuple[int, ...] | None = None
    cameras: tuple[str, ...] | None = None
    sources: tuple[SourceRecipe, ...] = ()
    text_pairs: TextPairsRecipe = field(default_factory=TextPairsRecipe)
    opening_frames: Natural = 0
    opening_weight: Positive = 1.0
    interventions: Literal["rac", "hg_dagger", "no_recovery", "all", "succeeded"] = "rac"
    weights: Literal["uniform", "iwr", "sirius", "balanced"] = "uniform"
    progress: str = ""
    augmentation: Augmentation = field(default_factory=Augmentation)
    validation: Annotated[float, Within(0, 1, closed=False)] = 0.0
    branched: bool = True
    cache_gb: NotNegative = 64.0
    cached_views: Natural = 0

    def check(self) -> None:
        """Datasets are named in one way, and weighed all or none; raises :class:`UserError`."""
        if not self.sources:
            return
        if self.root or self.episodes is not None or self.cameras is not None:
            key = "root" if self.root else "episodes" if self.episodes is not None else "cameras"
            raise UserError(f"both 'data.sources' and 'data.{key}' are set", f"set '{key}' of each source")
        for i, source in enumerate(self.sources):
            if not source.root:
                raise UserError(f"'data.sources[{i}].root' is missing", "give a dataset directory")
            if (source.weight is None) != (self.sources[0].weight is None):
                unweighted = next(n for n, s in enumerate(self.sources) if s.weight is None)
                raise UserError(
                    f"'data.sources[{unweighted}].weight' is missing and others have one", "weigh all or none"
                )


@dataclass(frozen=True)
class EvalRecipe:
    """Evaluations during training, the same for every method; with the same seed `vla eval` gives the same numbers.

    Attributes:
        every: Steps of the method between evaluations (optimiser steps, iterations, control steps); 0 never evaluates,
            or, in a method of iterations, evaluates as that method does.
        envs: gymnasium ids, e.g. ``[sim/pick-v0]``; empty takes the task. A policy of several robots is evaluated as
            each of them, or as the one named before an ``@``: ``[arm7_joints@sim/pick-v0]``.
        episodes: Episodes per environment.
        seed: Seed of the first episode; the same at every evaluation, so that checkpoints are compared on equal starts.
        num_envs: Episodes that advance side by side; no result depends on it.
        workers: Processes, or actors, that hold the environments; 0 keeps them in the training's.
        rollouts: Where workers are: ``local`` processes or actors on ``ray``.
    """

    every: Natural = 0
    envs: tuple[str, ...] = ()
    episodes: Count = 20
    seed: Natural = 10_000
    num_envs: Count = 8
    workers: Natural = 0
    rollouts: Literal["local", "ray"] = "local"


@dataclass(frozen=True)
class Training:
    """How the one training loop turns: what every method that uses it is given.

    Attributes:
        name: Of the method.
        steps: Optimiser steps.
        batch_size: Samples per forward pass and process.
        accumulate: Forward passes per optimiser step; gradients are averaged.
        optimizer: How to minimise.
        ema: Decay of the exponential moving average of the weights that a checkpoint serves; 0 serves the raw weights.
        log_every: Steps between log records.
        save_every: Steps between checkpoints; the last step is always saved.
        keep: Checkpoints kept on disk.
        wandb: Weights & Biases project to log to as well; empty does not.
    """

    shares_batches: ClassVar[bool] = True  # among the processes of a recipe

    name: str = "training"
    steps: Count = 2000
    batch_size: Count = 64
    accumulate: Count = 1
    optimizer: OptimizerRecipe = field(default_factory=OptimizerRecipe)
    ema: Decay = 0.999
    log_every: Count = 20
    save_every: Count = 500
    keep: Count = 2
    wandb: str = ""


class Method(Protocol):
    """What the registry has for a method: a frozen dataclass of its options, which imports nothing heavy."""

    @property
    def name(self) -> str:
        """Under which it is registered; a field, so that a recipe can say ``method.name``."""
        ...

    def check_recipe(self, recipe: Recipe) -> None:
        """Refuse a recipe that would fail later; raises :class:`UserError`. It opens no file of policies or data."""
        ...

    def run(self, recipe: Recipe, run_dir: Path) -> None:
        """Train in ``run_dir`` to the end, continuing what is there.

        Raises:
            UserError: Anything that the person can mend.
            KeyboardInterrupt: A signal stopped it; a further call continues.
        """
        ...


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what a training run computes.

    Attributes:
        name: Name of the run; the default output directory carries it.
        task: The environment.
        policy: Which policy.
        method: How it learns: a :class:`Method`.
        data: Which demonstrations.
        eval: Rollouts on the way.
        output_dir: Run directory; empty makes ``outputs/train/<name>-<time>``.
        seed: Seed of weights, data order and noise. With the method's steps it fixes the result bit for bit on a CPU.
        device: ``auto``, ``cpu``, ``cuda``, ``cuda:1``, ``mps``.
        threads: CPU threads of the training process; 0 takes every physical core that the process may use.
        precision: ``fp32``, ``bf16`` for autocast (weights and optimiser stay fp32), or ``auto``: ``bf16`` where the
            device computes in it, else ``fp32``; a processor that only emulates it is nearly three times slower in it.
        processes: Of a training on this machine's CPU, each with its part of every batch; one for each core is
            faster than one process with as many threads. Part of what the result is a function of. Several GPUs are
            used under ``torchrun``, where ``batch_size`` is each process's.
        sharded: Processes share weights, gradients and moments, for policies that are too large for one GPU; a run goes
            on in any number of them.
    """

    name: str = "run"
    task: TaskRecipe = field(default_factory=TaskRecipe)
    policy: PolicyRecipe = field(default_factory=PolicyRecipe)
    method: Any = field(default_factory=Training)
    data: DataRecipe = field(default_factory=DataRecipe)
    eval: EvalRecipe = field(default_factory=EvalRecipe)
    output_dir: str = ""
    seed: Natural = 0
    device: str = "auto"
    threads: Natural = 0
    precision: Literal["auto", "fp32", "bf16"] = "fp32"
    processes: Count = 1
    sharded: bool = False

    @property
    def eval_envs(self) -> tuple[str, ...]:
        """What is evaluated on."""
        return self.eval.envs or ((self.task.id,) if self.task.id else ())

    def to_yaml(self) -> str:
        """The resolved recipe; :func:`load` of this text gives an equal recipe."""
        return yaml.safe_dump(plain(dataclasses.asdict(self)), sort_keys=False)


def load(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe.

    Args:
        path: YAML file.
        overrides: ``dotted.key=value`` strings; values are YAML, applied in order.

    Raises:
        UserError: Missing file, broken YAML, unknown key or method, value of the wrong type or out of range.
    """
    return make(read_tree(path, overrides), str(path))


def make(tree: dict[str, Any], source: str) -> Recipe:
    """The recipe that a mapping holds; raises as :func:`load` does, naming ``source``."""
    tree = with_overrides(dict(tree), ())
    check_names(tree, source)
    given = tree.get("method") or {}
    if not isinstance(given, dict):
        raise UserError(f"{source}: 'method' needs keys below it, got {given!r}", "for example method.name=imitation")
    name = str(given.get("name", DEFAULT_METHOD))
    try:
        kind = METHODS.get(name)
    except UserError as e:
        raise UserError(f"{source}: {e.message}", e.remedy) from None
    options = {key: value for key, value in given.items() if key != "name"}
    method = dataclasses.replace(build(kind, options, source, "method."), name=name)  # or module:Class, as it was given
    recipe: Recipe = build(Recipe, {**tree, "method": method}, source)
    if (recipe.processes > 1 or recipe.sharded) and not getattr(kind, "shares_batches", False):
        raise UserError(f"{source}: method '{name}' trains in one process", "leave processes at 1, sharded false")
    try:
        recipe.method.check_recipe(recipe)
    except UserError as e:
        raise UserError(f"{source}: {e.message}", e.remedy) from None
    return recipe

"""Size, arms and cells of ``mixture_of_horizons.py``: what there is to run, without the means to run it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Settings:
    """Size of the experiment; the defaults are the one that is reported.

    Attributes:
        tasks: Tasks of ``sim``; one policy learns all of them and is told by the instruction which.
        demos: Demonstrations a task; the last ``held_out`` are not trained on.
        held_out: Demonstrations a task on which predictions are compared with the expert's actions.
        frames: Frames of them a task.
        starts: Start states a task.
        horizons: Branch lengths of the mixture; the last one is H.
        singles: Chunk lengths of plain policies, H/3, 2H/3 and H, but no shorter than what is executed.
        best: The one of them that did best on the validation seed; the baseline and its variants have it.
        execute: Actions of a chunk that are executed.
        width: Width of the action transformer.
        steps: Optimiser steps of every arm.
        batch: Observations a step.
        num_envs: Episodes at a time, the batch of inference.
        images: See the scene by two cameras instead of being told where things are.
    """

    tasks: tuple[str, ...] = ("place", "stack", "push")
    demos: int = 900
    held_out: int = 50
    frames: int = 200
    starts: int = 168
    horizons: tuple[int, ...] = (4, 8, 12, 16)
    singles: tuple[int, ...] = (6, 11, 16)
    best: int = 6
    execute: int = 5
    width: int = 128
    steps: int = 500
    batch: int = 64
    num_envs: int = 28
    images: bool = False

    @property
    def baseline(self) -> str:
        """Key of the plain arm with the best chunk length."""
        return f"plain-{self.best}"

    def draws(self, length: int) -> int:
        """(noise, time) pairs an observation of a compute-matched control with chunks of ``length``: at least as many
        action tokens as the mixture has."""
        return -(-sum(self.horizons) // length)


SMOKE = Settings(
    tasks=("push",),
    demos=4,
    held_out=1,
    frames=4,
    starts=2,
    horizons=(4, 8),
    singles=(3, 8),
    best=3,
    execute=2,
    width=16,
    steps=2,
    batch=4,
    num_envs=2,
)
IMAGES = Settings(tasks=("place",), starts=200, steps=1200, batch=32, num_envs=20, images=True)
START_SEED = 500_000  # of the first start
VALIDATION_SEED, VALIDATION_START = 100, 400_000  # training seed and first start on which settings were chosen
LR, CLIP, EMA, NOISE = 2e-3, 1.0, 0.99, 0.3
EULER_STEPS = 5


@dataclass(frozen=True)
class Arm:
    """One way to train and to infer; letters are those of the result's table.

    Attributes:
        letter: Its name in the report.
        about: What it is.
        weights: Name of the training that it uses.
        horizon: Actions per chunk.
        policy: Options of a mixture beside ``base`` and ``horizons``.
        method: Options of the method.
        mixture: Whether the policy is a mixture.
        clip: Gradient clip in units of the plain one: a loss that is the sum of n terms has n times the gradient.
        samples: Chunks averaged at inference.
        fusion: Fusion at inference where it is not that of training.
    """

    letter: str
    about: str
    weights: str
    horizon: int
    policy: dict[str, Any] = field(default_factory=dict)
    method: dict[str, Any] = field(default_factory=dict)
    mixture: bool = False
    clip: float = 1.0
    samples: int = 1
    fusion: str = ""


def arms(settings: Settings) -> dict[str, Arm]:
    """All arms, the most informative first."""
    n, best, longest = len(settings.horizons), settings.best, settings.horizons[-1]
    few, many = settings.draws(longest), settings.draws(best)
    moh: dict[str, Any] = {"horizon": longest, "mixture": True, "clip": n + 1.0}
    emphasis = {"emphasis": list(settings.horizons)}
    return {
        settings.baseline: Arm("a", f"plain, h = {best}, the best", settings.baseline, best),
        "full": Arm("g", "mixture of horizons", "full", **moh),
        "draws": Arm("c", f"plain, h = {best}, {many} draws", "draws", best, method={"draws": many}),
        "reweighted": Arm("b", f"plain, h = {longest}, reweighted", "reweighted", longest, method=emphasis),
        "longest": Arm("h", "mixture, longest branch", "full", fusion="last", **moh),
        "mean": Arm("e", "mixture, mean fusion", "mean", policy={"fusion": "mean"}, **moh),
        "unbalanced": Arm("f", "mixture, no balance loss", "unbalanced", method={"balance": 0.0}, **moh),
        "draws_long": Arm("c", f"plain, h = {longest}, {few} draws", "draws_long", longest, method={"draws": few}),
        "averaged": Arm("d", f"plain, mean of {n} samples", settings.baseline, best, samples=n),
        **{f"plain-{h}": Arm("a", f"plain, h = {h}", f"plain-{h}", h) for h in settings.singles if h != best},
        "again": Arm("i", "plain, other random numbers", "again", best),
    }


@dataclass(frozen=True)
class Cell:
    """One arm of one seed under one way of executing chunks.

    Attributes:
        seed: Training seed.
        arm: Key of :func:`arms`.
        execute: Actions executed of each chunk; 0 where ``ratio`` decides.
        ratio: r of dynamic inference, 0 without.
        shuffled: Execute as many actions as dynamic inference with this ratio did, but at random moments.
    """

    seed: int
    arm: str
    execute: int
    ratio: float = 0.0
    shuffled: bool = False

    @property
    def name(self) -> str:
        how = f"r{self.ratio:g}" + "-shuffled" * self.shuffled if self.ratio else f"k{self.execute}"
        return f"{self.arm}-{how}-seed{self.seed}"

    def path(self, out: Path) -> Path:
        """Where its figures are."""
        return out / "cells" / f"{self.name}.json"

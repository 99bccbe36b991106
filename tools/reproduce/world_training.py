"""Data and trainings of ``world_model.py``."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from claims import claimed
from world_hues import record

from results import ROOT
from vla_stack.rollout.collect import CollectConfig, collect
from vla_stack.training.placement import Local
from vla_stack.training.recipe import load as load_recipe
from vla_stack.training.run_dir import begun
from vla_stack.world_model.model import CONFIG, WorldModel, load

DEVICE = Local("auto").device  # where `vla train` computes too
RECIPE = ROOT / "vla_stack" / "configs" / "world_model_tiny.yaml"
ARMS: dict[str, list[str]] = {
    "full": [],
    "no_memory": ["method.dynamics.history=0"],
    "mean_pose": ["method.dynamics.conditioning=mean"],
}


@dataclass(frozen=True)
class Settings:
    """Size of the experiment; equal for all arms.

    Attributes:
        task: Of ``sim``.
        episodes: Recorded, of the mixture.
        vae, dynamics, heads: Training steps.
        batch: Clips a step.
        generated: Imagined rollouts that judges learn from, and as many that limits are taken from.
        clips: Held-out rollouts that pictures are measured on.
        ks: Frames after which.
        hue_episodes, hue_dynamics: Episodes and steps of the memory proof.
        improved: Episodes that a policy is improved by.
        known: Demonstrations of what it knows, seen beside them.
        tested: Episodes on which it is judged.
        tuning: Steps of its fine-tuning.
        critics: Steps of the critics.
    """

    task: str = "pick"
    episodes: int = 1500
    vae: int = 8000
    dynamics: int = 8000
    heads: int = 2400
    batch: int = 8
    generated: int = 96
    clips: int = 40
    ks: tuple[int, ...] = (1, 4, 8, 16, 32)
    hue_episodes: int = 400
    hue_dynamics: int = 4000
    improved: int = 60
    known: int = 120
    tested: int = 150
    tuning: int = 300
    critics: int = 2000


SMOKE = Settings(  # the figures mean nothing
    episodes=10,
    vae=2,
    dynamics=2,
    heads=2,
    batch=2,
    generated=2,
    clips=1,
    ks=(1, 4),
    hue_episodes=10,
    hue_dynamics=2,
    improved=1,
    known=1,
    tested=1,
    tuning=1,
    critics=2,
)


def data(settings: Settings, out: Path, hue: bool = False) -> Path:
    """The recorded mixture, or the episodes of the memory proof; whoever comes second waits for it."""
    root = out / ("hues" if hue else "data")
    finished = out / f"{root.name}.finished"
    with claimed(out / "locks" / root.name, wait=True):
        if not finished.exists():
            if hue:
                record(root, settings.hue_episodes)
            else:
                mixture = CollectConfig(settings.task, mixed=True)
                cores = len(os.sched_getaffinity(0))  # nothing else can begin without data
                collect(mixture, root, settings.episodes, workers=cores, image_mode="image")
            finished.touch()
    return root


def runs(part: str, arm: str, seed: int) -> list[str]:
    """Training runs that a cell needs, in order; every arm takes over the first one's autoencoder."""
    prefix = "hue-" if part == "memory" else ""
    arms = ["full", arm] if arm in ARMS and arm != "full" else ["full"]
    return [f"{prefix}{a}-{seed}" for a in arms]


def folders(out: Path, part: str, arm: str, seed: int) -> list[Path]:
    """Where they are."""
    return [out / "runs" / name for name in runs(part, arm, seed)]


def trained(out: Path, part: str, arm: str, seed: int) -> list[WorldModel]:
    """They, where this machine computes."""
    return [load(folder, DEVICE) for folder in folders(out, part, arm, seed)]


def unfinished(out: Path, part: str, arm: str, seed: int) -> list[str]:
    """Those of them that are still to be trained."""
    return [f.name for f in folders(out, part, arm, seed) if not (f / "finished").exists()]


def trainable(out: Path, names: list[str]) -> list[str]:
    """Of a cell's unfinished runs those that can go on: other arms need the first one's autoencoder."""
    return [n for n in names if "full" in n or (out / "runs" / _first(n) / "model" / CONFIG).exists()]


def _first(name: str) -> str:
    """The first arm's run beside a run."""
    return re.sub("|".join(ARMS), "full", name)


def train(settings: Settings, out: Path, name: str) -> None:
    """Train a run, or continue it. Judges are trained for the first arm alone, as no other is rolled out in.

    Exits where a signal stopped it: it continues next time.
    """
    folder, hue = out / "runs" / name, name.startswith("hue-")
    arm, _, seed = name.removeprefix("hue-").rpartition("-")
    judged = arm == "full" and not hue
    heads, generated = (settings.heads, settings.generated) if judged else (1, 2)
    overrides = [
        f"data.root={data(settings, out, hue)}",
        f"task=sim/{settings.task}-v0",
        f"method.train_vae.steps={settings.vae}",
        f"method.train_dynamics.steps={settings.hue_dynamics if hue else settings.dynamics}",
        f"method.train_dynamics.batch_size={settings.batch}",
        f"method.train_heads.steps={heads}",
        f"method.generated={generated}",
        f"seed={seed}",
        "threads=1",
        *ARMS[arm],
    ]
    if arm != "full":
        overrides.append(f"method.vae_from={out / 'runs' / _first(name)}")
    resume = (folder / "recipe.yaml").exists()
    recipe = load_recipe(folder / "recipe.yaml" if resume else RECIPE, [*overrides, f"output_dir={folder}"])
    try:
        with begun(recipe, folder, resume):
            recipe.method.run(recipe, folder)
    except KeyboardInterrupt:
        sys.exit(1)
    (folder / "finished").touch()


def plain(settings: Settings) -> dict[str, Any]:
    """As JSON."""
    return dataclasses.asdict(settings)

"""Cells of ``world_model.py`` that train world models and measure their pictures."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from results import ROOT
from vla_stack.data.collect import CollectConfig, collect
from vla_stack.training import checkpoint
from vla_stack.world_model.clips import Recording, open_recording
from vla_stack.world_model.model import WorldModel, load
from vla_stack.world_model.quality import decode, held_out_starts, imagine_along, measure, moving
from vla_stack.world_model.train import run

RECIPE = ROOT / "configs" / "world_model_tiny.yaml"
ARMS: dict[str, list[str]] = {
    "full": [],
    "no_memory": ["dynamics.history=0"],
    "mean_pose": ["dynamics.conditioning=mean"],
}


@dataclass(frozen=True)
class Settings:
    """Size of the experiment; equal for all arms.

    Attributes:
        task: Of ``sim``.
        episodes: Recorded, of the mixture.
        vae, dynamics, heads: Training steps.
        batch: Clips a step.
        clips: Held-out rollouts that pictures are measured on.
        ks: Frames after which.
        starts: Paired starts of the policy ranking.
        hue_episodes: Of the memory proof.
    """

    task: str = "pick"
    episodes: int = 600
    vae: int = 3000
    dynamics: int = 20_000
    heads: int = 800
    batch: int = 16
    clips: int = 40
    ks: tuple[int, ...] = (1, 4, 8, 16, 32)
    starts: int = 50
    hue_episodes: int = 400


SMOKE = Settings(
    episodes=20, vae=2, dynamics=2, heads=2, batch=2, clips=1, ks=(1, 4), starts=2, hue_episodes=20
)  # the figures mean nothing


def data(settings: Settings, out: Path) -> Path:
    """The recorded mixture."""
    root = out / "data"
    collect(CollectConfig(settings.task, mixed=True), root, settings.episodes, workers=1, image_mode="image")
    return root


def trained(settings: Settings, out: Path, arm: str, seed: int, root: Path, name: str = "") -> Path:
    """Run directory of an arm; all arms of a seed share the autoencoder, and other arms have no need of heads."""
    folder = out / "runs" / f"{name or arm}-{seed}"
    first = out / "runs" / f"{name.replace(arm, 'full') or 'full'}-{seed}"
    overrides = [
        f"data.root={root}",
        f"env=sim/{settings.task}-v0",
        f"stages.vae.steps={settings.vae}",
        f"stages.dynamics.steps={settings.dynamics}",
        f"stages.dynamics.batch_size={settings.batch}",
        f"stages.heads.steps={settings.heads}",
        f"seed={seed}",
        "threads=1",
        *ARMS[arm],
    ]
    if arm != "full":
        overrides += [f"vae_from={first}", "stages.heads.steps=1", "generated=2"]
    finished = folder / "finished"
    if not finished.exists():
        resume = (folder / "recipe.yaml").exists()
        run(
            folder / "recipe.yaml" if resume else RECIPE,
            [*overrides, f"output_dir={folder}"],
            folder if resume else None,
        )
        last = settings.heads if arm == "full" else 1
        if not checkpoint.path(folder / "heads" / "checkpoints", last).exists():
            sys.exit(1)  # a signal; the run continues next time
        finished.touch()
    return folder


def quality(settings: Settings, out: Path, arm: str, seed: int) -> dict[str, Any]:
    """Pictures of an arm against the recorded ones."""
    root = data(settings, out)
    if arm != "full":
        trained(settings, out, "full", seed, root)
    model = load(trained(settings, out, arm, seed, root))
    return {"rows": measure(model, open_recording(root), settings.clips, settings.ks, seed)}


def control(settings: Settings, out: Path, arm: str, seed: int) -> dict[str, Any]:
    """Whether pictures follow the poses: error with the true ones over that with another episode's; and the probe."""
    root = data(settings, out)
    probed = load(trained(settings, out, "full", seed, root))
    model = probed if arm == "full" else load(trained(settings, out, arm, seed, root))
    recording, frames = open_recording(root), max(k for k in settings.ks if k <= 16)
    starts = held_out_starts(recording, frames)[: settings.clips]
    if len(starts) < 2:  # a smoke run
        starts = np.unique(recording.start)[:2]
    index = np.minimum(starts[:, None] + 1 + np.arange(frames), recording.end[starts, None] - 1)
    real, first = recording.stacked(index), recording.stacked(starts)[:, None]
    errors, mask = {}, moving(real, first)
    for name, order in (("true", np.arange(len(starts))), ("shuffled", np.roll(np.arange(len(starts)), 1))):
        poses = shifted(recording, starts, starts[order], frames)
        pictures = decode(model, imagine_along(model, recording, starts, frames, seed, poses)[0])
        square = ((pictures.astype(np.float32) - real.astype(np.float32)) / 255) ** 2
        errors[name] = float(square.mean(-1)[mask].mean())
        if name == "true":
            seen = probe(probed, pictures[:, -1])
            actual = probe(probed, real[:, -1])
    told = recording.poses[index[:, -1]]
    return {
        "errors": errors,
        "A": 1 - errors["true"] / max(errors["shuffled"], 1e-12),
        "probe_m": float(np.linalg.norm(seen[:, :3] - told[:, :3], axis=1).mean()),
        "probe_on_recorded_m": float(np.linalg.norm(actual[:, :3] - told[:, :3], axis=1).mean()),
    }


def shifted(recording: Recording, starts: np.ndarray, others: np.ndarray, frames: int) -> np.ndarray:
    """The motion of other episodes, carried out from the own first pose: [B, frames, 5]."""
    index = np.minimum(others[:, None] + 1 + np.arange(frames), recording.end[others, None] - 1)
    poses = recording.poses[index].copy()
    poses[..., :4] += (recording.poses[starts] - recording.poses[others])[:, None, :4]
    return poses.astype(np.float32)


def probe(model: WorldModel, pictures: np.ndarray) -> np.ndarray:
    """Poses [B, 5] that the probe sees in pictures [B, V, H, W, 3]."""
    with torch.no_grad():
        return model.heads.probe(torch.from_numpy(np.ascontiguousarray(pictures))).numpy()


def plain(settings: Settings) -> dict[str, Any]:
    """As JSON."""
    return dataclasses.asdict(settings)

"""Cells of ``world_model.py`` that measure pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from world_training import Settings, data, trained

from vla_stack.world_model.clips import Recording, open_recording
from vla_stack.world_model.model import WorldModel
from vla_stack.world_model.quality import decode, held_out_starts, imagine_along, measure, moving


def quality(settings: Settings, out: Path, arm: str, seed: int) -> dict[str, Any]:
    """Pictures of an arm against the recorded ones."""
    model = trained(out, "quality", arm, seed)[-1]
    return {"rows": measure(model, open_recording(data(settings, out)), settings.clips, settings.ks, seed)}


def control(settings: Settings, out: Path, arm: str, seed: int) -> dict[str, Any]:
    """Whether pictures follow the poses: error with the true ones over that with another episode's; and the probe."""
    probed, *_, model = trained(out, "control", arm, seed) * 2
    recording, frames = open_recording(data(settings, out)), max(k for k in settings.ks if k <= 16)
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
        seen = torch.from_numpy(np.ascontiguousarray(pictures)).to(model.bank.device)
        return model.heads.probe(seen).cpu().numpy()

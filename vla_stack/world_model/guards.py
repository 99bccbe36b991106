"""When not to believe a rollout any longer: five limits, taken from held-out data (specification, G1 to G5).

- G1 *disagreement*: the members' chunks differ under the same noise.
- G2 *residual*: the probe sees the tool elsewhere than it was told to be (after SC3-Eval, arXiv:2606.18610).
- G3 *latent*: latents leave the statistics of the data.
- G4 *chunks*: the rollout is longer than the model was found to follow what it is told.
- G5 *distance*: nothing like this pose and command was recorded.

A success after a trip does not count (as in WoVR, arXiv:2602.13977).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vla_stack.world_model.model import WorldModel
from vla_stack.world_model.poses import turned

NAMES = ("disagreement", "residual", "latent", "chunks", "distance")
NEIGHBOURS = 5
STEP = 0.05  # m, a long way to go in one control step; turns are measured against 5 times as many radians


def features(model: WorldModel, poses: Tensor, commands: Tensor) -> Tensor:
    """Where the tool is and where it is sent, [*, 10], for poses and commands [*, 5]."""
    yaw = poses[..., 3:4]
    away = torch.cat([commands[..., :3] - poses[..., :3], turned(commands[..., 3:4] - yaw) / 5], -1) / STEP
    here = [model.config.poses.position(poses[..., :3]), yaw.cos(), yaw.sin()]
    return torch.cat([*here, away, commands[..., 4:]], -1)


def neighbour_distance(model: WorldModel, points: Tensor) -> Tensor:
    """Mean distance [*] of features [*, 10] to the nearest recorded ones; 0 where nothing is on record."""
    if not len(model.bank):
        return points.new_zeros(points.shape[:-1])
    distances = torch.cdist(points.flatten(0, -2), model.bank)
    nearest = distances.topk(min(NEIGHBOURS, len(model.bank)), largest=False).values
    return nearest.mean(-1).unflatten(0, points.shape[:-1])


def latent_deviation(latents: Tensor) -> Tensor:
    """How far chunks [B, n, V, C, h, w] are from zero mean and unit variance in their worst channel, [B]."""
    channels = latents.movedim(3, 1).flatten(2)
    mean, spread = channels.mean(2), channels.std(2)
    return torch.maximum(mean.abs(), (spread - 1).abs()).amax(-1)


def seen_poses(model: WorldModel, pictures: Tensor) -> Tensor:
    """Where the probe sees the tool in pictures uint8 [B, n, V, H, W, 3], poses [B, n, 5]."""
    return model.heads.probe(pictures.flatten(0, 1)).unflatten(0, pictures.shape[:2])


def pose_residual(seen: Tensor, told: Tensor) -> Tensor:
    """Distance in metres [B] between where the tool is seen and where it was told to be [B, n, 5], over a chunk."""
    return (seen[..., :3] - told[..., :3]).norm(dim=-1).mean(-1)


@torch.no_grad()
def readings(
    model: WorldModel, spread: Tensor, latents: Tensor, seen: Tensor, told: Tensor, commands: Tensor, before: Tensor
) -> dict[str, Tensor]:
    """What the guards measure on a chunk, each [B]; the number of chunks is the caller's to count.

    Args:
        model: The world model.
        spread: [B], of :meth:`vla_stack.world_model.dynamics.Dynamics.imagine`.
        latents: [B, n, V, C, h, w].
        seen: Poses [B, n, 5] that the frames show, see :func:`seen_poses`.
        told: Those [B, n, 5] that they should.
        commands: [B, n, 5] that led to them.
        before: [B, 5], pose at the chunk's start.
    """
    poses = torch.cat([before[:, None], told[:, :-1]], 1)
    return {
        "disagreement": spread,
        "residual": pose_residual(seen, told),
        "latent": latent_deviation(latents),
        "distance": neighbour_distance(model, features(model, poses, commands)).amax(-1),
    }


def tripped(model: WorldModel, measured: dict[str, Tensor], chunks: int, row: int) -> list[str]:
    """Names of the guards that a rollout trips after ``chunks`` chunks; ``row`` is its place in ``measured``."""
    limits = model.config.limits
    values = {name: float(v[row]) for name, v in measured.items()} | {"chunks": float(chunks)}
    return [name for name in NAMES if not values[name] <= getattr(limits, name)]  # NaN trips


@torch.no_grad()
def doubts(model: WorldModel, pictures: Tensor, told: Tensor, commands: Tensor, before: Tensor) -> list[str]:
    """Names of the guards that recorded frames of one episode trip, as a chunk of an imagined one would.

    Nothing was imagined, so G1 and G4 hold; but judges and probe may look at what they have never seen.

    Args:
        model: Whose judges are asked.
        pictures: uint8 [n, V, H, W, 3], 1 <= n <= the model's horizon.
        told: Poses [n, 5] measured in the frames.
        commands: [n, 5] that led to them.
        before: [5], measured before the first of these.
    """
    latents = model.vae.encode(pictures)[None]
    none = latents.new_zeros(1)
    seen = seen_poses(model, pictures[None])
    measured = readings(model, none, latents, seen, told[None], commands[None], before[None])
    return tripped(model, measured, 0, 0)


def limit(values: Tensor, share: float = 99.0) -> float:
    """The percentile of held-out values above which a guard trips."""
    return float(np.percentile(values.cpu().double().numpy(), share))

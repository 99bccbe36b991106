"""Poses as a model is told them: one absolute pose a frame, of history and future alike.

A pose is float32 [5]: x, y, z in metres, yaw in radians, gripper opening. Position and yaw are *measured*, as commands
are followed with a lag that the model should not have to learn from pictures; the opening is the *commanded*
one, as the measured one would give away whether something was grasped, which the model is to imagine.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

POSE = 5
TOKEN = 11  # x, y, z, rotation [6], gripper, time


def executed_poses(measured: NDArray[np.float32], commands: NDArray[np.float32], starts: NDArray[np.int64]) -> NDArray:
    """The pose of every frame of a dataset.

    Args:
        measured: float32 [N, 5], where the tool was.
        commands: float32 [N, 5], where it was sent after each frame.
        starts: int64 [E], first frame of each episode; nothing was commanded before it, so its opening is measured.

    Returns:
        float32 [N, 5].
    """
    poses = measured.copy()
    poses[1:, 4] = commands[:-1, 4]
    poses[starts, 4] = measured[starts, 4]
    return poses


@dataclass(frozen=True)
class PoseScale:
    """Range of positions, [3] each in metres: the 1st and 99th percentile of the training data."""

    low: tuple[float, float, float]
    high: tuple[float, float, float]

    @classmethod
    def of(cls, poses: NDArray[np.float32]) -> PoseScale:
        """Of poses [N, 5]."""
        low, high = np.percentile(poses[:, :3], (1, 99), axis=0)
        return cls(tuple(map(float, low)), tuple(map(float, np.maximum(high, low + 1e-3))))  # type: ignore[arg-type]

    def position(self, xyz: Tensor) -> Tensor:
        """Positions [*, 3] in [-1, 1], clipped beyond."""
        low, high = (torch.tensor(v, device=xyz.device, dtype=xyz.dtype) for v in (self.low, self.high))
        return (2 * (xyz - low) / (high - low) - 1).clamp(-1, 1)

    def tokens(self, poses: Tensor, time: Tensor) -> Tensor:
        """What the network is told, [*, 11].

        Args:
            poses: [*, 5].
            time: [*], time from the current frame, in chunks.
        """
        return torch.cat(
            [self.position(poses[..., :3]), rotation6(poses[..., 3]), poses[..., 4:] * 2 - 1, time[..., None]], -1
        )


def turned(yaw: Tensor) -> Tensor:
    """Differences of yaw [*], radians, along the shorter way; as they are where that is what they are."""
    return torch.where(yaw.abs() > torch.pi, torch.remainder(yaw + torch.pi, 2 * torch.pi) - torch.pi, yaw)


def rotation6(yaw: Tensor) -> Tensor:
    """First two columns [*, 6] of the rotation of a tool that points down (Zhou et al. 2019): no jump anywhere."""
    c, s, zero = yaw.cos(), yaw.sin(), torch.zeros_like(yaw)
    return torch.stack([c, s, zero, s, -c, zero], -1)


class Waves(nn.Module):
    """What a network is told of poses: tokens, the way from the current frame's, and waves of both.

    A tool that moves by a hundredth of its range moves pictures by pixels, and networks are slow to learn functions
    that steep of plain coordinates; of sines in random directions they learn them soon (Tancik et al. 2020, section 6).

    Args:
        now: Index of the current frame.
        count: Directions for each of tokens and ways.
    """

    def __init__(self, now: int, count: int = 96) -> None:
        super().__init__()
        self.now, self.size = now, TOKEN + (TOKEN - 1) + 4 * count
        directions = torch.randn(2, TOKEN - 1, count, generator=torch.Generator().manual_seed(0))
        steep = torch.tensor([2.0] * 3 + [0.7] * (TOKEN - 4))  # in a unit of position, of rotation and opening
        self.register_buffer("directions", directions * steep[:, None])

    def forward(self, tokens: Tensor) -> Tensor:
        """Features [B, F, size] of tokens [B, F, 11]; time has no waves."""
        poses = tokens[..., :-1]
        ways = 2 * (poses - poses[:, self.now : self.now + 1])
        angles = (torch.stack([poses, ways], -2)[..., None] * self.directions).sum(-2).flatten(-2)  # exact in bf16 too
        return torch.cat([tokens, ways, angles.sin(), angles.cos()], -1)


class Adapter(nn.Module):
    """Where commands lead: measured pose and n commands to the n poses that will be measured (paper, section 4.1).

    A residual network over the tool's coordinates; the paper's joint velocities and forward kinematics are what this
    robot's controller does by itself. The opening is passed through.
    """

    def __init__(self, horizon: int, width: int = 64) -> None:
        super().__init__()
        self.horizon = horizon
        self.net = nn.Sequential(
            nn.Linear(4 * (horizon + 2), width),
            nn.SiLU(),
            nn.Linear(width, width),
            nn.SiLU(),
            nn.Linear(width, 4 * horizon),
        )
        nn.init.zeros_(self.net[-1].weight)  # type: ignore[arg-type]
        nn.init.zeros_(self.net[-1].bias)  # type: ignore[arg-type]

    def forward(self, pose: Tensor, before: Tensor, commands: Tensor) -> Tensor:
        """Poses [B, n, 5].

        Args:
            pose: [B, 5], now.
            before: [B, 5], the command before: where the tool is still moving to.
            commands: [B, n, 5], n <= horizon; the last one is held.
        """
        n = commands.shape[1]
        held = torch.cat([commands, commands[:, -1:].expand(-1, self.horizon - n, -1)], 1)
        away = torch.cat([before[:, None], held], 1)[..., :4] - pose[:, None, :4]
        away = torch.cat([away[..., :3], turned(away[..., 3:])], -1)
        offset = self.net(torch.cat([away.flatten(1) * 20, pose[:, :4]], 1)).unflatten(1, (self.horizon, 4)) / 20
        reached = torch.cat([held[..., :4] + offset, held[..., 4:]], -1)
        return reached[:, :n]

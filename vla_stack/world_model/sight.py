"""What calibrated cameras tell: where the tool is in each view, and what a camera on it would see of what was seen.

Things lie on a surface: what a picture shows of it can be seen from anywhere (inverse perspective mapping, Mallot et
al. 1991). Where things are in the view of a moving camera, and where the tool is in that of a fixed one, need then not
be learned from pictures, only how they look.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import yaml
from torch import Tensor
from torch.nn import functional as F

from sim.arm import camera_pose
from vla_stack.errors import UserError
from vla_stack.schema import RobotSpec
from vla_stack.training.recipe_tree import build
from vla_stack.world_model.tool import ARMS

# Points of the tool that are looked for in all views, m, turned with it: on its axis, and to its front and side.
POINTS = ((0.0, 0.0, 0.0), (0.0, 0.0, 0.05), (0.0, 0.0, 0.1), (0.05, 0.0, 0.05), (0.0, 0.05, 0.05))
OCTAVES = 5  # of waves that tell how far it is, the longest as wide as two pictures
TOOL = len(POINTS) * 2 * (1 + 2 * OCTAVES) + 4  # numbers that tell a position where the tool is
PLANES = 4  # of a picture that is seen from elsewhere: red, green, blue in [-1, 1], and 1 where there is anything


@dataclass(frozen=True)
class View:
    """A pinhole camera of square pictures.

    Attributes:
        mount: Whether position and rotation are in the robot's ``base`` frame, or in the ``tool``'s: at its point,
            turned about the vertical by its direction.
        position: Metres.
        rotation: 3x3, row by row; its columns point right, up and back in the picture.
        fov: Field of view, radians.
    """

    mount: Literal["base", "tool"]
    position: tuple[float, ...]
    rotation: tuple[float, ...]
    fov: float


@dataclass(frozen=True)
class Calibration:
    """All cameras, in the order in which they are imagined.

    Attributes:
        views: The cameras.
        height: Of the surface on which things are seen, m in the base's frame: half of theirs above what they lie on.
    """

    views: tuple[View, ...]
    height: float = 0.02

    @property
    def moving(self) -> list[int]:
        """Those on the tool."""
        return [i for i, v in enumerate(self.views) if v.mount == "tool"]


def simulated(robot: RobotSpec) -> Calibration:
    """That of a simulated arm; a KeyError where it is none, or has no such camera."""
    return Calibration(tuple(View(*camera_pose(ARMS[robot.name], camera.name)) for camera in robot.cameras))


def read(path: str, robot: RobotSpec) -> Calibration:
    """From a file: ``height`` and, by name of the camera, ``views``.

    Raises:
        UserError: It is not readable, or lacks a camera.
    """
    try:
        tree = yaml.safe_load(Path(path).read_text())
        named = dict(tree["views"])
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError) as e:
        raise UserError(f"{path} is no calibration ({e})", "see docs/world_model.md, 'Calibrated cameras'") from None
    if missing := [c.name for c in robot.cameras if c.name not in named]:
        raise UserError(f"{path} has no camera '{missing[0]}'", f"it has {', '.join(named)}")
    found: Calibration = build(Calibration, tree | {"views": [named[c.name] for c in robot.cameras]}, path)
    for camera, view in zip(robot.cameras, found.views, strict=True):
        rotation = torch.tensor(view.rotation, dtype=torch.float64)
        if len(view.position) != 3 or len(rotation) != 9 or not 0 < view.fov < torch.pi:
            raise UserError(
                f"{path}: '{camera.name}' needs 3 numbers, 9 numbers and radians", "see docs/world_model.md"
            )
        turn = rotation.view(3, 3)
        if not torch.allclose(turn @ turn.T, torch.eye(3, dtype=torch.float64), atol=1e-3) or turn.det() < 0:
            raise UserError(f"{path}: the rotation of '{camera.name}' is none", "its columns are right, up and back")
    return found


@dataclass(frozen=True)
class Sight:
    """What calibration tells of the future frames of clips.

    Attributes:
        tool: [B, H, V, h, w, TOOL] of :func:`toward`.
        seen: [B, H, M, S * V, 4, height / 2, width / 2] of :func:`look`; None where no camera is on the tool.
    """

    tool: Tensor
    seen: Tensor | None


def toward(calibration: Calibration, poses: Tensor, size: int) -> Tensor:
    """How far the tool is from each position of each view.

    Args:
        calibration: Of V cameras.
        poses: [B, T, 5] (m, rad, opening).
        size: Positions h = w.

    Returns:
        [B, T, V, h, w, TOOL]: the way in the picture to the tool's :data:`POINTS`, and waves of it; direction, opening
        and nearness of the tool.
    """
    with torch.autocast(poses.device.type, enabled=False):
        middle = (torch.arange(size, device=poses.device) + 0.5) / size * 2 - 1
        down, right = torch.meshgrid(middle, middle, indexing="ij")
        here = torch.stack([right, down], -1)[:, :, None]  # [h, w, 1, 2]
        points = poses[:, :, None, :3] + poses.new_tensor(POINTS) @ _turned(poses).mT
        octaves = torch.pi / 2 * 2.0 ** torch.arange(OCTAVES, device=poses.device)
        out = []
        for view in calibration.views:
            where = _pixels(view, poses.flatten(0, 1), points.flatten(0, 1)).unflatten(0, poses.shape[:2])
            way = where[:, :, None, None] - here  # [B, T, h, w, P, 2]
            waves = way[..., None] * octaves
            eye, _ = _placed(view, poses)
            near = 0.1 / (poses[..., :3] - eye).norm(dim=-1).clamp(min=0.02)
            turned = torch.stack([poses[..., 3].cos(), poses[..., 3].sin(), poses[..., 4], near], -1)
            told = [way.flatten(4), waves.sin().flatten(4), waves.cos().flatten(4)]
            out.append(torch.cat([*told, turned[:, :, None, None].expand(-1, -1, size, size, -1)], -1))
        return torch.stack(out, 2)


def look(calibration: Calibration, pictures: Tensor, at: Tensor, to: Tensor) -> Tensor:
    """What cameras on the tool see of pictures that lie on the surface.

    Args:
        calibration: Of V cameras, M of them on the tool.
        pictures: uint8 [B, S, V, H, H, 3], taken at S moments.
        at: Poses [B, S, 5] of these moments (m, rad).
        to: Poses [B, T, 5] from which to look.

    Returns:
        [B, T, M, S * V, 4, H / 2, H / 2], see :data:`PLANES`; from near, pictures have no more to show.
    """
    with torch.autocast(pictures.device.type, enabled=False):  # half the bits are centimetres
        return _look(calibration, pictures, at, to)


def _look(calibration: Calibration, pictures: Tensor, at: Tensor, to: Tensor) -> Tensor:
    moments, size = pictures.shape[1], pictures.shape[3] // 2
    planes = pictures.movedim(-1, -3).float().div(127.5).sub(1)
    planes = torch.cat([planes, torch.ones_like(planes[..., :1, :, :])], -3)  # [B, S, V, 4, H, H]
    middle = (torch.arange(size, device=pictures.device) + 0.5) / size * 2 - 1
    up, right = torch.meshgrid(-middle, middle, indexing="ij")
    out = []
    for i in calibration.moving:
        view = calibration.views[i]
        eye, turn = _placed(view, to)
        slope = math.tan(view.fov / 2)
        rays = torch.stack([right * slope, up * slope, -torch.ones_like(up)], -1)
        rays = torch.einsum("btij,hwj->bthwi", turn, rays)
        reach = (calibration.height - eye[..., 2])[..., None, None] / rays[..., 2]
        points = eye[:, :, None, None] + reach[..., None] * rays  # [B, T, H, H, 3]
        seen = []
        for moment in range(moments):
            for j, source in enumerate(calibration.views):
                where = _pixels(source, at[:, moment], points)
                where = torch.where((reach > 0)[..., None], where, 2.0)  # above the horizon there is nothing
                seen.append(
                    F.grid_sample(planes[:, moment, j], where.flatten(1, 2), align_corners=False)
                    .unflatten(2, (to.shape[1], size))
                    .transpose(1, 2)
                )
        out.append(torch.stack(seen, 2))
    return torch.stack(out, 2)


def _placed(view: View, poses: Tensor) -> tuple[Tensor, Tensor]:
    """Positions [..., 3] and rotations [..., 3, 3] of a camera in the base's frame, at tool poses [..., 5]."""
    position, turn = poses.new_tensor(view.position), poses.new_tensor(view.rotation).view(3, 3)
    if view.mount == "base":
        return position.expand(*poses.shape[:-1], 3), turn.expand(*poses.shape[:-1], 3, 3)
    yaw = _turned(poses)
    return poses[..., :3] + yaw @ position, yaw @ turn


def _turned(poses: Tensor) -> Tensor:
    """The tool's direction as rotations [..., 3, 3] about the vertical."""
    c, s, zero = poses[..., 3].cos(), poses[..., 3].sin(), torch.zeros_like(poses[..., 3])
    return torch.stack([c, -s, zero, s, c, zero, zero, zero, zero + 1], -1).unflatten(-1, (3, 3))


def _pixels(view: View, poses: Tensor, points: Tensor) -> Tensor:
    """Where a camera at tool poses [B, 5] sees points [B, ..., 3]: [B, ..., 2] in [-1, 1], right and down."""
    eye, turn = _placed(view, poses)
    wide = [len(points), *[1] * (points.ndim - 2)]
    inside = torch.einsum("bij,b...i->b...j", turn, points - eye.view(*wide, 3))
    depth = -inside[..., 2:]
    flat = inside[..., :2] * inside.new_tensor([1.0, -1.0]) / depth.clamp(min=1e-6)
    return torch.where(depth > 0, flat / math.tan(view.fov / 2), 2.0)

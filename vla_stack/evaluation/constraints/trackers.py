"""Keypoints from camera pictures, for robots whose scene nobody tells us.

A tracker finds named points in a picture. Where a point lies in the world follows from the tag's size (AprilTag), or
from the height of the plane that it lies on (colours, and whatever learnt point tracker implements :class:`Tracker`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from vla_stack.errors import UserError

Floats = NDArray[np.float64]
Picture = NDArray[np.uint8]


@dataclass(frozen=True)
class CameraModel:
    """A pinhole camera that looks along its own -z, y up, as MuJoCo's do.

    Attributes:
        position: [3], m, world frame.
        rotation: [3, 3], columns are the camera's axes in the world frame.
        focal: Focal length, pixels.
        centre: Principal point (u, v), pixels, from the top left.
    """

    position: Floats
    rotation: Floats
    focal: float
    centre: tuple[float, float]

    @classmethod
    def of_simulation(cls, env: Any, name: str, size: int) -> CameraModel:
        """A square camera of a task of ``sim``."""
        camera, fovy = env.data.camera(name), np.deg2rad(env.model.camera(name).fovy[0])
        focal = 0.5 * size / np.tan(0.5 * fovy)
        return cls(camera.xpos.copy(), camera.xmat.reshape(3, 3).copy(), float(focal), ((size - 1) / 2, (size - 1) / 2))

    def on_plane(self, u: float, v: float, height: float) -> Floats:
        """The point [3] at a height (m) that is seen at a pixel.

        Raises:
            UserError: The pixel looks along or away from that plane.
        """
        ray = self.rotation @ [(u - self.centre[0]) / self.focal, (self.centre[1] - v) / self.focal, -1.0]
        distance = (height - self.position[2]) / ray[2] if abs(ray[2]) > 1e-9 else -1.0
        if distance <= 0:
            raise UserError(
                f"pixel ({u:.0f}, {v:.0f}) does not see the plane at {height:g} m", "check the camera's pose"
            )
        return self.position + distance * ray

    def to_world(self, point: Floats) -> Floats:
        """A point of OpenCV's camera frame (x right, y down, z forward), m, in the world frame."""
        return self.position + self.rotation @ (point * [1.0, -1.0, -1.0])


class Tracker(Protocol):
    """Finds points in pictures; one that follows points from frame to frame keeps what it needs itself."""

    def find(self, picture: Picture, camera: CameraModel) -> dict[str, Floats]:
        """Name -> position [3], m, world frame, of the points that are seen in a picture [H, W, 3], RGB."""
        ...


@dataclass(frozen=True)
class ColourTracker:
    """The middle of all pixels of a colour.

    Attributes:
        colours: Name -> RGB, 0 to 255.
        height: Height of the plane that the things lie on, at their visible middle, m.
        tolerance: Largest angle between a pixel's colour and the named one, radians; brightness does not matter.
        least: Pixels that make a sighting.
    """

    colours: Mapping[str, tuple[int, int, int]]
    height: float
    tolerance: float = 0.2
    least: int = 4

    def find(self, picture: Picture, camera: CameraModel) -> dict[str, Floats]:
        pixels = picture.astype(np.float64)
        norm = np.linalg.norm(pixels, axis=2)
        out = {}
        for name, rgb in self.colours.items():
            wanted = np.asarray(rgb, np.float64) / np.linalg.norm(rgb)
            alike = (pixels @ wanted >= np.cos(self.tolerance) * norm) & (norm > 40.0)
            if alike.sum() >= self.least:
                v, u = np.nonzero(alike)
                out[name] = camera.on_plane(float(u.mean()), float(v.mean()), self.height)
        return out


@dataclass(frozen=True)
class TagTracker:
    """AprilTags of family 36h11.

    Attributes:
        tags: Number of a tag -> its name.
        size: Edge of the black square, m.
    """

    tags: Mapping[int, str]
    size: float

    def find(self, picture: Picture, camera: CameraModel) -> dict[str, Floats]:
        import cv2

        family = cv2.aruco.getPredefinedDictionary(cv2.aruco.DICT_APRILTAG_36h11)
        corners, ids, _ = cv2.aruco.ArucoDetector(family).detectMarkers(cv2.cvtColor(picture, cv2.COLOR_RGB2GRAY))
        half = self.size / 2
        square = np.array([[-half, half, 0], [half, half, 0], [half, -half, 0], [-half, -half, 0]])
        (cx, cy), f = camera.centre, camera.focal
        matrix = np.array([[f, 0, cx], [0, f, cy], [0, 0, 1.0]])
        out = {}
        numbers = () if ids is None else map(int, ids.ravel())
        for seen, number in zip(corners, numbers, strict=True):
            if number in self.tags:
                found, _, at = cv2.solvePnP(square, seen[0], matrix, None, flags=cv2.SOLVEPNP_IPPE_SQUARE)
                if found:
                    out[self.tags[number]] = camera.to_world(np.asarray(at, np.float64).ravel())
        return out


def track(pictures: Sequence[Picture], camera: CameraModel, tracker: Tracker) -> dict[str, Floats]:
    """Positions [T, 3] of everything that is seen at least once; where it is hidden, it is where it was seen last.

    Raises:
        UserError: Nothing is seen in any picture.
    """
    found = [tracker.find(picture, camera) for picture in pictures]
    out = {}
    for name in sorted(set().union(*found)):
        seen = np.array([name in f for f in found])
        last = np.maximum.accumulate(np.where(seen, np.arange(len(found)), -1))
        rows = np.where(last < 0, int(seen.argmax()), last)  # before its first sighting: where it is first seen
        out[name] = np.stack([found[i][name] for i in rows])
    if not out:
        raise UserError("the tracker sees nothing in any picture", "check its colours or tags against a picture")
    return out

"""Things that lie on the table, and where."""

from __future__ import annotations

import mujoco
import numpy as np
from numpy.typing import NDArray

from sim.env import ArmEnv

# Far apart in hue and similar in brightness, so that they are told apart at 64 px under any light.
COLOURS: dict[str, tuple[float, float, float]] = {
    "red": (0.86, 0.20, 0.18),
    "green": (0.22, 0.68, 0.30),
    "blue": (0.17, 0.38, 0.86),
}
CUBE = 0.02  # m, half the edge of a cube
CUBE_MASS = 0.06  # kg
CUBE_SYMMETRY = np.pi / 2


def rgba(colour: str) -> list[float]:
    return [*COLOURS[colour], 1.0]


def cube_name(colour: str) -> str:
    return f"cube_{colour}"


def add_cube(spec: mujoco.MjSpec, name: str, colour: list[float]) -> None:
    """A free cube of half edge :data:`CUBE`; body and geom share the name."""
    body = spec.worldbody.add_body(name=name)
    body.add_freejoint(name=name)
    geom = body.add_geom(
        spec.find_default("object"), name=name, size=[CUBE] * 3, rgba=colour, mass=CUBE_MASS
    )
    geom.type = mujoco.mjtGeom.mjGEOM_BOX


def add_cubes(spec: mujoco.MjSpec) -> None:
    """One cube of each colour."""
    for colour in COLOURS:
        add_cube(spec, cube_name(colour), rgba(colour))


def lay(env: ArmEnv, body: str, x: float, y: float, z: float, yaw: float = 0.0) -> None:
    """Put a free or mocap body down; metres, radians."""
    pose = np.array([x, y, z, np.cos(yaw / 2), 0.0, 0.0, np.sin(yaw / 2)])
    mocap = int(env.model.body(body).mocapid[0])
    if mocap >= 0:
        env.data.mocap_pos[mocap], env.data.mocap_quat[mocap] = pose[:3], pose[3:]
    else:
        env.data.joint(body).qpos[:] = pose


def scatter(
    rng: np.random.Generator, n: int, x: tuple[float, float], y: tuple[float, float], gap: float
) -> NDArray[np.float64]:
    """``n`` points [n, 2] uniform in a rectangle, at least ``gap`` metres apart (by rejection of whole sets)."""
    low, high = np.array([x, y]).T
    while True:
        points = rng.uniform(low, high, (n, 2))
        distance = np.linalg.norm(points[:, None] - points[None], axis=-1) + np.eye(n) * gap
        if distance.min() >= gap:
            return points


def points(env: ArmEnv, *bodies: str) -> dict[str, NDArray[np.float32]]:
    """Keypoints: the tool and the centres of the named bodies."""
    out = {"tcp": env.tool[:3].astype(np.float32)}
    return out | {b: env.position(b).astype(np.float32) for b in bodies}

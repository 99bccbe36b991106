"""Things that lie on the table, and where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from sim.env import ArmEnv

Colour = tuple[float, float, float]  # red, green, blue in [0, 1]

# Far apart in hue and similar in brightness, so that they are told apart at 64 px under any light.
COLOURS: dict[str, Colour] = {
    "red": (0.86, 0.20, 0.18),
    "green": (0.22, 0.68, 0.30),
    "blue": (0.17, 0.38, 0.86),
}
CUBE = 0.02  # m, half the edge of a cube
CUBE_MASS = 0.06  # kg
# Sliding friction of objects and table times that of the pads (1.6) stays below one, or a push that drags downwards
# wedges the object between pad and table. Torsional friction keeps a held object from turning between the pads.
CONTACT = {
    "condim": 4,
    "friction": [0.5, 0.01, 0.0001],
    "solimp": [0.95, 0.99, 0.001, 0.5, 2.0],
    "solref": [0.006, 1.0],
}
CUBE_SYMMETRY = np.pi / 2


def cube_name(colour: str) -> str:
    return f"cube_{colour}"


def add_geom(
    body: mujoco.MjsBody, name: str, shape: str, size: list[float], rgb: Colour, z: float = 0.0, **fields: Any
) -> mujoco.MjsGeom:
    """A geom with the contact of every object; ``fields`` override it.

    Args:
        body: The body to add to.
        name: Its name; of several geoms on a body, the one that is grasped has the body's name.
        shape: ``box``, ``cylinder`` or ``capsule``.
        size: MuJoCo's half sizes [3], metres.
        rgb: Colour.
        z: Height in the body's frame, metres; ``pos`` in ``fields`` gives all three.
    """
    settings: dict[str, Any] = {"pos": [0.0, 0.0, z], **CONTACT} | fields
    kind = getattr(mujoco.mjtGeom, f"mjGEOM_{shape.upper()}")
    return body.add_geom(name=name, type=kind, size=size, rgba=[*rgb, 1.0], **settings)


def add_mark(body: mujoco.MjsBody, name: str, shape: str, size: list[float], rgb: Colour, **fields: Any) -> None:
    """A geom that is seen but not felt."""
    add_geom(body, name, shape, size, rgb, contype=0, conaffinity=0, mass=0.0, **fields)


def add_cube(spec: mujoco.MjSpec, name: str, rgb: Colour, half: float = CUBE) -> None:
    """A free cube with edges of 2 ``half`` metres; body and geom share the name."""
    body = spec.worldbody.add_body(name=name)
    body.add_freejoint(name=name)
    add_geom(body, name, "box", [half] * 3, rgb, mass=CUBE_MASS * (half / CUBE) ** 3)


def add_cubes(spec: mujoco.MjSpec, half: float = CUBE) -> None:
    """One cube of each colour."""
    for colour in COLOURS:
        add_cube(spec, cube_name(colour), COLOURS[colour], half)


def lay(env: ArmEnv, body: str, spot: Sequence[float] | NDArray, z: float = 0.0, yaw: float = 0.0) -> None:
    """Put a free or mocap body down at ``spot`` = (x, y); metres, radians."""
    pose = np.array([*spot, z, np.cos(yaw / 2), 0.0, 0.0, np.sin(yaw / 2)])
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


def spread(
    rng: np.random.Generator, n: int, x: tuple[float, float], y: tuple[float, float], gap: float
) -> NDArray[np.float64]:
    """As :func:`scatter`, point by point: not quite as uniform, but fast where there is little room left."""
    low, high = np.array([x, y]).T
    points: list[NDArray[np.float64]] = []
    misses = 0
    while len(points) < n:
        point = rng.uniform(low, high)
        if all(np.hypot(*(point - other)) >= gap for other in points):
            points.append(point)
        elif (misses := misses + 1) % 40 == 0:
            points = []  # the first ones may leave no room for the rest
    return np.array(points)


def free_spots(
    x: tuple[float, float], y: tuple[float, float], taken: NDArray[np.float64], gap: float
) -> NDArray[np.float64]:
    """Points [n, 2] of a grid in a rectangle, ``gap`` metres from all of ``taken`` [m, 2]; or the farthest of them."""
    grid = np.stack(np.meshgrid(np.linspace(*x, 8), np.linspace(*y, 12)), axis=-1).reshape(-1, 2)
    distance = np.linalg.norm(grid[:, None] - taken[None], axis=-1).min(axis=1)
    return grid[distance >= min(gap, float(distance.max()))]


def scatter_cubes(
    env: ArmEnv,
    rng: np.random.Generator,
    x: tuple[float, float],
    y: tuple[float, float],
    gap: float = 0.10,
    yaw: float = 0.6,
    half: float = CUBE,
) -> None:
    """Lay the three cubes into a rectangle of the table, turned by at most ``yaw``.

    The bound on ``yaw`` keeps the grasp unambiguous: at 45 degrees a cube is taken equally well either way.
    """
    for colour, spot in zip(COLOURS, scatter(rng, len(COLOURS), x, y, gap), strict=True):
        lay(env, cube_name(colour), spot, half, rng.uniform(-yaw, yaw))


def points(env: ArmEnv, *bodies: str) -> dict[str, NDArray[np.float32]]:
    """Keypoints: the tool and the centres of the named bodies."""
    out = {"tcp": env.tool[:3].astype(np.float32)}
    return out | {b: env.position(b).astype(np.float32) for b in bodies}

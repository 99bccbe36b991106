"""Things of the library in a scene, others each episode, without compiling a model anew.

A model has a few slots: free bodies with as many geoms as the most intricate thing. At reset a thing is written into
each as model fields, which were compiled once for the whole library.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import mujoco
import numpy as np
from numpy.typing import NDArray

from sim import objects
from sim.library import KINDS, PALETTE, PATTERNS, Part
from sim.task import ToolGoal

if TYPE_CHECKING:
    from sim.env import ArmEnv

MM = 1e-3
GEOMS = max(len(kind.parts) for kind in KINDS.values())
LOWEST = 0.011  # m, of the tool's point: below it the fingers touch the table
_SIDE = 48  # px, of a texture
_HIDDEN = 5  # geom group that no camera shows


@dataclass(frozen=True)
class Thing:
    """A kind of the library as it lies in a scene.

    Attributes:
        kind: A name of ``KINDS``.
        colour: A name of ``PALETTE``.
        pattern: One of ``PATTERNS``.
        scale: Factor on its size.
    """

    kind: str
    colour: str
    pattern: str = "plain"
    scale: float = 1.0

    @property
    def height(self) -> float:
        """Of its top above the ground, metres."""
        rows = _rows(_stock(), self.kind)
        return float(_tops(_stock())[rows].max()) * self.scale


def slot_name(i: int) -> str:
    return f"thing_{i}"


def add_slots(spec: mujoco.MjSpec, n: int) -> None:
    """``n`` slots, bodies of :func:`slot_name`, and the patterns that things may have."""
    for pattern in PATTERNS[1:]:
        cube = mujoco.mjtTexture.mjTEXTURE_CUBE
        texture = spec.add_texture(name=pattern, type=cube, width=_SIDE, height=6 * _SIDE, nchannel=3)
        texture.data = np.tile(_face(pattern), (6, 1, 1)).tobytes()
        material = spec.add_material(name=pattern, texuniform=True, specular=0.1)  # each geom bears the whole of it
        material.textures[mujoco.mjtTextureRole.mjTEXROLE_RGB] = pattern
    # A plane is felt in place of the table's box: round shapes touch it at a fraction of the cost.
    table = spec.geom("table")
    table.contype = table.conaffinity = 0
    plane = mujoco.mjtGeom.mjGEOM_PLANE
    spec.worldbody.add_geom(name="ground", type=plane, size=[1, 1, 0.1], friction=table.friction, group=_HIDDEN)
    for i in range(n):
        body = spec.worldbody.add_body(name=slot_name(i))
        body.add_freejoint(name=slot_name(i))
        # Neither symmetric nor aligned with anything, so that the compiler assumes nothing that a thing may break.
        body.explicitinertial, body.mass = True, 0.06
        body.ipos, body.inertia = [0.001, 0.002, 0.03], [3e-5, 2e-5, 1e-5]
        body.iquat = [0.9, 0.3, 0.2, 0.1]
        for g in range(GEOMS):
            pos, quat = [0.01, 0.01 * g, 0.02], [0.9, 0.1, 0.3, 0.2]
            objects.add_geom(body, f"{slot_name(i)}_{g}", "box", [0.02] * 3, (1, 1, 1), pos=pos, quat=quat)


class Slots:
    """Writes things into the slots of a model.

    Args:
        model: Compiled with :func:`add_slots`.
        n: How many slots it has.
    """

    def __init__(self, model: mujoco.MjModel, n: int) -> None:
        self._model, self._scratch = model, mujoco.MjData(model)
        self._bodies = [int(model.body(slot_name(i)).id) for i in range(n)]
        self._materials = {"plain": -1} | {p: int(model.material(p).id) for p in PATTERNS[1:]}

    def fill(self, things: tuple[Thing, ...]) -> None:
        """Write one thing into each slot."""
        for body, thing in zip(self._bodies, things, strict=True):
            self._write(body, thing)
        mujoco.mj_setConst(self._model, self._scratch)  # constants derived from masses

    def _write(self, body: int, thing: Thing) -> None:
        m, stock, kind, s = self._model, _stock(), KINDS[thing.kind], thing.scale
        source, n = int(stock.body(thing.kind).id), len(kind.parts)
        start = int(m.body_geomadr[body])
        there, rest = slice(start, start + n), slice(start + n, start + GEOMS)
        here = _rows(stock, thing.kind)
        for name in ("geom_type", "geom_quat", "geom_contype", "geom_conaffinity"):
            getattr(m, name)[there] = getattr(stock, name)[here]
        for name in ("geom_size", "geom_pos", "geom_rbound", "geom_aabb"):
            getattr(m, name)[there] = getattr(stock, name)[here] * s
        rgb = np.array(PALETTE[thing.colour])
        for g, part in zip(range(start, start + n), kind.parts, strict=True):
            own = isinstance(part.shade, tuple)
            m.geom_rgba[g, :3] = part.shade if own else np.clip(rgb * part.shade, 0, 1)
            m.geom_matid[g] = -1 if own else self._materials[thing.pattern]
        m.geom_group[there], m.geom_group[rest] = 0, _HIDDEN
        m.geom_contype[rest] = m.geom_conaffinity[rest] = 0
        weight = kind.mass / stock.body_mass[source] * s**3  # the stock is of water
        m.body_mass[body] = stock.body_mass[source] * weight
        m.body_inertia[body] = stock.body_inertia[source] * weight * s**2
        m.body_ipos[body], m.body_iquat[body] = stock.body_ipos[source] * s, stock.body_iquat[source]
        # Every node of the tree of bounding boxes bounds the whole thing: none is wrong, whatever the tree.
        nodes = slice(int(m.body_bvhadr[body]), int(m.body_bvhadr[body] + m.body_bvhnum[body]))
        m.bvh_aabb[nodes] = stock.bvh_aabb[stock.body_bvhadr[source]] * s


def grasp_of(env: ArmEnv, body: str, thing: Thing) -> ToolGoal:
    """Where the tool takes hold of a thing now, and how far the gripper opens before."""
    kind = KINDS[thing.kind]
    symmetry, offset = np.radians(kind.symmetry), np.radians(kind.turn)
    rotation = env.data.body(body).xmat.reshape(3, 3)
    # Of the equal grasps, the one nearest to straight on; its point turns with it.
    raw = float(np.arctan2(rotation[1, 0], rotation[0, 0])) + offset
    yaw = raw - symmetry * np.round(raw / symmetry)
    grip = np.array(kind.grip) * MM * thing.scale
    c, s = np.cos(yaw - raw), np.sin(yaw - raw)
    grip[:2] = c * grip[0] - s * grip[1], s * grip[0] + c * grip[1]
    half_turn = np.pi * np.round(yaw / np.pi)  # both fingers are alike
    position = env.position(body) + rotation @ grip
    position[2] = max(position[2], LOWEST)
    opening = min(1.0, (kind.width * thing.scale + kind.room) * MM / (2 * env.arm.opened))
    return ToolGoal(position, float(yaw - half_turn), opening)


def _rows(stock: mujoco.MjModel, kind: str) -> slice:
    body = int(stock.body(kind).id)
    return slice(int(stock.body_geomadr[body]), int(stock.body_geomadr[body] + stock.body_geomnum[body]))


@cache
def _stock() -> mujoco.MjModel:
    """The whole library, compiled: read only."""
    spec = mujoco.MjSpec()
    for kind in KINDS.values():
        body = spec.worldbody.add_body(name=kind.name)
        body.add_freejoint()
        for i, part in enumerate(kind.parts):
            add = objects.add_geom if part.solid else objects.add_mark
            size, pos = [x * MM for x in part.size], [x * MM for x in part.at]
            size += [0.0] * (3 - len(size))
            add(body, f"{kind.name}_{i}", part.shape, size, (1, 1, 1), pos=pos, quat=_quat(part))
    return spec.compile()


@cache
def _tops(stock: mujoco.MjModel) -> NDArray[np.float64]:
    """Height of the top of each geom of the stock above its thing's ground, metres."""
    tops = np.zeros(stock.ngeom)
    for g in range(stock.ngeom):
        turn = np.zeros(9)
        mujoco.mju_quat2Mat(turn, stock.geom_quat[g])
        tops[g] = stock.geom_pos[g, 2] + np.abs(turn[6:]) @ stock.geom_aabb[g, 3:]
    return tops


def _quat(part: Part) -> list[float]:
    """Of roll, then pitch, then yaw about the thing's axes."""
    quat = np.zeros(4)
    mujoco.mju_euler2Quat(quat, np.radians(part.turn), "XYZ")
    return quat.tolist()


def _face(pattern: str) -> NDArray[np.uint8]:
    """Grey square that a thing's colour tints: light where the colour shows."""
    y, x = np.mgrid[:_SIDE, :_SIDE] * 3 // _SIDE  # three by three fields
    v, u = np.mgrid[:_SIDE, :_SIDE] * 2 % _SIDE - _SIDE / 2  # two by two, from the middle of each
    dark = {"striped": x == 1, "checked": (x + y) % 2 == 1, "spotted": u**2 + v**2 < (0.3 * _SIDE) ** 2}[pattern]
    return np.repeat(np.where(dark, 110, 255).astype(np.uint8)[..., None], 3, axis=-1)

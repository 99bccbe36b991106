"""Domain randomisation by writing model fields at reset: nothing is recompiled, the same seed gives the same world."""

from __future__ import annotations

from dataclasses import dataclass

import mujoco
import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Level:
    """Half-widths of uniform distributions; object poses and the instruction are drawn at every level.

    Attributes:
        start: Start position of the tool, metres.
        colour: Change of every colour channel of objects and table.
        light: Relative change of brightness.
        light_shift: Shift of the lights, metres.
        camera_shift: Shift of the cameras, metres.
        camera_turn: Rotation of the cameras about each axis, radians.
        mass: Natural logarithm of the factor on object masses.
        friction: Natural logarithm of the factor on sliding friction, one for the pads and one for each object.
        delay: Largest action delay, seconds; drawn from [0, delay].
    """

    start: float = 0.02
    colour: float = 0.0
    light: float = 0.0
    light_shift: float = 0.0
    camera_shift: float = 0.0
    camera_turn: float = 0.0
    mass: float = 0.0
    friction: float = 0.0
    delay: float = 0.0


LEVELS: tuple[Level, ...] = (
    Level(),
    Level(start=0.03, colour=0.06, light=0.2, light_shift=0.3, camera_shift=0.008, camera_turn=0.015),
    Level(
        start=0.04, colour=0.10, light=0.35, light_shift=0.5, camera_shift=0.015, camera_turn=0.03,
        mass=0.5, friction=0.25, delay=0.05,
    ),
)  # fmt: skip

_FIELDS = (
    "geom_rgba", "mat_rgba", "light_diffuse", "light_pos", "cam_pos", "cam_quat", "body_mass", "body_inertia",
    "geom_friction",
)  # fmt: skip


class Randomiser:
    """Applies a level to a model, always starting from the model's nominal fields.

    Args:
        model: The model to write to; its present fields are the nominal ones.
        level: What to vary.
    """

    def __init__(self, model: mujoco.MjModel, level: Level) -> None:
        self._model, self._level = model, level
        self._nominal = {f: getattr(model, f).copy() for f in _FIELDS}
        self._scratch = mujoco.MjData(model)
        free = model.jnt_type == int(mujoco.mjtJoint.mjJNT_FREE)
        self._free_bodies = model.jnt_bodyid[free]
        self._object_geoms = np.flatnonzero((model.geom_group == 0) & (model.geom_matid < 0))
        self._surfaces = [model.material(n).id for n in ("table", "floor")]
        self._pads = [model.geom(n).id for n in ("pad_left", "pad_right")]

    def apply(self, seed: int) -> float:
        """Write the world of ``seed`` into the model; returns the action delay in seconds."""
        m, level = self._model, self._level
        rng = np.random.default_rng(seed)
        for field, value in self._nominal.items():
            getattr(m, field)[:] = value
        self._appearance(rng)
        if level.mass or level.friction:
            self._dynamics(rng)
        return float(rng.uniform(0.0, level.delay)) if level.delay else 0.0

    def _appearance(self, rng: np.random.Generator) -> None:
        m, level = self._model, self._level
        for rgba, rows in ((m.geom_rgba, self._object_geoms), (m.mat_rgba, self._surfaces)):
            shade = rng.uniform(-level.colour, level.colour, (len(rows), 3))
            rgba[rows, :3] = np.clip(rgba[rows, :3] + shade, 0.0, 1.0)
        m.light_diffuse *= rng.uniform(1 - level.light, 1 + level.light, (m.nlight, 1))
        m.light_pos += rng.uniform(-level.light_shift, level.light_shift, (m.nlight, 3))
        m.cam_pos += rng.uniform(-level.camera_shift, level.camera_shift, (m.ncam, 3))
        for quat, turn in zip(m.cam_quat, rng.uniform(-level.camera_turn, level.camera_turn, (m.ncam, 3)), strict=True):
            _turn(quat, turn)

    def _dynamics(self, rng: np.random.Generator) -> None:
        m, level = self._model, self._level
        factor = np.exp(rng.uniform(-level.mass, level.mass, (len(self._free_bodies), 1)))
        m.body_mass[self._free_bodies] *= factor[:, 0]
        m.body_inertia[self._free_bodies] *= factor
        slip = np.exp(rng.uniform(-level.friction, level.friction, 1 + len(self._object_geoms)))
        m.geom_friction[self._pads, 0] *= slip[0]
        m.geom_friction[self._object_geoms, 0] *= slip[1:]
        mujoco.mj_setConst(m, self._scratch)  # constants derived from masses


def _turn(quat: NDArray, rotation: NDArray) -> None:
    """Rotate a quaternion in place by a small rotation vector in its own frame."""
    mujoco.mju_quatIntegrate(quat, rotation, 1.0)

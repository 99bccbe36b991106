"""Domain randomisation by writing model fields at reset: nothing is recompiled, the same seed gives the same world."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from sim.library import PALETTE
from vla_stack.errors import UserError, check_options


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
        texture: How much darker than the table's own colour the squares of a pattern on it are; 0 leaves it plain.
        background: How much darker the floor is at most, a factor for each colour channel.
        distractors: Things that nobody asks for, beside where the task's objects lie; nothing touches them.
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
    texture: float = 0.0
    background: float = 0.0
    distractors: int = 0


LEVELS: tuple[Level, ...] = (
    Level(),
    Level(start=0.03, colour=0.06, light=0.2, light_shift=0.3, camera_shift=0.008, camera_turn=0.015),
    Level(
        start=0.04, colour=0.10, light=0.35, light_shift=0.5, camera_shift=0.015, camera_turn=0.03,
        mass=0.5, friction=0.25, delay=0.05,
    ),
    Level(
        start=0.05, colour=0.10, light=0.4, light_shift=0.5, camera_shift=0.015, camera_turn=0.03,
        mass=0.5, friction=0.25, delay=0.05, texture=0.4, background=0.5, distractors=3,
    ),
)  # fmt: skip

SHAPES = (mujoco.mjtGeom.mjGEOM_CYLINDER, mujoco.mjtGeom.mjGEOM_ELLIPSOID)  # of distractors; none is asked for
SIZES = (0.015, 0.03)  # m, half an edge or a radius of a distractor
NAMELESS = 0.3  # least distance in RGB of a distractor's colour from those of the palette
BESIDE = ((0.24, 0.34), (0.10, 0.26))  # m, where distractors lie: x, and y to either side
PATTERN = "pattern"  # name of the texture
SQUARES = (2.0, 8.0)  # of a pattern along the table
_FIELDS = (
    "geom_rgba", "mat_rgba", "light_diffuse", "light_pos", "cam_pos", "cam_quat", "body_mass", "body_inertia",
    "geom_friction",
)  # fmt: skip


def level_of(given: int | Mapping[str, Any]) -> Level:
    """The level of a number, see ``LEVELS``; or level 0 with some of its widths changed, by their names.

    Raises:
        UserError: There is no such level or width, or a width is no number or out of range.
    """
    if isinstance(given, Mapping):
        check_options("randomisation", given, [f.name for f in fields(Level)])
        for name, width in given.items():
            most = 1.0 if name in ("light", "texture", "background") else math.inf  # parts of what there is
            number = int if name == "distractors" else (int, float)
            if isinstance(width, bool) or not isinstance(width, number) or not 0 <= width <= most:
                kind = "a whole number" if number is int else "a number"
                limit = f" from 0 to {most:g}" if most < math.inf else " of at least 0"
                raise UserError(f"randomisation: {name}={width!r} is out of range", f"give {kind}{limit}")
        return Level(**given)
    if given not in range(len(LEVELS)):
        raise UserError(
            f"randomisation={given!r} is unknown", f"choose one of {', '.join(map(str, range(len(LEVELS))))}"
        )
    return LEVELS[given]


def add_parts(spec: mujoco.MjSpec, level: Level) -> None:
    """Add to a model what a level needs that tasks have not: a pattern for the table, distractors."""
    if level.texture:
        dark = [1.0 - level.texture] * 3
        checker = {"builtin": mujoco.mjtBuiltin.mjBUILTIN_CHECKER, "rgb1": [1.0, 1.0, 1.0], "rgb2": dark}
        spec.add_texture(name=PATTERN, type=mujoco.mjtTexture.mjTEXTURE_2D, width=128, height=128, **checker)
    for i in range(level.distractors):
        spec.worldbody.add_geom(  # not at the origin, where MuJoCo would take it to stay
            name=f"distractor_{i}", type=SHAPES[i % len(SHAPES)], size=[0.02] * 3, pos=[0.0, 0.0, -1.0],
            group=1, contype=0, conaffinity=0,
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
        self._distractors = [model.geom(f"distractor_{i}").id for i in range(level.distractors)]

    def apply(self, seed: int, furnish: Callable[[np.random.Generator], None] = lambda rng: None) -> float:
        """Write the world of ``seed`` into the model; returns the action delay in seconds.

        ``furnish`` writes what the nominal model has not, from a generator of that seed, before all is varied.
        """
        m, level = self._model, self._level
        rng = np.random.default_rng(seed)
        for field, value in self._nominal.items():
            getattr(m, field)[:] = value
        furnish(np.random.default_rng([seed, 1]))
        self._appearance(rng)
        if level.mass or level.friction:
            self._dynamics(rng)
        self._surroundings(np.random.default_rng((seed, 2)))  # apart: what is above draws as it ever did
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

    def _surroundings(self, rng: np.random.Generator) -> None:
        m, level = self._model, self._level
        if level.texture:
            table = self._surfaces[0]
            m.mat_texid[table, mujoco.mjtTextureRole.mjTEXROLE_RGB] = m.texture(PATTERN).id
            m.mat_texrepeat[table] = rng.uniform(*SQUARES)
        if level.background:
            m.mat_rgba[self._surfaces[1], :3] *= rng.uniform(1.0 - level.background, 1.0, 3)
        for geom in self._distractors:
            (near, far), (inner, outer) = BESIDE
            m.geom_size[geom] = rng.uniform(*SIZES, 3)
            half = m.geom_size[geom, 1 if m.geom_type[geom] == mujoco.mjtGeom.mjGEOM_CYLINDER else 2]
            m.geom_pos[geom] = rng.uniform(near, far), rng.choice((-1.0, 1.0)) * rng.uniform(inner, outer), half
            m.geom_rgba[geom, :3] = _nameless(rng)

    def _dynamics(self, rng: np.random.Generator) -> None:
        m, level = self._model, self._level
        factor = np.exp(rng.uniform(-level.mass, level.mass, (len(self._free_bodies), 1)))
        m.body_mass[self._free_bodies] *= factor[:, 0]
        m.body_inertia[self._free_bodies] *= factor
        slip = np.exp(rng.uniform(-level.friction, level.friction, 1 + len(self._object_geoms)))
        m.geom_friction[self._pads, 0] *= slip[0]
        m.geom_friction[self._object_geoms, 0] *= slip[1:]
        mujoco.mj_setConst(m, self._scratch)  # constants derived from masses


def _nameless(rng: np.random.Generator) -> NDArray[np.float64]:
    """A colour [3] that is far from every one that a sentence names: "the red thing" is no distractor."""
    while True:
        rgb = rng.uniform(0.1, 0.9, 3)
        if min(np.linalg.norm(rgb - named) for named in PALETTE.values()) > NAMELESS:
            return rgb


def _turn(quat: NDArray, rotation: NDArray) -> None:
    """Rotate a quaternion in place by a small rotation vector in its own frame."""
    mujoco.mju_quatIntegrate(quat, rotation, 1.0)

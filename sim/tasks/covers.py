"""Lift the cover over the cube of the named colour: both cubes are seen for the first second only.

A task of memory. Two equal opaque covers come down over a red and a blue cube; then the bell has to be held down for a
while, and from then on no picture and no measurement tells which cube is under which cover. The cubes are seen and not
felt, so that not even the physics knows. Without memory the choice is right half of the time. How long the bell has
been held down is no secret: a bar on the mat rises meanwhile. Else the end of that time would have to be remembered
too, and a chunk of actions that begins before it could but guess it.
"""

from __future__ import annotations

import mujoco
import numpy as np
from numpy.typing import NDArray

from sim import objects, skills
from sim.env import ArmEnv
from sim.task import TaskConfig, ToolGoal, Variant


def default_config() -> TaskConfig:
    return TaskConfig(
        max_episode_steps=120,
        rewards={
            "rung": 0.3,  # the bell was held down for HOLD seconds
            "grasped": 0.2,  # after that, both pads hold the right cover's knob
            "lifted": 0.5,  # that cover is LIFT high, held: success; the other one, or too early, is failure
        },
        start=(0.36, 0.0, 0.18),
    )


COLOURS = ("red", "blue")
COVERS = ("cover_left", "cover_right")
SPOTS = np.array([[0.0, -0.11], [0.0, 0.11]])  # m, in the mat's frame; left and right are the front camera's
SHOWN = 0.8  # s, in which the covers come down
HIGH = 0.15  # m, from where
HOLD = 1.2  # s, for which the bell has to be held down
FULL = 1.6  # s, for which the expert holds it: then the bar is up
BAR = (0.012, 0.03)  # m, half its width and half its height
LIFT = 0.06  # m
HOLLOW, WALL, HEIGHT = 0.032, 0.003, 0.055  # m: half the inside, half a wall's thickness, height of a cover
KNOB = (0.012, 0.012, 0.014)  # m, half sizes
GRIP = HEIGHT + KNOB[2]  # m, where a cover is held above its foot
BELL = (0.024, 0.012)  # m, radius and half height
HELD = 0  # entry of the simulation's user data: seconds for which the bell has been held down


class Covers(ArmEnv):
    name = "covers"
    config = default_config()
    variants = tuple({"colour": c} for c in COLOURS)

    @classmethod
    def instruct(cls, variant: Variant) -> str:
        return f"ring the bell, then lift the cover that hides the {variant['colour']} cube"

    @property
    def right(self) -> str:
        """The cover that the named cube is under."""
        cube = self.position(objects.cube_name(self.variant["colour"]))
        return COVERS[int(cube[1] > self.position("mat")[1])]

    @property
    def shown(self) -> bool:
        """Whether the covers are still coming down."""
        return bool(self.data.time < SHOWN)

    @property
    def rung(self) -> bool:
        return bool(self.data.userdata[HELD] >= HOLD)

    @property
    def subjects(self) -> tuple[str, str]:
        """The named cube as long as it is seen: later poses say no more than pictures do."""
        return objects.cube_name(self.variant["colour"]) if self.shown else "mat", "bell"

    def build(self, spec: mujoco.MjSpec) -> None:
        mat = spec.worldbody.add_body(name="mat", mocap=True)
        objects.add_mark(mat, "mat", "box", [0.06, 0.17, 0.0005], (0.62, 0.66, 0.70), z=0.0005)
        for colour in COLOURS:
            cube = spec.worldbody.add_body(name=objects.cube_name(colour), mocap=True)
            objects.add_mark(cube, objects.cube_name(colour), "box", [objects.CUBE] * 3, objects.COLOURS[colour])
        for name in COVERS:
            self._build_cover(spec, name)
        bell = spec.worldbody.add_body(name="bell", mocap=True)
        objects.add_geom(bell, "bell", "cylinder", [*BELL, 0], (0.90, 0.75, 0.25), z=BELL[1])
        bar = spec.worldbody.add_body(name="bar", mocap=True)
        objects.add_mark(bar, "bar", "box", [BAR[0], *BAR], (0.25, 0.85, 0.35))

    def _build_cover(self, spec: mujoco.MjSpec, name: str) -> None:
        cover = spec.worldbody.add_body(name=name)
        cover.add_freejoint(name=name)
        grey, side = (0.36, 0.37, 0.42), HOLLOW + WALL
        boards = {
            "front": ([WALL, side + WALL, HEIGHT / 2], [side, 0.0, HEIGHT / 2]),
            "back": ([WALL, side + WALL, HEIGHT / 2], [-side, 0.0, HEIGHT / 2]),
            "left": ([HOLLOW, WALL, HEIGHT / 2], [0.0, side, HEIGHT / 2]),
            "right": ([HOLLOW, WALL, HEIGHT / 2], [0.0, -side, HEIGHT / 2]),
            "top": ([HOLLOW, HOLLOW, WALL], [0.0, 0.0, HEIGHT - WALL]),
        }
        for board, (size, pos) in boards.items():
            objects.add_geom(cover, f"{name}_{board}", "box", size, grey, pos=pos, mass=0.01)
        objects.add_geom(cover, name, "box", list(KNOB), (0.75, 0.76, 0.80), z=GRIP, mass=0.01)
        # What lets the cover down; it lets go once the cover is there.
        spec.worldbody.add_body(name=f"{name}_line", mocap=True)
        weld = spec.add_equality(name=name, type=mujoco.mjtEq.mjEQ_WELD, objtype=mujoco.mjtObj.mjOBJ_BODY)
        weld.name1, weld.name2 = f"{name}_line", name

    def place(self, rng: np.random.Generator) -> None:
        mat = rng.uniform((0.46, -0.02), (0.51, 0.02))
        spots = mat + SPOTS
        objects.lay(self, "mat", mat)
        objects.lay(self, "bell", rng.uniform((0.35, -0.02), (0.37, 0.02)))
        objects.lay(self, "bar", mat, -BAR[1])
        for name, spot in zip(COVERS, spots, strict=True):
            objects.lay(self, name, spot, HIGH)
            objects.lay(self, f"{name}_line", spot, HIGH)
        for colour, spot in zip(rng.permutation(COLOURS), spots, strict=True):
            objects.lay(self, objects.cube_name(str(colour)), spot, objects.CUBE)

    def happen(self) -> None:
        d = self.data
        for name in COVERS:
            d.mocap_pos[self.model.body(f"{name}_line").mocapid[0], 2] = HIGH * max(0.0, 1.0 - d.time / SHOWN)
            if d.time > SHOWN + 0.2:
                d.eq_active[self.model.equality(name).id] = 0
        if self.touched("bell") and not self.shown:
            d.userdata[HELD] += self.spec_robot.dt
        up = min(1.0, d.userdata[HELD] / FULL)
        d.mocap_pos[self.model.body("bar").mocapid[0], 2] = BAR[1] * (2 * up - 1)

    def lifted(self, cover: str) -> bool:
        """Whether a cover is in the air though nothing lets it down."""
        return bool(self.data.time > SHOWN + 0.5 and self.position(cover)[2] > LIFT)

    def progress(self) -> tuple[bool, ...]:
        held = self.rung and self.grasped(self.right)
        return self.rung, held, held and self.lifted(self.right)

    def failed(self) -> bool:
        return any(self.lifted(c) and not (self.rung and c == self.right) for c in COVERS)

    def keypoints(self) -> dict[str, NDArray[np.float32]]:
        """Without the cubes, which would tell."""
        return objects.points(self, "mat", "bell", *COVERS)

    def expert_goal(self) -> ToolGoal:
        if self.data.userdata[HELD] < FULL:
            top = self.position("bell") + [0.0, 0.0, 2 * BELL[1] + 0.004]
            return skills.over(self, top, 0.0, 0.0, clearance=0.06)
        if self.grasped(self.right):
            return ToolGoal(np.array([*self.tool[:2], GRIP + LIFT + 0.03]), self.tool[3], 0.0)
        knob = self.position(self.right) + [0.0, 0.0, GRIP]
        return skills.grasp(self, self.right, knob, self.yaw(self.right, objects.CUBE_SYMMETRY))

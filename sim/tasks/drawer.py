"""Open the drawer and put the cube of the named colour in: a long task of two stages."""

from __future__ import annotations

import mujoco
import numpy as np
from numpy.typing import NDArray

from sim import objects, skills
from sim.env import ArmEnv
from sim.task import TaskConfig, ToolGoal, Variant


def default_config() -> TaskConfig:
    return TaskConfig(
        max_episode_steps=140,
        rewards={
            "handle": 0.1,  # both pads hold the handle
            "opened": 0.2,  # the drawer is OPEN wide
            "grasped": 0.2,  # both pads hold the named cube
            "above": 0.2,  # it is above the open drawer, held
            "stored": 0.3,  # it lies in the drawer and the gripper has let go: success
        },
        start=(0.46, -0.02, 0.20),
    )


# The cabinet's frame lies on the table under its middle; the drawer opens towards -y. Metres.
CABINET = (0.085, 0.070, 0.075)  # half width, half depth, height
BOARD = 0.004  # half thickness
TRAY = (0.072, 0.060, 0.042)  # half width, half depth, height
HANDLE_REACH = 0.045  # from the front to the handle
HANDLE_HEIGHT = 0.045
TRAVEL = 0.12
OPEN = 0.095
WOOD, WHITE, STEEL = (0.55, 0.42, 0.34), (0.88, 0.89, 0.88), (0.20, 0.23, 0.28)
PRESHAPE = 0.5  # opening ratio that fits between handle and front


class Drawer(ArmEnv):
    name = "drawer"
    config = default_config()
    variants = tuple({"colour": c} for c in objects.COLOURS)

    @classmethod
    def instruct(cls, variant: Variant) -> str:
        return f"open the drawer and put the {variant['colour']} cube in"

    @property
    def target(self) -> str:
        return objects.cube_name(self.variant["colour"])

    @property
    def opening(self) -> float:
        """How far the drawer is out, metres."""
        return float(self.data.joint("drawer").qpos[0])

    @property
    def subjects(self) -> tuple[str, str]:
        return self.target, "drawer"

    def build(self, spec: mujoco.MjSpec) -> None:
        objects.add_cubes(spec)
        cabinet = spec.worldbody.add_body(name="cabinet", mocap=True)
        w, d, h = CABINET
        boards = {
            "left": ([BOARD, d, h / 2], [BOARD - w, 0.0, h / 2]),
            "right": ([BOARD, d, h / 2], [w - BOARD, 0.0, h / 2]),
            "back": ([w, BOARD, h / 2], [0.0, d - BOARD, h / 2]),
            "top": ([w, d, BOARD], [0.0, 0.0, h - BOARD]),
        }
        for name, (size, pos) in boards.items():
            objects.add_geom(cabinet, name, "box", size, WOOD, pos=pos)
        self._build_drawer(cabinet.add_body(name="drawer"))

    def _build_drawer(self, drawer: mujoco.MjsBody) -> None:
        drawer.add_joint(
            name="drawer",
            type=mujoco.mjtJoint.mjJNT_SLIDE,
            axis=[0, -1, 0],
            range=[0.0, TRAVEL],
            limited=mujoco.mjtLimited.mjLIMITED_TRUE,
            damping=6.0,
            frictionloss=0.6,
        )
        w, d, h = TRAY
        middle, front = h / 2 + 0.006, BOARD - CABINET[1]
        grip = front - HANDLE_REACH
        boards = {
            "tray": ([w, d, BOARD], [0.0, 0.0, 2 * BOARD], WHITE),
            "tray_left": ([BOARD, d, h / 2], [BOARD - w, 0.0, middle], WHITE),
            "tray_right": ([BOARD, d, h / 2], [w - BOARD, 0.0, middle], WHITE),
            "tray_back": ([w, BOARD, h / 2], [0.0, d - BOARD, middle], WHITE),
            "front": ([w, BOARD, 0.026], [0.0, front, 0.034], WHITE),
            "stem": ([0.006, HANDLE_REACH / 2, 0.006], [0.0, (front + grip) / 2, 0.030], STEEL),
            "handle": ([0.022, 0.006, 0.018], [0.0, grip, HANDLE_HEIGHT], STEEL),
        }
        for name, (size, pos, rgb) in boards.items():
            objects.add_geom(drawer, name, "box", size, rgb, pos=pos, mass=0.05)

    def place(self, rng: np.random.Generator) -> None:
        objects.scatter_cubes(self, rng, (0.38, 0.56), (-0.24, -0.09), gap=0.09, yaw=0.5)
        objects.lay(self, "cabinet", rng.uniform((0.45, 0.19), (0.51, 0.22)))

    def progress(self) -> tuple[bool, ...]:
        held = self.grasped(self.target)
        offset = self.position(self.target) - self.position("drawer")
        inside = bool((np.abs(offset[:2]) < TRAY[:2]).all())
        opened = self.opening > OPEN
        stored = inside and offset[2] < TRAY[2] and not self.touched(self.target)
        return self.grasped("handle"), opened, held, held and inside and opened, stored and not held

    def keypoints(self) -> dict[str, NDArray[np.float32]]:
        named = {"handle": self.handle.astype(np.float32)}
        return objects.points(self, *map(objects.cube_name, objects.COLOURS), "drawer") | named

    @property
    def handle(self) -> NDArray[np.float64]:
        """Where the handle is held, [3] metres."""
        return self.data.geom("handle").xpos.copy()

    @property
    def at_handle(self) -> bool:
        """Whether the tool is at the handle, or so low above it that it has to rise before it goes elsewhere."""
        offset = self.tool[:3] - self.handle
        return bool(np.hypot(*offset[:2]) < 0.03 and offset[2] < 0.045)

    def pull(self, distance: float) -> ToolGoal:
        """Take the handle and move it that far to the front, metres; to the back where it is negative."""
        handle = self.handle
        if self.grasped("handle"):
            return ToolGoal(np.array([handle[0], self.tool[1] - distance, handle[2]]), 0.0, 0.0)
        return skills.grasp(self, "handle", handle, 0.0, clearance=0.06, opening=PRESHAPE)

    def expert_goal(self) -> ToolGoal:
        tool, handle, cube = self.tool, self.handle, self.position(self.target)
        if self.opening < OPEN:
            return self.pull(TRAVEL - self.opening)
        if self.grasped(self.target):
            middle = self.position("drawer") + [0.0, 0.0, 0.055]
            return skills.put(self, self.target, middle, 0.0, clearance=0.04)
        if self.at_handle:
            return ToolGoal(np.array([*tool[:2], handle[2] + 0.08]), 0.0, PRESHAPE)
        return skills.grasp(self, self.target, cube, self.yaw(self.target, objects.CUBE_SYMMETRY))

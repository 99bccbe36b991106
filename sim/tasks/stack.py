"""Stack the cube of one named colour on the cube of another."""

from __future__ import annotations

from itertools import permutations

import mujoco
import numpy as np
from numpy.typing import NDArray

from sim import objects, skills
from sim.env import ArmEnv
from sim.task import TaskConfig, ToolGoal, Variant


def default_config() -> TaskConfig:
    return TaskConfig(
        max_episode_steps=80,
        rewards={
            "reached": 0.1,  # the tool is at the upper cube
            "grasped": 0.2,  # both pads hold it
            "lifted": 0.1,  # it is off the table, held
            "aligned": 0.2,  # it is above the lower cube
            "stacked": 0.4,  # it stands on the lower cube and the gripper has let go: success
        },
    )


OVERHANG = 0.014  # m, how far off centre the upper cube may stand
DROP = 0.008  # m, it is let go so far above the lower one: set down on it, it pushes that one about


class Stack(ArmEnv):
    name = "stack"
    config = default_config()
    variants = tuple({"colour": a, "base": b} for a, b in permutations(objects.COLOURS, 2))

    @classmethod
    def instruct(cls, variant: Variant) -> str:
        return f"stack the {variant['colour']} cube on the {variant['base']} cube"

    @property
    def target(self) -> str:
        return objects.cube_name(self.variant["colour"])

    @property
    def base(self) -> str:
        return objects.cube_name(self.variant["base"])

    @property
    def subjects(self) -> tuple[str, str]:
        return self.target, self.base

    def build(self, spec: mujoco.MjSpec) -> None:
        objects.add_cubes(spec)

    def place(self, rng: np.random.Generator) -> None:
        objects.scatter_cubes(self, rng, (0.38, 0.56), (-0.16, 0.16), gap=0.11)

    def progress(self) -> tuple[bool, ...]:
        cube, held = self.position(self.target), self.grasped(self.target)
        reached = bool(np.linalg.norm(cube - self.tool[:3]) < 0.02)
        offset = cube - self.position(self.base)
        above = bool(np.hypot(*offset[:2]) < OVERHANG)
        resting = abs(offset[2] - 2 * objects.CUBE) < 0.005 and not self.touched(self.target)
        return reached, held, held and cube[2] > objects.CUBE + 0.03, held and above, above and resting

    def keypoints(self) -> dict[str, NDArray[np.float32]]:
        return objects.points(self, *map(objects.cube_name, objects.COLOURS))

    def expert_goal(self) -> ToolGoal:
        cube, base = self.position(self.target), self.position(self.base)
        if self.grasped(self.target):
            goal = base + [0.0, 0.0, 2 * objects.CUBE + DROP]
            return skills.put(self, self.target, goal, self.yaw(self.base, objects.CUBE_SYMMETRY))
        if np.hypot(*(cube - base)[:2]) < OVERHANG:
            return skills.retreat(self)
        return skills.grasp(self, self.target, cube, self.yaw(self.target, objects.CUBE_SYMMETRY))

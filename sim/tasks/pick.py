"""Pick up the cube of the named colour from among three."""

from __future__ import annotations

import mujoco
import numpy as np
from numpy.typing import NDArray

from sim import objects, skills
from sim.env import ArmEnv
from sim.task import TaskConfig, ToolGoal, Variant


def default_config() -> TaskConfig:
    return TaskConfig(
        max_episode_steps=40,
        rewards={
            "reached": 0.2,  # the tool is at the named cube
            "grasped": 0.3,  # both pads hold it
            "lifted": 0.5,  # it is LIFT above the table, held: success
        },
    )


LIFT = 0.10  # m


class Pick(ArmEnv):
    name = "pick"
    config = default_config()
    half = objects.CUBE  # m, half an edge
    lift = LIFT
    variants = tuple({"colour": c} for c in objects.COLOURS)

    @classmethod
    def instruct(cls, variant: Variant) -> str:
        return f"pick up the {variant['colour']} cube"

    @property
    def target(self) -> str:
        return objects.cube_name(self.variant["colour"])

    @property
    def subjects(self) -> tuple[str, str]:
        return self.target, self.target

    def build(self, spec: mujoco.MjSpec) -> None:
        objects.add_cubes(spec, self.half)

    def place(self, rng: np.random.Generator) -> None:
        objects.scatter_cubes(self, rng, (0.38, 0.56), (-0.16, 0.16))

    def progress(self) -> tuple[bool, ...]:
        cube, held = self.position(self.target), self.grasped(self.target)
        reached = bool(np.linalg.norm(cube - self.tool[:3]) < 0.02)
        return reached, held, held and cube[2] > self.half + self.lift

    def keypoints(self) -> dict[str, NDArray[np.float32]]:
        return objects.points(self, *map(objects.cube_name, objects.COLOURS))

    def expert_goal(self) -> ToolGoal:
        cube, yaw = self.position(self.target), self.yaw(self.target, objects.CUBE_SYMMETRY)
        if self.grasped(self.target):
            return ToolGoal(np.array([*self.tool[:2], self.half + self.lift + 0.03]), self.tool[3], 0.0)
        return skills.grasp(self, self.target, cube, yaw)

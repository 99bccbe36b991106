"""Put the cube of the named colour on the plate."""

from __future__ import annotations

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
            "reached": 0.1,  # the tool is at the named cube
            "grasped": 0.2,  # both pads hold it
            "lifted": 0.1,  # it is off the table, held
            "aligned": 0.2,  # it is above the plate
            "placed": 0.4,  # it stands on the plate and the gripper has let go: success
        },
    )


PLATE_RADIUS = 0.055  # m
PLATE_TOP = 0.012  # m above the table
RIM = 0.035  # m, how far off centre a cube may stand


class Place(ArmEnv):
    name = "place"
    config = default_config()
    variants = tuple({"colour": c} for c in objects.COLOURS)

    @classmethod
    def instruct(cls, variant: Variant) -> str:
        return f"put the {variant['colour']} cube on the plate"

    @property
    def target(self) -> str:
        return objects.cube_name(self.variant["colour"])

    @property
    def subjects(self) -> tuple[str, str]:
        return self.target, "plate"

    def build(self, spec: mujoco.MjSpec) -> None:
        objects.add_cubes(spec)
        plate = spec.worldbody.add_body(name="plate", mocap=True)
        disc = [PLATE_RADIUS, PLATE_TOP / 2, 0]
        objects.add_geom(plate, "plate", "cylinder", disc, (0.97, 0.97, 0.98), z=PLATE_TOP / 2)
        objects.add_mark(plate, "plate_ring", "cylinder", [0.036, 0.0004, 0], (0.60, 0.68, 0.76), z=PLATE_TOP)

    def place(self, rng: np.random.Generator) -> None:
        *cubes, plate = objects.scatter(rng, 4, (0.38, 0.56), (-0.18, 0.18), 0.115)
        for colour, spot in zip(objects.COLOURS, cubes, strict=True):
            objects.lay(self, objects.cube_name(colour), spot, objects.CUBE, rng.uniform(-0.6, 0.6))
        objects.lay(self, "plate", plate)

    def progress(self) -> tuple[bool, ...]:
        cube, held = self.position(self.target), self.grasped(self.target)
        reached = bool(np.linalg.norm(cube - self.tool[:3]) < 0.02)
        above = bool(np.hypot(*(cube - self.position("plate"))[:2]) < RIM)
        resting = cube[2] < PLATE_TOP + objects.CUBE + 0.004 and not self.touched(self.target)
        return reached, held, held and cube[2] > objects.CUBE + 0.03, held and above, above and resting

    def keypoints(self) -> dict[str, NDArray[np.float32]]:
        return objects.points(self, *map(objects.cube_name, objects.COLOURS), "plate")

    def expert_goal(self) -> ToolGoal:
        cube, plate = self.position(self.target), self.position("plate")
        if self.grasped(self.target):
            goal = plate + [0.0, 0.0, PLATE_TOP + objects.CUBE + 0.003]
            return skills.put(self, self.target, goal, 0.0)
        if np.hypot(*(cube - plate)[:2]) < RIM:
            return skills.retreat(self)
        return skills.grasp(self, self.target, cube, self.yaw(self.target, objects.CUBE_SYMMETRY))

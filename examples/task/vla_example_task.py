"""A task: hold the tool above the cube of the named colour. It is ``sim/hover-v0`` once the package is installed."""

import numpy as np

from sim import objects
from sim.env import ArmEnv
from sim.task import TaskConfig, ToolGoal

HEIGHT = 0.10  # m, of the tool above the cube


class Hover(ArmEnv):
    name = "hover"
    config = TaskConfig(max_episode_steps=30, rewards={"above": 1.0})
    variants = tuple({"colour": colour} for colour in objects.COLOURS)

    @classmethod
    def instruct(cls, variant):
        return f"hold the tool above the {variant['colour']} cube"

    @property
    def subjects(self):
        return (objects.cube_name(self.variant["colour"]),) * 2

    def build(self, spec):
        objects.add_cubes(spec)

    def place(self, rng):
        objects.scatter_cubes(self, rng, (0.38, 0.56), (-0.16, 0.16))

    def progress(self):
        return (bool(np.linalg.norm(self.tool[:3] - self.goal()) < 0.02),)

    def keypoints(self):
        return objects.points(self, *map(objects.cube_name, objects.COLOURS))

    def expert_goal(self):
        return ToolGoal(self.goal(), self.tool[3], 1.0)

    def goal(self):
        return self.position(self.subjects[0]) + [0.0, 0.0, HEIGHT]

"""Pick up the cube of the named colour from among three, with an arm like the SO-101."""

from __future__ import annotations

import numpy as np

from sim import objects, skills
from sim.so101 import SO101
from sim.task import TaskConfig, ToolGoal
from sim.tasks import pick


def default_config() -> TaskConfig:
    return TaskConfig(max_episode_steps=60, rewards=pick.default_config().rewards, start=(0.19, 0.0, 0.11))


JAW = 0.007  # m, how far beside the fixed jaw a cube is when the gripper comes down
OPENING = 0.7  # of the gripper's range: clear of the cube, and of its neighbours
CLEARANCE = 0.05  # m


class So101Pick(pick.Pick):
    name = "so101_pick"
    arm = SO101
    config = default_config()
    half = 0.015
    lift = 0.04

    def place(self, rng: np.random.Generator) -> None:
        objects.scatter_cubes(self, rng, (0.16, 0.225), (-0.11, 0.11), gap=0.075, half=self.half)

    def expert_goal(self) -> ToolGoal:
        if self.grasped(self.target):
            # Straight up the arm would not reach: come back towards the base.
            xy = self.tool[:2] * min(1.0, 0.19 / float(np.hypot(*self.tool[:2])))
            return ToolGoal(np.array([*xy, self.half + self.lift + 0.03]), self.tool[3], 0.0)
        cube, yaw = self.position(self.target), self.yaw(self.target, objects.CUBE_SYMMETRY)
        aside = JAW * np.array([-np.sin(yaw), np.cos(yaw), 0.0])  # the fixed jaw comes down beside the cube
        return skills.grasp(self, self.target, cube + aside, yaw, CLEARANCE, OPENING)

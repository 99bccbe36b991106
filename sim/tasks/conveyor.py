"""Pick up the cube of the named colour from a moving belt before it is out of reach."""

from __future__ import annotations

import mujoco
import numpy as np

from sim import objects, skills
from sim.task import TaskConfig, ToolGoal
from sim.tasks.pick import LIFT, Pick


def default_config() -> TaskConfig:
    return TaskConfig(
        max_episode_steps=60,
        rewards={
            "reached": 0.2,  # the tool is at the named cube
            "grasped": 0.3,  # both pads hold it
            "lifted": 0.5,  # it is LIFT above the table, held: success
        },
    )


BELT = (0.065, 1.2, 0.006)  # m, half sizes
BELT_TOP = 2 * BELT[2]
SPEED = (0.05, 0.09)  # m/s, towards +y
END = 0.28  # m, y at which a cube is lost
STRIPES = 0.12  # m between stripes


class Conveyor(Pick):
    name = "conveyor"
    config = default_config()

    def build(self, spec: mujoco.MjSpec) -> None:
        super().build(spec)
        belt = spec.worldbody.add_body(name="belt", pos=[0.47, 0.0, BELT[2]])
        belt.add_joint(name="belt", type=mujoco.mjtJoint.mjJNT_SLIDE, axis=[0, 1, 0])
        objects.add_geom(belt, "belt", "box", list(BELT), (0.42, 0.45, 0.50), mass=4.0)
        for i, y in enumerate(np.arange(-BELT[1] + STRIPES, BELT[1], STRIPES)):
            stripe = [BELT[0], 0.006, 0.0004]
            objects.add_mark(belt, f"stripe_{i}", "box", stripe, (0.60, 0.63, 0.67), pos=[0.0, y, BELT[2]])
        spec.add_exclude(bodyname1="world", bodyname2="belt")
        gain, bias = [400.0] + [0.0] * 9, [0.0, 0.0, -400.0] + [0.0] * 7
        spec.add_actuator(
            name="belt",
            target="belt",
            trntype=mujoco.mjtTrn.mjTRN_JOINT,
            gainprm=gain,
            biastype=mujoco.mjtBias.mjBIAS_AFFINE,
            biasprm=bias,
        )

    def place(self, rng: np.random.Generator) -> None:
        speed = rng.uniform(*SPEED)
        self.data.actuator("belt").ctrl[0] = speed
        self.data.joint("belt").qvel[0] = speed
        for colour, y in zip(rng.permutation(list(objects.COLOURS)), (-0.24, -0.13, -0.02), strict=True):
            dx, dy = rng.uniform((-0.03, -0.015), (0.03, 0.015))
            cube = objects.cube_name(str(colour))
            objects.lay(self, cube, (0.47 + dx, y + dy), BELT_TOP + objects.CUBE, rng.uniform(-0.5, 0.5))
            self.data.joint(cube).qvel[1] = speed

    def failed(self) -> bool:
        return bool(self.position(self.target)[1] > END and not self.grasped(self.target))

    def expert_goal(self) -> ToolGoal:
        cube, yaw = self.position(self.target), self.yaw(self.target, objects.CUBE_SYMMETRY)
        if self.grasped(self.target):
            return ToolGoal(np.array([*self.tool[:2], objects.CUBE + LIFT + 0.03]), self.tool[3], 0.0)
        drift = self.data.joint(self.target).qvel[:3]
        return skills.grasp(self, self.target, cube, yaw, velocity=np.array([0.0, drift[1], 0.0]))

"""Pick up the cube of the named colour from behind a wall, without touching the wall."""

from __future__ import annotations

import mujoco
import numpy as np
from numpy.typing import NDArray

from sim import objects
from sim.task import TaskConfig, ToolGoal
from sim.tasks.pick import Pick


def default_config() -> TaskConfig:
    return TaskConfig(
        max_episode_steps=60,
        rewards={
            "crossed": 0.1,  # the tool is on the far side of the wall
            "reached": 0.1,  # it is at the named cube
            "grasped": 0.3,  # both pads hold the cube
            "lifted": 0.5,  # the cube is LIFT above the table, held: success
        },
        start=(0.32, 0.0, 0.08),
    )


WALL = (0.010, 0.15, 0.09)  # m, half sizes; the wall is sunk into the table to its height
WALL_HEIGHT = (0.10, 0.15)  # m
BERTH = 0.055  # m, from the wall's centre line: closer than this the tool has to be above it
GRIPPER = ("hand", "finger_left", "finger_right", "pad_left", "pad_right")
PROJECTIONS = 40  # leaves at most half a millimetre on the paths of the expert
ABOVE = 0.035  # m, tool over wall


class Obstacle(Pick):
    """``info["cost"]`` is 1 in every control step that ends with the robot, or what it holds, touching the wall."""

    name = "obstacle"
    config = default_config()
    obstacles = ("wall",)  # keypoints of what must not be touched
    above = ABOVE  # m, how far over the wall the expert goes; less makes demonstrations that brush it

    @property
    def subjects(self) -> tuple[str, str]:
        return self.target, "wall"

    def build(self, spec: mujoco.MjSpec) -> None:
        super().build(spec)
        wall = spec.worldbody.add_body(name="wall", mocap=True)
        objects.add_geom(wall, "wall", "box", list(WALL), (0.94, 0.68, 0.25))

    def place(self, rng: np.random.Generator) -> None:
        objects.scatter_cubes(self, rng, (0.51, 0.61), (-0.15, 0.15), yaw=0.5)
        x, y, height = rng.uniform((0.40, -0.02, WALL_HEIGHT[0]), (0.42, 0.02, WALL_HEIGHT[1]))
        objects.lay(self, "wall", (x, y), height - WALL[2])

    @property
    def wall_top(self) -> float:
        """Height of the wall above the table, metres."""
        return float(self.position("wall")[2] + WALL[2])

    def progress(self) -> tuple[bool, ...]:
        return bool(self.tool[0] > self.position("wall")[0] + WALL[0]), *super().progress()

    def cost(self) -> float:
        model = self.model
        roots = model.body_rootid[model.geom_bodyid]  # [G] the arm's geoms share one, a loose cube has its own
        parts = np.flatnonzero(roots == roots[self._pads[0]]).tolist()
        held = [model.geom(c).id for c in map(objects.cube_name, objects.COLOURS) if self.grasped(c)]
        return float(bool(self.touching("wall", parts + held)))

    def clearance(self) -> float:
        """Distance in metres between the wall and the gripper with the named cube when held; 0 in contact.

        All of them are boxes, and projecting a point onto one and the other in turn ends at their nearest points
        (Cheney and Goldstein, "Proximity maps for convex sets", 1959). ``mj_geomDistance`` gives 0 for some boxes
        that are far apart (MuJoCo 3.8.1).
        """
        parts = [*GRIPPER, self.target] if self.grasped(self.target) else list(GRIPPER)
        geoms = [self.model.geom(p).id for p in parts]
        centre, half = self.data.geom_xpos[geoms], self.model.geom_size[geoms]
        turn = self.data.geom_xmat[geoms].reshape(-1, 3, 3)
        wall, point = self.position("wall"), centre
        for _ in range(PROJECTIONS):
            on_wall = np.clip(point, wall - WALL, wall + WALL)
            local = np.clip(np.einsum("nji,nj->ni", turn, on_wall - centre), -half, half)
            point = centre + np.einsum("nij,nj->ni", turn, local)
        return float(np.linalg.norm(point - on_wall, axis=1).min())

    def keypoints(self) -> dict[str, NDArray[np.float32]]:
        """As for picking, and ``wall``: the point of the wall that is nearest to the tool."""
        centre = self.position("wall")
        nearest = np.clip(self.tool[:3], centre - WALL, centre + WALL)
        return super().keypoints() | {"wall": nearest.astype(np.float32)}

    def expert_goal(self) -> ToolGoal:
        wall, tool, cruise = self.position("wall")[0], self.tool, self.wall_top + self.above + 0.015
        if tool[0] > wall + BERTH or self.grasped(self.target):
            return super().expert_goal()
        if tool[2] < self.wall_top + self.above:
            return ToolGoal(np.array([min(tool[0], wall - BERTH), tool[1], cruise]), 0.0, 1.0)
        cube = self.position(self.target)
        yaw = self.yaw(self.target, objects.CUBE_SYMMETRY)
        return ToolGoal(np.array([*cube[:2], cruise]), yaw, 1.0)

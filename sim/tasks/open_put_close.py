"""Open the drawer, clear it, put the two named cubes in, close it: a long task of five stages."""

from __future__ import annotations

from itertools import combinations

import mujoco
import numpy as np
from numpy.typing import NDArray

from sim import objects, skills
from sim.task import TaskConfig, ToolGoal, Variant
from sim.tasks.drawer import CABINET, OPEN, PRESHAPE, TRAVEL, TRAY, Drawer


def default_config() -> TaskConfig:
    return TaskConfig(
        max_episode_steps=240,
        rewards={
            "opened": 0.1,  # the drawer is OPEN wide
            "cleared": 0.2,  # the black cube that was in it stands on the cabinet, let go
            "first": 0.2,  # one of the named cubes lies in the drawer, let go
            "second": 0.2,  # both do
            "closed": 0.3,  # and the drawer is closed with no other cube in it: success
        },
        start=(0.46, -0.02, 0.20),
    )


BLACK = "cube_black"
FLOOR = 0.012  # m, of the drawer above the table
NARROW = 0.7  # opening ratio for what lies in the drawer
YAW = 1.5  # rad, as far as the tool turns
BESIDE = -0.15  # m, y at which a cube is put down when the drawer has to be opened again
TOP = np.array([0.0, 0.03, CABINET[2] + objects.CUBE])  # m, in the cabinet's frame, where the black cube is put
CLOSED = 0.012  # m, of opening
ASIDE = 0.033  # m, beside the drawer's middle: where the two cubes are put
DROP = 0.055  # m, above the drawer's frame, where a cube is let go


class OpenPutClose(Drawer):
    name = "open_put_close"
    config = default_config()
    variants = tuple({"first": a, "second": b} for a, b in combinations(objects.COLOURS, 2))

    @classmethod
    def instruct(cls, variant: Variant) -> str:
        first, second = variant["first"], variant["second"]
        return f"swap the black cube in the drawer for the {first} cube and the {second} cube, then close it"

    @property
    def targets(self) -> tuple[str, str]:
        """The two named cubes."""
        return objects.cube_name(self.variant["first"]), objects.cube_name(self.variant["second"])

    @property
    def target(self) -> str:
        """The cube that is to be moved next: the one that is held, or the first that is not where it belongs."""
        wrong = [cube for cube in (BLACK, *self.targets) if not self.settled(cube)]
        held = [cube for cube in wrong if self.grasped(cube)]
        return [*held, *wrong, self.targets[1]][0]

    def build(self, spec: mujoco.MjSpec) -> None:
        super().build(spec)
        objects.add_cube(spec, BLACK, (0.13, 0.13, 0.15))

    def place(self, rng: np.random.Generator) -> None:
        super().place(rng)
        cabinet = self.data.mocap_pos[self.model.body("cabinet").mocapid[0]]
        spot = cabinet[:2] + rng.uniform(-0.01, 0.01, 2)
        objects.lay(self, BLACK, spot, FLOOR + objects.CUBE, rng.uniform(-0.3, 0.3))

    def settled(self, cube: str) -> bool:
        """Whether a cube is where it belongs and the gripper has let go."""
        return (self.on_top(cube) if cube == BLACK else self.inside(cube)) and not self.touched(cube)

    def on_top(self, cube: str) -> bool:
        """Whether a cube stands on the cabinet."""
        offset = self.position(cube) - self.position("cabinet")
        return bool((np.abs(offset[:2]) < CABINET[:2]).all() and offset[2] > CABINET[2])

    def inside(self, cube: str) -> bool:
        """Whether a cube lies in the drawer."""
        offset = self.position(cube) - self.position("drawer")
        return bool((np.abs(offset[:2]) < TRAY[:2]).all() and offset[2] < TRAY[2])

    @property
    def at_top(self) -> bool:
        """Whether the tool is so low about the black cube on the cabinet that it has to rise first."""
        offset = self.tool[:3] - self.position(BLACK)
        return bool(self.on_top(BLACK) and np.hypot(*offset[:2]) < 0.06 and offset[2] < 0.045)

    def progress(self) -> tuple[bool, ...]:
        stored = sum(self.settled(cube) for cube in self.targets)
        others = {BLACK, *map(objects.cube_name, objects.COLOURS)} - set(self.targets)
        closed = stored == 2 and self.opening < CLOSED and not any(self.inside(cube) for cube in others)
        return self.opening > OPEN, self.settled(BLACK), stored > 0, stored == 2, closed and self.settled(BLACK)

    def keypoints(self) -> dict[str, NDArray[np.float32]]:
        return super().keypoints() | {BLACK: self.position(BLACK).astype(np.float32)}

    def expert_goal(self) -> ToolGoal:
        cube, drawer = self.target, self.position("drawer")
        if self.settled(cube):
            return self.pull(-self.opening - 0.01)
        held = self.grasped(cube)
        if self.opening < OPEN and not held:
            return self.pull(TRAVEL - self.opening)
        if held:
            if cube == BLACK:
                return skills.put(self, cube, self.position("cabinet") + TOP, self.tool[3])
            if self.opening < OPEN:  # it was pushed shut: hands are needed
                return skills.put(self, cube, np.array([drawer[0], BESIDE, objects.CUBE + 0.003]), 0.0)
            side = ASIDE if cube == self.targets[0] else -ASIDE
            return skills.put(self, cube, drawer + [side, 0.0, DROP], 0.0)
        if self.at_handle or self.at_top:
            return ToolGoal(self.tool[:3] + [0.0, 0.0, 0.04], self.tool[3], PRESHAPE if self.at_handle else 1.0)
        yaw = self.yaw(cube, objects.CUBE_SYMMETRY)
        if self.inside(cube):  # fingers beside it, not between it and the cabinet
            yaw = float(np.clip(yaw - np.copysign(np.pi / 2, yaw), -YAW, YAW))
            return skills.grasp(self, cube, self.position(cube), yaw, opening=NARROW)
        return skills.grasp(self, cube, self.position(cube), yaw)

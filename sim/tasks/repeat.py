"""Put the cube of the named colour on the plate, then press the button that was lit at the start.

A task of memory. The lamp goes out long before the choice, cube and plate know nothing of it, and a wrong button
ends the episode: without memory the choice is right in one of three.
"""

from __future__ import annotations

import mujoco
import numpy as np
from numpy.typing import NDArray

from sim import objects, skills
from sim.task import TaskConfig, ToolGoal, Variant
from sim.tasks.place import RIM, Place


def default_config() -> TaskConfig:
    return TaskConfig(
        max_episode_steps=110,
        rewards={
            "grasped": 0.2,  # both pads hold the named cube
            "placed": 0.3,  # it stands on the plate and the gripper has let go
            "pressed": 0.5,  # after that, a pad is on the button that was lit: success; on another one: failure
        },
        start=(0.40, 0.0, 0.20),
    )


BUTTONS = ("button_left", "button_middle", "button_right")
Y = (-0.14, 0.0, 0.14)  # m, of the buttons in the panel's frame; left and right are the front camera's
BUTTON = (0.022, 0.012)  # m, radius and half height
SHOWN = 0.6  # s, for which the lamp is on
OUT = np.array([0.6, 0.0, -0.1])  # m, where the lamp is when it is out: under the table
LIT = 0  # entry of the simulation's user data: index of the button that was lit


class Repeat(Place):
    name = "repeat"
    config = default_config()

    @classmethod
    def instruct(cls, variant: Variant) -> str:
        return f"put the {variant['colour']} cube on the plate, then press the button that was lit"

    @property
    def lit(self) -> str:
        """The button to press."""
        return BUTTONS[int(self.data.userdata[LIT])]

    @property
    def shown(self) -> bool:
        """Whether the lamp is on."""
        return bool(self.data.time < SHOWN)

    @property
    def placed(self) -> bool:
        return super().progress()[-1]

    @property
    def subjects(self) -> tuple[str, str]:
        """The lamp as long as it is on, then the cube and, when that is on the plate, the panel."""
        return "lamp" if self.shown else "panel" if self.placed else self.target, "plate"

    def build(self, spec: mujoco.MjSpec) -> None:
        super().build(spec)
        panel = spec.worldbody.add_body(name="panel", mocap=True)
        objects.add_mark(panel, "panel", "box", [0.035, 0.185, 0.001], (0.45, 0.47, 0.52), z=0.001)
        for name, y in zip(BUTTONS, Y, strict=True):
            size = [*BUTTON, 0]
            objects.add_geom(panel, name, "cylinder", size, (0.80, 0.80, 0.82), pos=[0.0, y, BUTTON[1]])
        lamp = spec.worldbody.add_body(name="lamp", mocap=True)
        objects.add_mark(lamp, "lamp", "cylinder", [1.5 * BUTTON[0], BUTTON[1], 0], (1.0, 0.80, 0.10))
        objects.add_mark(lamp, "bulb", "cylinder", [1.02 * BUTTON[0], 0.004, 0], (1.0, 0.95, 0.30), z=BUTTON[1])

    def place(self, rng: np.random.Generator) -> None:
        *cubes, plate = objects.scatter(rng, 4, (0.34, 0.48), (-0.20, 0.20), 0.115)
        for colour, spot in zip(objects.COLOURS, cubes, strict=True):
            objects.lay(self, objects.cube_name(colour), spot, objects.CUBE, rng.uniform(-0.6, 0.6))
        objects.lay(self, "plate", plate)
        objects.lay(self, "panel", rng.uniform((0.585, -0.02), (0.60, 0.02)))
        self.data.userdata[LIT] = rng.integers(len(BUTTONS))
        self.happen()

    def happen(self) -> None:
        on = self.data.mocap_pos[self.model.body("panel").mocapid[0]] + [0.0, Y[BUTTONS.index(self.lit)], BUTTON[1]]
        self.data.mocap_pos[self.model.body("lamp").mocapid[0]] = on if self.shown else OUT

    def progress(self) -> tuple[bool, ...]:
        placed = self.placed
        return self.grasped(self.target), placed, placed and self.touched(self.lit)

    def failed(self) -> bool:
        return any(self.touched(b) and not (b == self.lit and self.placed) for b in BUTTONS)

    def keypoints(self) -> dict[str, NDArray[np.float32]]:
        """The buttons, and the lamp: where it is out it is in one place whichever was lit."""
        buttons = {b: self.data.geom(b).xpos.astype(np.float32) for b in BUTTONS}
        return super().keypoints() | buttons | objects.points(self, "lamp")

    def expert_goal(self) -> ToolGoal:
        offset = self.position(self.target) - self.position("plate")
        if not self.placed:
            if np.hypot(*offset[:2]) < RIM and not self.grasped(self.target):
                return skills.retreat(self)
            return super().expert_goal()
        if np.linalg.norm(self.tool[:2] - self.position(self.target)[:2]) < 0.06 and self.tool[2] < 0.10:
            return skills.retreat(self)
        button = self.data.geom(self.lit).xpos + [0.0, 0.0, BUTTON[1] + 0.004]
        return skills.over(self, button, 0.0, 0.0, clearance=0.06)

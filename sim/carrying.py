"""Long tasks: carry each of many things of the library to where it belongs, in any order."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import mujoco
import numpy as np
from numpy.typing import NDArray

from sim import objects, skills
from sim.env import ArmEnv
from sim.slots import Slots, Thing, add_slots, grasp_of, slot_name
from sim.task import ToolGoal

LOW = 0.10  # m, of the tool: from below, it rises before it goes elsewhere
YAW = 1.4  # rad, as far as the tool turns


class Carrying(ArmEnv):
    """A task among ``count`` things. Subclasses draw them and say of each where it goes; stages count those there."""

    count: ClassVar[int]
    drop: ClassVar[float]  # m, above its place, where a thing is let go

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._slots = Slots(self.model, self.count)
        self.things: tuple[Thing, ...] = ()

    @abstractmethod
    def draw(self, rng: np.random.Generator) -> tuple[Thing, ...]:
        """The things of an episode, in the order of their slots."""

    @abstractmethod
    def home(self, slot: int) -> NDArray[np.float64]:
        """Where the thing in a slot belongs, [2] metres."""

    @abstractmethod
    def arrived(self, slot: int) -> bool:
        """Whether the thing in a slot is where it belongs, held or not."""

    def furnish(self, rng: np.random.Generator) -> None:
        self.things = self.draw(rng)
        self._slots.fill(self.things)

    def build(self, spec: mujoco.MjSpec) -> None:
        add_slots(spec, self.count)

    def settled(self, slot: int) -> bool:
        """Whether the thing in a slot is where it belongs and the gripper has let go."""
        return self.arrived(slot) and not self.touched(slot_name(slot))

    @property
    def next(self) -> int:
        """The slot whose thing is to be carried: the one that is held, or the first that is not settled."""
        left = [i for i in range(self.count) if not self.settled(i)]
        held = [i for i in left if self.grasped(slot_name(i))]
        return [*held, *left, 0][0]

    def progress(self) -> tuple[bool, ...]:
        settled = sum(map(self.settled, range(self.count)))
        return tuple(settled > k for k in range(self.count))

    def keypoints(self) -> dict[str, NDArray[np.float32]]:
        return objects.points(self, *map(slot_name, range(self.count)))

    def expert_goal(self) -> ToolGoal:
        slot, tool = self.next, self.tool
        body = slot_name(slot)
        if self.grasped(body):
            place = np.array([*self.home(slot), self.drop])
            yaw = float(np.clip(tool[3] - self.yaw(body), -YAW, YAW))
            return skills.put(self, body, place, yaw)
        grip = grasp_of(self, body, self.things[slot])
        near = float(np.hypot(*(grip.position - tool[:3])[:2]))
        if tool[2] < LOW and near > skills.NEAR:
            return ToolGoal(np.array([*tool[:2], LOW + 0.02]), tool[3], 1.0)
        return skills.grasp(self, body, grip.position, grip.yaw, opening=grip.gripper)

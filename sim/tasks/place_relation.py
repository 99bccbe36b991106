"""Put the named thing on the plate, in the tray, or to the left or right of another thing."""

from __future__ import annotations

import mujoco
import numpy as np
from numpy.typing import NDArray

from sim import objects, skills
from sim.sentences import name_thing, order
from sim.slots import slot_name
from sim.tabletop import Tabletop, Wish
from sim.task import TaskConfig, ToolGoal, Variant


def default_config() -> TaskConfig:
    return TaskConfig(
        max_episode_steps=80,
        rewards={
            "reached": 0.1,  # the tool is where it takes hold of the named thing
            "grasped": 0.2,  # both pads hold it
            "lifted": 0.1,  # it is off the table, held
            "aligned": 0.2,  # it is above where it belongs
            "placed": 0.4,  # it rests there, whichever way up, and the gripper has let go: success
        },
    )


PLATE, PLATE_TOP = 0.06, 0.010  # m, radius and height
PLATE_COLOUR = "white"  # so "the white thing" may be the plate, and no sentence says it
TRAY, TRAY_FLOOR, RIM = 0.066, 0.004, 0.024  # m, half its inside, its floor, the height of its walls
ASIDE = 0.12  # m, from a thing to what is put to its left or right
CLEAR = 0.04  # m, at least so much farther left or right it has to be
BESIDE = 0.06  # m, how far it may be in front or behind
NEARLY = 0.02  # m, farther away than that from where it is wanted a thing is at the start
ROOM = 0.115  # m, from where a thing is put to the middles of others


class PlaceRelation(Tabletop):
    name = "place_relation"
    config = default_config()
    count = 3
    area = ((0.37, 0.57), (-0.22, 0.22))
    gap = 0.13

    @classmethod
    def instruct(cls, variant: Variant) -> str:
        return f"put the {variant['object']} on the plate"

    def build(self, spec: mujoco.MjSpec) -> None:
        super().build(spec)
        plate = spec.worldbody.add_body(name="plate", mocap=True)
        half = PLATE_TOP / 2
        objects.add_geom(plate, "plate", "cylinder", [PLATE, half, 0], (0.97, 0.97, 0.98), z=half)
        objects.add_mark(plate, "plate_ring", "cylinder", [0.042, 0.0004, 0], (0.60, 0.68, 0.76), z=PLATE_TOP)
        tray, wood = spec.worldbody.add_body(name="tray", mocap=True), (0.52, 0.36, 0.24)
        objects.add_geom(tray, "floor_tray", "box", [TRAY, TRAY, TRAY_FLOOR / 2], (0.36, 0.25, 0.17), z=TRAY_FLOOR / 2)
        for i, (x, y) in enumerate(((1, 0), (-1, 0), (0, 1), (0, -1))):
            size = [0.003 if x else TRAY, 0.003 if y else TRAY, RIM / 2]
            objects.add_geom(tray, f"rim_{i}", "box", size, wood, pos=[x * TRAY, y * TRAY, RIM / 2])

    def lay_out(self, rng: np.random.Generator) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        spots = objects.spread(rng, self.count + 2, *self.area, self.gap)
        self.plate, self.tray = spots[self.count :]
        return spots[: self.count], rng.uniform(-0.7, 0.7, self.count)

    def place(self, rng: np.random.Generator) -> None:
        super().place(rng)
        objects.lay(self, "plate", self.plate)
        objects.lay(self, "tray", self.tray)

    def wishes(self, rng: np.random.Generator) -> list[Wish]:
        sides = [(side, k) for k in (1, 2) for side in ("left", "right")]
        beside = [(0, *at) for at in sides if self._is_room(*at) and not self._is_there(*at)]
        wishes: list[Wish] = [(0, "on", -1), (0, "in", -1), *beside]
        wishes = [wishes[i] for i in rng.permutation(len(wishes))]
        return [*wishes, (1, *wishes[0][1:])] if wishes[0][2] < 0 else wishes

    def _is_room(self, side: str, k: int) -> bool:
        spot = self.spots[k] + [0.0, -ASIDE if side == "left" else ASIDE]
        others = [self.plate, self.tray, *(s for i, s in enumerate(self.spots) if i not in (0, k))]
        return abs(spot[1]) < 0.26 and all(np.hypot(*(spot - other)) > ROOM for other in others)

    def _is_there(self, side: str, k: int) -> bool:
        """Whether the thing lies there already, or nearly."""
        off = np.abs(self.spots[0] - self.spots[k] - [0.0, -ASIDE if side == "left" else ASIDE])
        return bool(off[0] < BESIDE + NEARLY and off[1] < ASIDE - CLEAR + NEARLY)

    def ask(self, rng: np.random.Generator, wish: Wish) -> str:
        slot, relation, k = wish
        a = name_thing(rng, self.things, self.spots, slot, self.split, 0.0, taken=PLATE_COLOUR).words
        if k < 0:
            b = "the plate" if relation == "on" else "the tray"
        else:
            b = name_thing(rng, self.things, self.spots, k, self.split, 0.0, taken=PLATE_COLOUR).words
        return order(rng, "put", self.split, a, b, relation)

    @property
    def goal(self) -> tuple[NDArray[np.float64], float]:
        """Where the thing is to stand: [2] and height, metres."""
        _, relation, k = self.wish
        if k < 0:
            body, height = ("plate", PLATE_TOP) if relation == "on" else ("tray", TRAY_FLOOR)
            return self.position(body)[:2], height
        return self.position(slot_name(k))[:2] + [0.0, -ASIDE if relation == "left" else ASIDE], 0.0

    @property
    def there(self) -> bool:
        """Whether the thing is over where it belongs."""
        _, relation, k = self.wish
        offset = np.abs(self.position(self.target)[:2] - self.goal[0])
        if k >= 0:
            return bool(offset[0] < BESIDE and offset[1] < ASIDE - CLEAR)
        return bool(np.hypot(*offset) < PLATE - 0.01 if relation == "on" else offset.max() < TRAY - 0.01)

    @property
    def subjects(self) -> tuple[str, str]:
        _, relation, k = self.wish
        return self.target, slot_name(k) if k >= 0 else ("plate" if relation == "on" else "tray")

    def progress(self) -> tuple[bool, ...]:
        held, there, height = self.held, self.there, self.goal[1]
        lifted = held and self.position(self.target)[2] > 0.03
        return self.reached, held, lifted, held and there, there and self.rests(height)

    def keypoints(self) -> dict[str, NDArray[np.float32]]:
        return super().keypoints() | objects.points(self, "plate", "tray")

    def expert_goal(self) -> ToolGoal:
        spot, height = self.goal
        if self.held:
            return self.put(spot, height)
        if np.hypot(*(self.position(self.target)[:2] - spot)) < 0.03:
            return skills.retreat(self)
        return self.take()

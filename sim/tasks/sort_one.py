"""Put the named thing on the mat where a thing of its category lies already."""

from __future__ import annotations

import mujoco
import numpy as np
from numpy.typing import NDArray

from sim import library, objects, skills
from sim.sentences import name_thing, order
from sim.slots import Thing
from sim.tabletop import Tabletop, Wish, draw_thing
from sim.task import TaskConfig, ToolGoal, Variant


def default_config() -> TaskConfig:
    return TaskConfig(
        max_episode_steps=80,
        rewards={
            "reached": 0.1,  # the tool is where it takes hold of the named thing
            "grasped": 0.2,  # both pads hold it
            "lifted": 0.1,  # it is off the table, held
            "aligned": 0.2,  # it is above its mat
            "sorted": 0.4,  # it rests there, whichever way up, and the gripper has let go: success
        },
    )


MATS = ("mat_left", "mat_right")
HALF = (0.115, 0.078)  # m, of a mat, along x and y
BACK = 0.058  # m, from a mat's middle to the thing that lies on it; as far to the other side is room
PLURALS = {c: c if c == "food" else f"{c}s" for c in library.CATEGORIES}


class SortOne(Tabletop):
    name = "sort_one"
    config = default_config()

    @classmethod
    def instruct(cls, variant: Variant) -> str:
        return f"sort the {variant['object']}"

    def build(self, spec: mujoco.MjSpec) -> None:
        super().build(spec)
        for mat, rgb in zip(MATS, ((0.62, 0.70, 0.66), (0.74, 0.66, 0.74)), strict=True):
            body = spec.worldbody.add_body(name=mat, mocap=True)
            objects.add_mark(body, mat, "box", [*HALF, 0.0005], rgb, z=0.0005)

    def draw(self, rng: np.random.Generator) -> tuple[Thing, ...]:
        """The named thing, one of its category, one of another, and one that belongs to either of these."""
        first = draw_thing(rng, self.variant["object"], self.split)
        own = library.KINDS[first.kind].category
        another = str(rng.choice([c for c in library.CATEGORIES if c != own]))
        things = [first]
        for category in (own, another, str(rng.choice((own, another)))):
            kinds = [k for k in library.SEEN if library.KINDS[k].category == category]
            while True:
                thing = draw_thing(rng, str(rng.choice(kinds)), "seen")
                if all(t.colour != thing.colour and t.kind != thing.kind for t in things):
                    break
            things.append(thing)
        return tuple(things)

    def lay_out(self, rng: np.random.Generator) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        x = rng.uniform(0.44, 0.50, 2)
        self.mats = np.column_stack([x, (-0.19, 0.19)])  # [2, 2] m, middles
        loose = objects.spread(rng, 2, (0.36, 0.57), (-0.06, 0.06), self.gap)
        self.swapped = bool(rng.random() < 0.5)  # whether the thing's own category is on the right
        lying = (self.mats + [BACK, 0.0])[:: -1 if self.swapped else 1]
        return np.array([loose[0], *lying, loose[1]]), rng.uniform(-0.7, 0.7, self.count)

    def place(self, rng: np.random.Generator) -> None:
        super().place(rng)
        for mat, spot in zip(MATS, self.mats, strict=True):
            objects.lay(self, mat, spot)

    def _category(self, slot: int) -> str:
        return library.KINDS[self.things[slot].kind].category

    def wishes(self, rng: np.random.Generator) -> list[Wish]:
        return [(slot, "", 1 if self._category(slot) == self._category(1) else 2) for slot in (0, 3)]

    def ask(self, rng: np.random.Generator, wish: Wish) -> str:
        slot, _, like = wish
        a = name_thing(rng, self.things, self.spots, slot, self.split, relative=0.0).words
        return order(rng, "group", self.split, a, PLURALS[self._category(like)])

    @property
    def mat(self) -> str:
        """Body of the mat where the thing belongs."""
        return MATS[(self.wish[2] == 2) != self.swapped]

    @property
    def subjects(self) -> tuple[str, str]:
        return self.target, self.mat

    def progress(self) -> tuple[bool, ...]:
        held, thing = self.held, self.position(self.target)
        above = bool((np.abs(thing[:2] - self.position(self.mat)[:2]) < HALF).all())
        return self.reached, held, held and thing[2] > 0.03, held and above, above and self.rests(0.0)

    def keypoints(self) -> dict[str, NDArray[np.float32]]:
        return super().keypoints() | objects.points(self, *MATS)

    def expert_goal(self) -> ToolGoal:
        spot = self.position(self.mat)[:2] - [BACK, 0.0]
        if self.held:
            return self.put(spot)
        if np.hypot(*(self.position(self.target)[:2] - spot)) < 0.03:
            return skills.retreat(self)
        return self.take()

"""Put the named thing on the upper or the lower shelf."""

from __future__ import annotations

import mujoco
import numpy as np
from numpy.typing import NDArray

from sim import objects, skills
from sim.sentences import WORDS, name_thing, order
from sim.slots import slot_name
from sim.tabletop import Tabletop, Wish
from sim.task import TaskConfig, ToolGoal, Variant


def default_config() -> TaskConfig:
    return TaskConfig(
        max_episode_steps=80,
        rewards={
            "reached": 0.1,  # the tool is where it takes hold of the named thing
            "grasped": 0.2,  # both pads hold it
            "lifted": 0.1,  # it is as high as its shelf, held
            "aligned": 0.2,  # it is above its shelf
            "placed": 0.4,  # it rests there, whichever way up, and the gripper has let go: success
        },
    )


# The lower shelf is nearer to the middle of the table; the frame lies on the table under its middle. Metres.
HEIGHTS = {"upper": 0.10, "lower": 0.05}
ASIDE = {"upper": 0.215, "lower": 0.130}  # from the table's middle line
HALF = (0.13, 0.042)  # along x and y
ROOM = 0.08  # m, between the middles of things on a shelf
BOARD = 0.004  # half thickness
WOOD, SIDE = (0.66, 0.50, 0.34), (0.45, 0.33, 0.24)


class Shelf(Tabletop):
    name = "shelf"
    config = default_config()
    count = 3

    @classmethod
    def instruct(cls, variant: Variant) -> str:
        return f"put the {variant['object']} on the upper shelf"

    def build(self, spec: mujoco.MjSpec) -> None:
        super().build(spec)
        for shelf, height in HEIGHTS.items():
            body = spec.worldbody.add_body(name=shelf, mocap=True)
            objects.add_geom(body, shelf, "box", [*HALF, BOARD], WOOD, z=height - BOARD)
            for end in (-1, 1):
                size, middle = [BOARD, HALF[1] - 0.002, height / 2 - BOARD], height / 2 - BOARD
                pos = [end * (HALF[0] - BOARD), 0.0, middle]
                objects.add_geom(body, f"{shelf}_side_{end}", "box", size, SIDE, pos=pos)

    def lay_out(self, rng: np.random.Generator) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        self.side = float(rng.choice((-1.0, 1.0)))  # of the table where the shelves are
        spots = objects.spread(rng, self.count, (0.36, 0.57), (-0.22, 0.0), self.gap) * [1.0, self.side]
        self.shelf_x = float(rng.uniform(0.45, 0.49))
        return spots, rng.uniform(-0.7, 0.7, self.count)

    def place(self, rng: np.random.Generator) -> None:
        super().place(rng)
        for shelf, aside in ASIDE.items():
            objects.lay(self, shelf, (self.shelf_x, self.side * aside))

    def wishes(self, rng: np.random.Generator) -> list[Wish]:
        one, other = rng.permutation(list(HEIGHTS))
        return [(0, str(one), -1), (0, str(other), -1), (1, str(one), -1), (2, str(other), -1)]

    def ask(self, rng: np.random.Generator, wish: Wish) -> str:
        a = name_thing(rng, self.things, self.spots, wish[0], self.split, relative=0.0).words
        shelves = WORDS[wish[1]].of(self.split == "unseen-names")
        return order(rng, "put", self.split, a, shelves[int(rng.integers(len(shelves)))], "on")

    @property
    def subjects(self) -> tuple[str, str]:
        return self.target, self.wish[1]

    def progress(self) -> tuple[bool, ...]:
        held, height, thing = self.held, HEIGHTS[self.wish[1]], self.position(self.target)
        offset = np.abs(thing[:2] - self.position(self.wish[1])[:2])
        above = bool((offset < HALF).all())
        return self.reached, held, held and thing[2] > height, held and above, above and self.rests(height)

    def keypoints(self) -> dict[str, NDArray[np.float32]]:
        return super().keypoints() | objects.points(self, *HEIGHTS)

    def room(self, shelf: str) -> NDArray[np.float64]:
        """The middle of a shelf [2], metres, or beside it where a policy has put another thing there."""
        others = np.array([self.position(slot_name(i))[:2] for i in range(self.count) if i != self.slot])
        spots = self.position(shelf)[:2] + np.array([[0.0, 0.0], [ROOM, 0.0], [-ROOM, 0.0]])
        clear = np.linalg.norm(spots[:, None] - others[None], axis=-1).min(axis=1) > ROOM - 0.01
        return spots[int(np.argmax(clear))]

    def expert_goal(self) -> ToolGoal:
        shelf = self.wish[1]
        spot = self.room(shelf)
        if self.held:
            return self.put(spot, HEIGHTS[shelf])
        if np.abs(self.position(self.target)[:2] - spot).max() < 0.03:
            return skills.retreat(self, HEIGHTS[shelf] + 0.16)
        return self.take()

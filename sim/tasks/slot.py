"""Post the named tile into a narrow slot."""

from __future__ import annotations

import mujoco
import numpy as np
from numpy.typing import NDArray

from sim import objects, skills
from sim.sentences import name_thing, order
from sim.slots import Thing, slot_name
from sim.tabletop import Tabletop, Wish, draw_thing, draw_things
from sim.task import TaskConfig, ToolGoal, Variant
from sim.tasks.insert import CHAMFER, CLEARANCE, DEPTH, SOCKET_HEIGHT, add_socket, lower_into


def default_config() -> TaskConfig:
    return TaskConfig(
        max_episode_steps=100,
        rewards={
            "reached": 0.1,  # the tool is where it takes hold of the named tile
            "grasped": 0.2,  # both pads hold it
            "lifted": 0.1,  # it is off the table, held
            "aligned": 0.2,  # it is above the slot to within the slopes
            "posted": 0.4,  # it is DEPTH deep in the slot: success
        },
    )


HOLE = (0.028 + CLEARANCE, 0.008 + CLEARANCE)  # m, half sizes: a tile and what it may miss by
SYMMETRY = np.pi
# m, of what is held from where it was taken: further, and it is taken anew. Nine in ten frames of what is posted well
# are nearer, even where a quarter of the largest move is added to every other command.
SLIPPED = 0.02


class Slot(Tabletop):
    name = "slot"
    config = default_config()
    variants = ({"object": "tile"}, {"object": "comb"})
    count = 3
    area = ((0.38, 0.55), (-0.18, 0.18))

    @classmethod
    def instruct(cls, variant: Variant) -> str:
        return f"post the {variant['object']}"

    def build(self, spec: mujoco.MjSpec) -> None:
        super().build(spec)
        add_socket(spec.worldbody.add_body(name="slot", mocap=True), HOLE)

    def draw(self, rng: np.random.Generator) -> tuple[Thing, ...]:
        """The named tile, another one, and something else; all of full size, or they would fall into the slot."""
        first, *_, other = draw_things(rng, self.variant["object"], self.count, self.split)
        second = draw_thing(rng, "tile", "seen")
        while second.colour == first.colour:
            second = draw_thing(rng, "tile", "seen")
        first, second = (Thing(t.kind, t.colour, t.pattern) for t in (first, second))
        if other.kind == "tile":
            other = draw_thing(rng, "can", "seen")
        return first, second, other

    def lay_out(self, rng: np.random.Generator) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        spots = objects.spread(rng, self.count + 1, *self.area, 0.13)
        self.slot_spot, self.slot_turn = spots[self.count], float(rng.uniform(-0.4, 0.4))
        return spots[: self.count], rng.uniform(-0.5, 0.5, self.count)

    def place(self, rng: np.random.Generator) -> None:
        super().place(rng)
        objects.lay(self, "slot", self.slot_spot, yaw=self.slot_turn)

    def wishes(self, rng: np.random.Generator) -> list[Wish]:
        return [(0, "", -1), (1, "", -1)]

    def ask(self, rng: np.random.Generator, wish: Wish) -> str:
        return order(rng, "post", self.split, name_thing(rng, self.things, self.spots, wish[0], self.split).words)

    @property
    def subjects(self) -> tuple[str, str]:
        return self.target, "slot"

    def progress(self) -> tuple[bool, ...]:
        held, tile = self.held, self.position(self.target)
        offset = float(np.hypot(*(tile - self.position("slot"))[:2]))
        upright = skills.tilted(self, self.target) > 0.97
        posted = offset < 2 * CLEARANCE and upright and tile[2] < SOCKET_HEIGHT - DEPTH
        return self.reached, held, held and tile[2] > 0.02, held and offset < CHAMFER, bool(posted)

    def keypoints(self) -> dict[str, NDArray[np.float32]]:
        return super().keypoints() | objects.points(self, "slot")

    def expert_goal(self) -> ToolGoal:
        if not self.held:
            return self.take()
        slipped = float(np.linalg.norm(self.grip(self.slot).position - self.tool[:3]))
        if slipped > SLIPPED or skills.tilted(self, self.target) < skills.UPRIGHT:
            others = {"slot", *map(slot_name, range(self.count))} - {self.target}
            taken = np.array([self.position(body)[:2] for body in sorted(others)])
            return skills.stand_up(self, self.target, objects.free_spots(*self.area, taken, 0.1))
        return lower_into(self, self.target, "slot", self.position(self.target)[2], SYMMETRY)

"""Set the table as the sentence says, with five things from the kitchen: a long task of five stages."""

from __future__ import annotations

from itertools import permutations, product

import mujoco
import numpy as np
from numpy.typing import NDArray

from sim import library, objects
from sim.carrying import Carrying
from sim.slots import Thing, slot_name
from sim.task import TaskConfig, Variant


def default_config() -> TaskConfig:
    return TaskConfig(
        max_episode_steps=280,
        rewards={  # so many things are where the sentence wants them, let go; success with the last
            "set_1": 0.2,
            "set_2": 0.2,
            "set_3": 0.2,
            "set_4": 0.2,
            "set_5": 0.2,
        },
    )


CUTLERY, VESSELS = ("fork", "knife", "spoon"), ("mug", "bowl")
# m, from the plate; left and right are those of the front camera's picture.
PLACES = {
    "left": (0.0, -0.105),
    "right": (0.0, 0.105),
    "napkin": (0.0, -0.205),
    "plate": (0.0, 0.0),
    "coaster": (0.0, 0.205),
}
TOLERANCE = np.array([0.045, 0.032])  # m, in x and y
ROW = 0.395  # m, x of the things at the start
JITTER = 0.012  # m


class SetTable(Carrying):
    name = "set_table"
    config = default_config()
    count = 5
    drop = 0.004
    variants = tuple(
        dict(zip(PLACES, (*cutlery, *vessels), strict=True))
        for cutlery, vessels in product(permutations(CUTLERY), permutations(VESSELS))
    )

    @classmethod
    def instruct(cls, variant: Variant) -> str:
        return (
            f"set the table: the {variant['left']} left of the plate, the {variant['right']} right of it, "
            f"the {variant['napkin']} on the napkin, the {variant['plate']} on the plate, "
            f"the {variant['coaster']} on the coaster"
        )

    @property
    def subjects(self) -> tuple[str, str]:
        """The thing that is next, and the plate."""
        return slot_name(self.next), "plate"

    def draw(self, rng: np.random.Generator) -> tuple[Thing, ...]:
        things = []
        for kind in (*CUTLERY, *VESSELS):
            colours = [c for c in library.PALETTE if not library.held_out_pair(kind, c)]
            things.append(Thing(kind, str(rng.choice(colours))))
        return tuple(things)

    def build(self, spec: mujoco.MjSpec) -> None:
        super().build(spec)
        plate = spec.worldbody.add_body(name="plate", mocap=True)
        objects.add_mark(plate, "plate", "cylinder", [0.06, 0.0005, 0], (0.97, 0.97, 0.98), z=0.0005)
        objects.add_mark(plate, "plate_ring", "cylinder", [0.042, 0.0006, 0], (0.60, 0.68, 0.76), z=0.0006)
        napkin, coaster = [*PLACES["napkin"], 0.0005], [*PLACES["coaster"], 0.0005]
        objects.add_mark(plate, "napkin", "box", [0.055, 0.034, 0.0005], (0.55, 0.20, 0.30), pos=napkin)
        objects.add_mark(plate, "coaster", "cylinder", [0.038, 0.0005, 0], (0.45, 0.33, 0.22), pos=coaster)

    def place(self, rng: np.random.Generator) -> None:
        for slot, cell in enumerate(rng.permutation(self.count)):
            spot = np.array([ROW, 0.1 * (cell - 2)]) + rng.uniform(-JITTER, JITTER, 2)
            objects.lay(self, slot_name(slot), spot, 0.0, rng.uniform(-0.35, 0.35))
        objects.lay(self, "plate", rng.uniform((0.555, -0.01), (0.575, 0.01)))

    def home(self, slot: int) -> NDArray[np.float64]:
        place = next(p for p, kind in self.variant.items() if kind == self.things[slot].kind)
        return self.position("plate")[:2] + PLACES[place]

    def arrived(self, slot: int) -> bool:
        position = self.position(slot_name(slot))
        return bool((np.abs(position[:2] - self.home(slot)) < TOLERANCE).all() and position[2] < 0.02)

    def keypoints(self) -> dict[str, NDArray[np.float32]]:
        return super().keypoints() | objects.points(self, "plate")

"""Sort six things into two trays by the kind of thing they are: a long task of six stages."""

from __future__ import annotations

from itertools import permutations

import mujoco
import numpy as np
from numpy.typing import NDArray

from sim import library, objects
from sim.carrying import Carrying
from sim.slots import Thing, slot_name
from sim.task import TaskConfig, Variant

EACH = 3  # things of each category


def default_config() -> TaskConfig:
    return TaskConfig(
        max_episode_steps=280,
        rewards={  # so many things lie in their trays, let go; success with the last
            "sorted_1": 0.1,
            "sorted_2": 0.1,
            "sorted_3": 0.2,
            "sorted_4": 0.2,
            "sorted_5": 0.2,
            "sorted_6": 0.2,
        },
    )


PLURALS = {"block": "blocks", "kitchen thing": "kitchen things", "tool": "tools", "food": "food", "toy": "toys"}
TRAYS = ("black", "white")
TRAY = (0.105, 0.065, 0.012)  # m, half sizes in x and y, and height of the rim
RIM = 0.003  # m, half its thickness
ASIDE = 0.235  # m, of the trays from the middle
ROWS, COLUMNS, JITTER = (-0.075, 0.075), (0.35, 0.455, 0.56), 0.012  # m, where the things lie
APART = 0.06  # m, between the places of a tray


class Sort(Carrying):
    name = "sort"
    config = default_config()
    count = 2 * EACH
    drop = 0.05
    variants = tuple({"black": a, "white": b} for a, b in permutations(PLURALS, 2))

    @classmethod
    def instruct(cls, variant: Variant) -> str:
        black, white = PLURALS[variant["black"]], PLURALS[variant["white"]]
        return f"put the {black} into the black tray and the {white} into the white tray"

    @property
    def subjects(self) -> tuple[str, str]:
        """The thing that is next, and its tray."""
        return slot_name(self.next), self.tray(self.next)

    def tray(self, slot: int) -> str:
        """The tray for the thing in a slot; empty if the sentence does not speak of what it is."""
        category = library.KINDS[self.things[slot].kind].category
        return next((f"tray_{tray}" for tray in TRAYS if self.variant[tray] == category), "")

    def draw(self, rng: np.random.Generator) -> tuple[Thing, ...]:
        things = []
        for tray in TRAYS:
            seen = [k for k in library.SEEN if library.KINDS[k].category == self.variant[tray]]
            for kind in rng.choice(seen, EACH, replace=False):
                colours = [c for c in library.PALETTE if not library.held_out_pair(str(kind), c)]
                things.append(Thing(str(kind), str(rng.choice(colours))))
        return tuple(things)

    def build(self, spec: mujoco.MjSpec) -> None:
        super().build(spec)
        for name, rgb in zip(TRAYS, ((0.16, 0.16, 0.18), (0.93, 0.93, 0.95)), strict=True):
            tray = spec.worldbody.add_body(name=f"tray_{name}", mocap=True)
            x, y, h = TRAY
            objects.add_mark(tray, f"tray_{name}", "box", [x, y, 0.0005], rgb, z=0.0005)
            for i, (size, pos) in enumerate(
                [([x, RIM, h / 2], [0, y, h / 2]), ([x, RIM, h / 2], [0, -y, h / 2]),
                 ([RIM, y, h / 2], [x, 0, h / 2]), ([RIM, y, h / 2], [-x, 0, h / 2])]
            ):  # fmt: skip
                objects.add_geom(tray, f"tray_{name}_{i}", "box", size, rgb, pos=pos)

    def place(self, rng: np.random.Generator) -> None:
        cells = [(x, y) for x in COLUMNS for y in ROWS]
        for slot, cell in enumerate(rng.permutation(len(cells))):
            spot = np.array(cells[cell]) + rng.uniform(-JITTER, JITTER, 2)
            objects.lay(self, slot_name(slot), spot, 0.0, rng.uniform(-0.6, 0.6))
        side = ASIDE * (1 if rng.random() < 0.5 else -1)
        for name, y in zip(TRAYS, (side, -side), strict=True):
            objects.lay(self, f"tray_{name}", (0.455 + rng.uniform(-0.01, 0.01), y))

    def home(self, slot: int) -> NDArray[np.float64]:
        return self.position(self.tray(slot))[:2] + [APART * (slot % EACH - 1), 0.0]

    def arrived(self, slot: int) -> bool:
        if not self.tray(slot):
            return False
        offset = self.position(slot_name(slot)) - self.position(self.tray(slot))
        return bool((np.abs(offset[:2]) < TRAY[:2]).all() and offset[2] < 0.08)

    def keypoints(self) -> dict[str, NDArray[np.float32]]:
        return super().keypoints() | objects.points(self, *(f"tray_{name}" for name in TRAYS))

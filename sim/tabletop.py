"""Tasks among things of the library: which ones lie there, and how the sentence names them, follow from the seed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import mujoco
import numpy as np
from numpy.typing import NDArray

from sim import library, objects, skills
from sim.env import ArmEnv
from sim.sentences import SPLITS, Split
from sim.slots import Slots, Thing, add_slots, grasp_of, slot_name
from sim.task import ToolGoal
from vla_stack.errors import UserError

TWIN = 0.4  # share of scenes with another thing of the same kind
ALIKE = 0.4  # share of scenes with another thing of the same colour
PLAIN = 0.6  # share of things without a pattern
SMALL = 0.8  # scale of a small thing
TURN = 0.7  # rad, how far things are turned at most

Wish = tuple[int, str, int]  # slot of what is to be moved; relation; slot of what to, -1 for none


class Tabletop(ArmEnv):
    """A task among things of the library. What lies there is a function of the episode's world seed and variant.

    A subclass says what may be asked for (:meth:`wishes`), and how sentences say it (:meth:`ask`).

    Args:
        split: Which things and sentences an episode may have, one of :data:`sim.sentences.SPLITS`.
        others: As for :class:`~sim.env.ArmEnv`.
    """

    count: ClassVar[int] = 4  # things on the table
    area: ClassVar[tuple[tuple[float, float], tuple[float, float]]] = ((0.36, 0.57), (-0.19, 0.19))  # m, x and y
    gap: ClassVar[float] = 0.125  # m, between the middles of things
    variants = tuple({"object": kind} for kind in library.KINDS)
    splits: ClassVar[Mapping[str, Mapping[str, Any]]] = {split: {"split": split} for split in SPLITS[1:]}

    def __init__(self, *others: Any, split: Split = "seen", **named: Any) -> None:
        if split not in SPLITS:
            raise UserError(f"split={split!r} is unknown", f"choose one of {', '.join(SPLITS)}")
        super().__init__(*others, **named)
        self.split: Split = split
        self._slots = Slots(self.model, self.count)
        self.things: tuple[Thing, ...] = ()
        self.spots: NDArray[np.float64] = np.zeros((self.count, 2))
        self.turns: NDArray[np.float64] = np.zeros(self.count)
        self._wishes: list[Wish] = []
        self._asks: tuple[str, ...] = ()  # the sentence of each wish
        self._asked = 0  # another one while `achieved` looks

    # What a task defines besides those of ArmEnv ----------------------------------------------------------------------

    def wishes(self, rng: np.random.Generator) -> list[Wish]:
        """What may be asked for in this scene; the first is the episode's, the others are what would be wrong to do."""
        return [(slot, "", -1) for slot in range(self.count)]

    @abstractmethod
    def ask(self, rng: np.random.Generator, wish: Wish) -> str:
        """A sentence that asks for a wish in words of the split; unambiguous in this scene."""

    # ArmEnv -----------------------------------------------------------------------------------------------------------

    def draw_variant(self, rng: np.random.Generator) -> int:
        held_out = self.split == "unseen-objects"
        choice = [i for i, v in enumerate(self.variants) if library.KINDS[v["object"]].held_out == held_out]
        return choice[int(rng.integers(len(choice)))]

    def furnish(self, rng: np.random.Generator) -> None:
        self.spots, self.turns = self.lay_out(rng)
        self.things = self.draw(rng)
        self._slots.fill(self.things)
        self._wishes = self.wishes(rng)
        self._asks = tuple(self.ask(rng, wish) for wish in self._wishes)

    def lay_out(self, rng: np.random.Generator) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Where things lie [n, 2], metres, and how they are turned [n], radians."""
        return objects.spread(rng, self.count, *self.area, self.gap), rng.uniform(-TURN, TURN, self.count)

    def draw(self, rng: np.random.Generator) -> tuple[Thing, ...]:
        """What lies in the slots; the first is the variant's."""
        return draw_things(rng, self.variant["object"], self.count, self.split)

    def build(self, spec: mujoco.MjSpec) -> None:
        add_slots(spec, self.count)

    def place(self, rng: np.random.Generator) -> None:
        for i, (spot, turn) in enumerate(zip(self.spots, self.turns, strict=True)):
            objects.lay(self, slot_name(i), spot, 0.0, turn)

    def sentence(self) -> str:
        return self._asks[0]

    @property
    def task_variants(self) -> tuple[str, ...]:
        """Sentences that may be said in this scene; the first is the episode's. Before a reset, a variant's each."""
        return self._asks or super().task_variants

    def achieved(self, instruction: str) -> bool:
        self._asked = self._asks.index(instruction)
        try:
            return bool(self.progress()[-1])
        finally:
            self._asked = 0

    @property
    def wish(self) -> Wish:
        """What is asked for."""
        return self._wishes[self._asked]

    @property
    def slot(self) -> int:
        """Slot of the thing that is to be moved."""
        return self.wish[0]

    @property
    def target(self) -> str:
        """Body of the thing that is to be moved."""
        return slot_name(self.slot)

    @property
    def subjects(self) -> tuple[str, str]:
        return self.target, self.target

    @property
    def named(self) -> dict[str, tuple[str, str]]:
        """Kind and colour of what a sentence may name, by its body."""
        return {slot_name(i): (thing.kind, thing.colour) for i, thing in enumerate(self.things)}

    def keypoints(self) -> dict[str, NDArray[np.float32]]:
        return objects.points(self, *map(slot_name, range(self.count)))

    # Pieces of tasks --------------------------------------------------------------------------------------------------

    def grip(self, slot: int) -> ToolGoal:
        """Where the tool takes hold of the thing in a slot, see :func:`sim.slots.grasp_of`."""
        return grasp_of(self, slot_name(slot), self.things[slot])

    @property
    def reached(self) -> bool:
        """Whether the tool is where it takes hold of the thing."""
        return bool(np.linalg.norm(self.grip(self.slot).position - self.tool[:3]) < 0.02)

    @property
    def held(self) -> bool:
        """Whether both pads touch the thing."""
        return self.grasped(self.target)

    def rests(self, height: float) -> bool:
        """Whether the thing is at a height, metres, whichever way up, and let go."""
        return abs(skills.lowest(self, self.target) - height) < 0.012 and not self.touched(self.target)

    def take(self) -> ToolGoal:
        """Take hold of the thing, from above."""
        grip = self.grip(self.slot)
        return skills.grasp(self, self.target, grip.position, grip.yaw, opening=grip.gripper)

    def put(self, spot: NDArray[np.float64], height: float = 0.0) -> ToolGoal:
        """Carry the held thing to ``spot`` [2] on a surface at ``height``, metres, and let go."""
        return skills.put(self, self.target, np.array([*spot, height + 0.003]), self.tool[3])


def draw_things(rng: np.random.Generator, kind: str, n: int, split: Split) -> tuple[Thing, ...]:
    """``n`` things, no two of the same kind and colour; the first is of ``kind`` and the others are there to mislead.

    What is held out is on the table only as the first thing, and only in its split.
    """
    things = [draw_thing(rng, kind, split)]
    twin, alike = rng.random(2) < (TWIN, ALIKE)
    # A held-out kind has a name that was never learnt: its colour alone tells it.
    new = split == "unseen-objects"
    while len(things) < n:
        other = kind if len(things) == 1 and twin and not new else str(rng.choice(library.SEEN))
        thing = draw_thing(rng, other, "seen", things[0].colour if len(things) == 2 and alike and not new else None)
        if all((t.kind, t.colour) != (thing.kind, thing.colour) for t in things):
            if not new or thing.colour != things[0].colour:
                things.append(thing)
    return tuple(things)


def draw_thing(rng: np.random.Generator, kind: str, split: Split, colour: str | None = None) -> Thing:
    """A thing of a kind as the split may have it; of ``colour`` where it may have that."""
    held_out = split == "unseen-compositions"
    choice = [c for c in library.PALETTE if library.held_out_pair(kind, c) == held_out or split == "unseen-objects"]
    drawn = choice[int(rng.integers(len(choice)))]
    pattern = "plain" if rng.random() < PLAIN else str(rng.choice(library.PATTERNS[1:]))
    scale = SMALL if rng.random() < 0.3 else 1.0
    return Thing(kind, colour if colour in choice else drawn, pattern, scale)

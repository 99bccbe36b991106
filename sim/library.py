"""The library of things that lie on the table: what each is made of, what it is called, and where it is taken hold of.

A table to be read. Sizes are in millimetres, angles in degrees. A thing's frame is on the ground under its middle, z
up; whatever is long lies along x, so that fingers, which close along y, take it across.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import cos, radians, sin
from typing import Any

Colour = tuple[float, float, float]  # red, green, blue in [0, 1]

# Far apart from each other and from the table, at 64 px and under any light.
PALETTE: dict[str, Colour] = {
    "red": (0.85, 0.12, 0.12),
    "orange": (0.98, 0.50, 0.05),
    "yellow": (0.98, 0.90, 0.15),
    "green": (0.15, 0.60, 0.22),
    "turquoise": (0.20, 0.80, 0.78),
    "blue": (0.12, 0.28, 0.85),
    "purple": (0.50, 0.20, 0.65),
    "pink": (0.98, 0.55, 0.75),
    "white": (0.97, 0.97, 0.97),
    "black": (0.13, 0.13, 0.14),
}
PATTERNS = ("plain", "striped", "checked", "spotted")
RAISED = 0.7  # mm, above the ground: parts that need not bear weight, as each contact costs time
CATEGORIES = ("block", "kitchen thing", "tool", "food", "toy")


@dataclass(frozen=True)
class Part:
    """A geom of a thing.

    Attributes:
        shape: ``box``, ``cylinder``, ``capsule``, ``sphere`` or ``ellipsoid``.
        size: MuJoCo's half sizes, mm.
        at: Its centre in the thing's frame, mm.
        shade: Factor on the thing's colour, or a colour of its own.
        turn: Roll, pitch and yaw, degrees.
        solid: Whether it is felt; marks are only seen.
    """

    shape: str
    size: tuple[float, ...]
    at: tuple[float, float, float]
    shade: float | Colour = 1.0
    turn: tuple[float, float, float] = (0, 0, 0)
    solid: bool = True


@dataclass(frozen=True)
class Kind:
    """A kind of thing.

    Attributes:
        name: What sentences call it.
        category: One of :data:`CATEGORIES`.
        parts: What it is made of.
        grip: Where the tool's point goes, mm.
        width: Of what is between the fingers, mm.
        room: How much wider they come down, mm; the more, the less a wrong move tips it over.
        symmetry: Turning the grasp by this changes nothing, degrees.
        turn: Yaw of the grasp, degrees.
        mass: kg.
        other_names: Names that no training sentence has.
        held_out: Whether no training episode has it.
    """

    name: str
    category: str
    parts: tuple[Part, ...]
    grip: tuple[float, float, float]
    width: float
    symmetry: float = 180
    room: float = 60
    turn: float = 0
    mass: float = 0.06
    other_names: tuple[str, ...] = field(default=())
    held_out: bool = False


def box(x: float, y: float, z: float, at: tuple[float, float, float], shade: float | Colour = 1.0, **more: Any) -> Part:
    return Part("box", (x, y, z), at, shade, **more)


def tube(radius: float, half: float, at: tuple[float, float, float], shade: float | Colour = 1.0, **more: Any) -> Part:
    return Part("cylinder", (radius, half, 0), at, shade, **more)


def rod(radius: float, half: float, at: tuple[float, float, float], shade: float | Colour = 1.0, **more: Any) -> Part:
    """A capsule along x, unless it is turned."""
    return Part("capsule", (radius, half, 0), at, shade, **{"turn": (0, 90, 0)} | more)


def ball(radius: float, at: tuple[float, float, float], shade: float | Colour = 1.0, **more: Any) -> Part:
    return Part("sphere", (radius, 0, 0), at, shade, **more)


def egg(x: float, y: float, z: float, at: tuple[float, float, float], shade: float | Colour = 1.0, **more: Any) -> Part:
    return Part("ellipsoid", (x, y, z), at, shade, **more)


def foot(x: float, y: float, half: float = 3) -> Part:
    """What a round thing stands on, lest it rolls."""
    return box(x, y, half, (0, 0, half), 0.8)


def disc(radius: float, z: float, shade: float | Colour) -> Part:
    """A mark on top."""
    return tube(radius, 0.6, (0, 0, z), shade, solid=False)


def ring(sides: int, radius: float, part: tuple[float, float, float], z: float, lean: float = 0) -> tuple[Part, ...]:
    """Boxes in a circle: half sizes outwards, along and upwards; leaning outwards. It stands on two opposite ones."""
    turns = [360 * i / sides for i in range(sides)]
    spots = [(radius * cos(radians(t)), radius * sin(radians(t)), z + (t % 180 > 0) * RAISED) for t in turns]
    return tuple(box(*part, at, turn=(0, lean, t)) for t, at in zip(turns, spots, strict=True))


def hexagon(side: float, half: float) -> tuple[Part, ...]:
    """Three boxes across each other; half its sides and height."""
    across = side * 3**0.5
    return tuple(box(side, across, half, (0, 0, half + (a > 0) * RAISED), turn=(0, 0, a)) for a in (0, 60, 120))


WOOD, STEEL, LEAF, DARK, PALE, GOLD = (
    (0.60, 0.42, 0.26), (0.62, 0.65, 0.70), (0.2, 0.5, 0.16), (0.16, 0.15, 0.16), (0.95, 0.94, 0.9), (0.95, 0.72, 0.2)
)  # fmt: skip

_KINDS = (
    # Blocks ---------------------------------------------------------------------------------------------------------
    Kind("cube", "block", (box(20, 20, 20, (0, 0, 20)),), (0, 0, 20), 40, symmetry=90),
    Kind("brick", "block", (box(34, 17, 13, (0, 0, 13)),), (0, 0, 14), 34, other_names=("long block",)),
    Kind("peg", "block", (tube(13, 34, (0, 0, 34)), disc(8, 68, 0.6)), (0, 0, 46), 26, symmetry=10,
         other_names=("post",)),
    Kind("letter L", "block", (box(36, 11, 12, (0, 0, 12)), box(11, 17, 11.5, (25, 28, 12.5))), (-4, 0, 14), 22,
         symmetry=360, other_names=("L-shaped block",)),
    Kind("letter T", "block", (box(11, 36, 12, (26, 0, 12)), box(25, 11, 11.5, (-10, 0, 12.5))), (-4, 0, 14), 22,
         symmetry=360, other_names=("T-shaped block",)),
    Kind("cross", "block", (box(34, 11, 12, (0, 0, 12)), box(11, 34, 11.6, (0, 0, 12.4))), (24, 0, 14), 22,
         symmetry=90, other_names=("plus sign",)),
    Kind("ring", "block", ring(8, 32, (8, 14, 9), 9), (0, 32, 12), 16, symmetry=45, room=28,
         other_names=("hoop",)),
    Kind("stairs", "block", (box(34, 19, 9, (0, 0, 9)), box(23, 19, 9, (11, 0, 27), 0.85),
         box(12, 19, 9, (22, 0, 45), 0.7)), (8, 0, 22), 38, symmetry=360, other_names=("steps",)),
    Kind("die", "block", (box(17, 17, 17, (0, 0, 17)), *(tube(3.6, 0.7, (x, y, 34), PALE, solid=False)
         for x, y in ((-9, -9), (9, 9), (-9, 9), (9, -9), (0, 0)))), (0, 0, 17), 34, symmetry=90),
    Kind("tile", "block", (box(28, 8, 30, (0, 0, 30)),), (0, 0, 47), 16, other_names=("domino",)),
    Kind("arch", "block", (box(10, 16, 17, (-24, 0, 17)), box(10, 16, 17, (24, 0, 17)), box(34, 16, 9, (0, 0, 43))),
         (0, 0, 40), 32, held_out=True),
    # Kitchen --------------------------------------------------------------------------------------------------------
    Kind("mug", "kitchen thing", (tube(25, 29, (0, 0, 29)), disc(21, 58.2, 0.35), box(9, 4, 4, (31, 0, 44)),
         box(9, 4, 4, (31, 0, 16)), box(4, 4, 18, (40, 0, 30))), (0, 0, 36), 50, other_names=("coffee mug",)),
    Kind("cup", "kitchen thing", (tube(17, 10, (0, 0, 10)), tube(22, 10, (0, 0, 30)), tube(27, 10, (0, 0, 50)),
         disc(23, 60.2, 0.35)), (0, 0, 40), 50, symmetry=10, other_names=("beaker",)),
    Kind("bowl", "kitchen thing", (tube(20, 4, (0, 0, 4)), *ring(8, 29, (3.5, 13.5, 15), 19, lean=30)), (0, 31, 24), 14,
         symmetry=45, room=28, other_names=("basin",)),
    Kind("pan", "kitchen thing", (tube(29, 9, (0, 0, 9)), disc(25, 18.2, 0.4), box(23, 6, 5, (50, 0, 12), DARK)),
         (4, 0, 14), 58, symmetry=360, other_names=("skillet",)),
    Kind("spoon", "kitchen thing", (box(34, 6, 6, (6, 0, 6)), egg(19, 14, 7, (-40, 0, 7), 0.9)), (-4, 0, 12), 12,
         symmetry=360),
    Kind("fork", "kitchen thing", (box(32, 6, 6, (18, 0, 6)), box(5, 15, 4.5, (-18, 0, 6.5)), *(
         box(15, 3, 4, (-36, y, 7)) for y in (-12, 0, 12))), (4, 0, 12), 12, symmetry=360),
    Kind("knife", "kitchen thing", (box(23, 8, 7, (26, 0, 7)), box(32, 9, 3, (-28, 2, 7), STEEL)), (16, 0, 12), 16,
         symmetry=360),
    Kind("bottle", "kitchen thing", (tube(19, 24, (0, 0, 24)), egg(19, 19, 16, (0, 0, 47)),
         tube(8, 14, (0, 0, 68), 0.8), tube(10, 5, (0, 0, 83), PALE)), (0, 0, 42), 38, symmetry=10,
         other_names=("flask",)),
    Kind("can", "kitchen thing", (tube(21, 30, (0, 0, 30)), tube(21.6, 2, (0, 0, 5), STEEL, solid=False),
         tube(21.6, 2, (0, 0, 57), STEEL, solid=False), disc(17, 60.2, STEEL)), (0, 0, 40), 42, symmetry=10,
         other_names=("tin",)),
    Kind("jar", "kitchen thing", (tube(25, 18, (0, 0, 18)), tube(21, 7, (0, 0, 42), GOLD), disc(14, 49.2, PALE)),
         (0, 0, 26), 50, symmetry=10),
    Kind("carton", "kitchen thing", (box(17, 17, 27, (0, 0, 27)), box(12, 16.9, 12, (0, 0, 54), PALE, turn=(0, 45, 0)),
         box(3, 17, 6, (0, 0, 75), PALE)), (0, 0, 42), 34, symmetry=180, other_names=("milk box",)),
    Kind("goblet", "kitchen thing", (tube(23, 4, (0, 0, 4)), tube(6, 14, (0, 0, 20)), tube(17, 8, (0, 0, 40)),
         tube(22, 10, (0, 0, 56)), disc(18, 66.2, 0.35)), (0, 0, 50), 44, symmetry=10, held_out=True),
    Kind("teapot", "kitchen thing", (egg(25, 24, 24, (0, 0, 24)), foot(15, 15, 2), ball(6, (0, 0, 51), 0.7),
         rod(5, 12, (32, 0, 32), turn=(0, 55, 0)), box(8, 4, 4, (-28, 0, 38)), box(4, 4, 14, (-36, 0, 26)),
         disc(13, 46, 0.75)), (0, 0, 27), 48, symmetry=360, held_out=True),
    # Tools ----------------------------------------------------------------------------------------------------------
    Kind("hammer", "tool", (box(36, 7, 7, (14, 0, 8), WOOD), box(12, 30, 11, (-30, 0, 11))), (-8, 0, 12), 14,
         symmetry=360, mass=0.08),
    Kind("screwdriver", "tool", (box(26, 11, 10, (22, 0, 10)), box(30, 4, 4, (-32, 0, 10), STEEL),
         box(4, 7, 3, (-62, 0, 10), STEEL)), (14, 0, 13), 22, symmetry=360),
    Kind("wrench", "tool", (box(34, 8, 6, (8, 0, 6)), box(7, 17, 6, (-28, 0, 6)), box(11, 5, 5, (-43, 12, 7)),
         box(11, 5, 5, (-43, -12, 7))), (0, 0, 12), 16, symmetry=360, other_names=("spanner",)),
    Kind("nut", "tool", (*hexagon(13.5, 10), disc(13, 20.2, DARK)),
         (0, 0, 13), 47, turn=30, symmetry=60, other_names=("hexagon",)),
    Kind("brush", "tool", (box(30, 6, 6, (24, 0, 8)), box(8, 13, 8, (-12, 0, 8), STEEL),
         box(15, 12, 7, (-34, 0, 8), DARK)), (8, 0, 12), 12, symmetry=360, other_names=("paintbrush",)),
    Kind("key", "tool", (box(26, 5, 6, (20, 0, 6)), *ring(6, 17, (5, 11, 6), 6)[:6], box(4, 7, 5, (42, 9, 7)),
         box(4, 6, 5, (30, 8, 7))), (22, 0, 12), 10, symmetry=360),
    Kind("comb", "tool", (box(28, 8, 13, (0, 0, 47), 0.5), *(box(2.5, 8, 17, (x, 0, 17)) for x in (-25, 0, 25)),
         *(box(2.5, 7, 17, (x, 0, 18), solid=False) for x in (-13, 13))), (0, 0, 47), 16, held_out=True),
    Kind("torch", "tool", (box(30, 12, 11, (16, 0, 11)), tube(19, 9, (-22, 0, 19), 0.8, turn=(0, 90, 0)),
         tube(16, 1, (-31, 0, 19), GOLD, turn=(0, 90, 0), solid=False), box(6, 5, 2, (8, 0, 23), DARK)), (10, 0, 14),
         24, symmetry=360, held_out=True),
    Kind("bolt", "tool", (*hexagon(12, 8),
         tube(11, 22, (0, 0, 36), STEEL)), (0, 0, 38), 22, symmetry=10, held_out=True),
    # Food -----------------------------------------------------------------------------------------------------------
    Kind("apple", "food", (ball(25, (0, 0, 26)), foot(11, 11), tube(2.5, 6, (0, 0, 55), WOOD, solid=False),
         egg(10, 6, 2, (9, 0, 55), LEAF, solid=False)), (0, 0, 27), 50, symmetry=10),
    Kind("banana", "food", (box(17, 9, 10, (0, 0, 10)), rod(10, 16, (27, 10, 10.7), turn=(0, 90, 40)),
         rod(10, 16, (-27, 10, 10.7), turn=(0, 90, -40)), ball(6, (43, 24, 10), DARK, solid=False),
         ball(6, (-43, 24, 10), DARK, solid=False)), (0, 0, 14), 18, symmetry=360),
    Kind("pear", "food", (ball(23, (0, 0, 24)), foot(12, 12), egg(15, 15, 20, (0, 0, 48)),
         tube(2.5, 6, (0, 0, 71), WOOD, solid=False), egg(9, 6, 2, (8, 0, 71), LEAF, solid=False)), (0, 0, 30), 46,
         symmetry=10),
    Kind("lemon", "food", (egg(31, 21, 20, (0, 0, 21)), foot(14, 9), ball(7, (-30, 0, 21), solid=False),
         ball(6, (30, 0, 21), LEAF, solid=False)), (0, 0, 22), 42),
    Kind("carrot", "food", (box(20, 11, 10, (12, 0, 10)), box(15, 8, 8, (-20, 0, 9)), egg(20, 5, 5, (-36, 0, 9)),
         egg(15, 5, 4, (44, 6, 12), LEAF, turn=(0, 0, 25), solid=False),
         egg(15, 5, 4, (44, -6, 12), LEAF, turn=(0, 0, -25), solid=False)), (8, 0, 13), 22, symmetry=360),
    Kind("mushroom", "food", (tube(12, 16, (0, 0, 16), PALE), egg(27, 27, 17, (0, 0, 34)),
         ball(5, (14, 8, 45), PALE, solid=False), ball(5, (-12, 10, 46), PALE, solid=False),
         ball(5, (0, -15, 46), PALE, solid=False)), (0, 0, 34), 54, symmetry=10, other_names=("toadstool",)),
    Kind("cupcake", "food", (tube(17, 14, (0, 0, 14), WOOD), egg(25, 25, 16, (0, 0, 34)),
         egg(17, 17, 14, (0, 0, 48), 1.1), ball(6, (0, 0, 64), (0.85, 0.1, 0.15), solid=False)),
         (0, 0, 34), 50, symmetry=10, held_out=True),
    # Toys -----------------------------------------------------------------------------------------------------------
    Kind("duck", "toy", (egg(30, 21, 18, (0, 0, 19)), foot(16, 12), ball(14, (-18, 0, 45)),
         egg(8, 6, 3, (-34, 0, 44), (0.98, 0.45, 0.05), solid=False), ball(3, (-28, 8, 50), DARK, solid=False),
         ball(3, (-28, -8, 50), DARK, solid=False)), (4, 0, 20), 42, symmetry=360),
    Kind("car", "toy", (box(36, 17, 10, (0, 0, 16)), box(19, 15, 9, (3, 0, 35), PALE), foot(22, 12), *(
         tube(9, 4, (x, y, 9), DARK, turn=(90, 0, 0), solid=False) for x in (-22, 22) for y in (-17, 17))), (0, 0, 20),
         34, other_names=("automobile",)),
    Kind("house", "toy", (box(24, 18, 16, (0, 0, 16)), box(17, 19, 17, (0, 0, 32), 0.6, turn=(0, 45, 0)),
         box(5, 18.6, 8, (0, 0, 8), WOOD, solid=False)), (0, 0, 18), 38, other_names=("hut",)),
    Kind("tree", "toy", (tube(14, 10, (0, 0, 10), WOOD), tube(26, 7, (0, 0, 27)), tube(19, 7, (0, 0, 41)),
         tube(12, 8, (0, 0, 56)), ball(5, (0, 0, 66), GOLD, solid=False)), (0, 0, 38), 52, symmetry=10,
         other_names=("fir",)),
    Kind("snowman", "toy", (ball(22, (0, 0, 23)), foot(12, 12), ball(16, (0, 0, 54)),
         tube(17, 2, (0, 0, 67), DARK, solid=False), tube(10, 7, (0, 0, 74), DARK),
         egg(8, 3, 3, (-18, 0, 55), (0.98, 0.45, 0.05), solid=False)), (0, 0, 34), 44,
         symmetry=10),
    Kind("boat", "toy", (box(32, 16, 9, (0, 0, 9)), box(10, 12, 7, (36, 0, 11)), tube(2.5, 21, (4, 0, 37), WOOD),
         box(15, 1.5, 15, (-12, 0, 42), PALE, solid=False)), (-14, 0, 16), 32, symmetry=360, held_out=True),
)  # fmt: skip

KINDS: dict[str, Kind] = {kind.name: kind for kind in _KINDS}
SEEN = tuple(k.name for k in _KINDS if not k.held_out)
HELD_OUT = tuple(k.name for k in _KINDS if k.held_out)


def held_out_pair(kind: str, colour: str) -> bool:
    """Whether no training episode has this kind in this colour: one colour of each kind, not the same for all."""
    return (list(KINDS).index(kind) + 7 * list(PALETTE).index(colour)) % 10 == 0

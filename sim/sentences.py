"""The grammar of instructions: how a thing among others is named, and how a sentence asks for something to be done.

Each phrase says which things it may mean; only one that means a single thing is used, so no instruction is ambiguous in
its scene. Left and right are those of the front camera's picture. Sentences of the split ``seen`` never have what is
held out: verbs and word orders of :data:`ORDERS`, which only ``unseen-orders`` has, and relations and sizes of
:data:`WORDS` and other names of things, which only ``unseen-names`` has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sim import library
from sim.library import KINDS
from sim.slots import Thing

Split = Literal["seen", "unseen-orders", "unseen-names", "unseen-compositions", "unseen-objects"]
SPLITS: tuple[Split, ...] = ("seen", "unseen-orders", "unseen-names", "unseen-compositions", "unseen-objects")
CLEAR = 0.04  # m, by which a relation has to hold to be said, and may fail to hold to be meant all the same


@dataclass(frozen=True)
class Words:
    """What training sentences say, and what is held out for a split."""

    seen: tuple[str, ...]
    unseen: tuple[str, ...]

    def of(self, new: bool) -> tuple[str, ...]:
        return self.unseen if new else self.seen


# {a} is the thing that is moved, {b} where to, {r} the relation between them.
ORDERS: dict[str, Words] = {
    "lift": Words(
        ("pick up {a}", "pick {a} up", "grab {a}", "take {a}", "lift {a}", "please pick up {a}", "can you lift {a}",
         "grab {a} and lift it", "I want {a}", "lift {a} off the table", "please take {a}", "now grab {a}"),
        ("raise {a}", "fetch {a}", "collect {a} from the table", "would you hoist {a}", "{a}, hold it up",
         "get hold of {a}", "up with {a}", "{a} is what I need", "could you hand me {a}", "seize {a}"),
    ),
    "put": Words(
        ("put {a} {r} {b}", "place {a} {r} {b}", "{r} {b}, put {a}", "move {a} {r} {b}", "please put {a} {r} {b}",
         "take {a} and put it {r} {b}", "pick up {a} and place it {r} {b}", "can you put {a} {r} {b}",
         "I want {a} {r} {b}", "take {a}, it goes {r} {b}"),
        ("set {a} down {r} {b}", "{r} {b} goes {a}", "lay {a} {r} {b}", "{a} belongs {r} {b}", "{r} {b}, set {a}",
         "fetch {a} and leave it {r} {b}", "would you deposit {a} {r} {b}", "bring {a} over, {r} {b}",
         "let {a} end up {r} {b}", "position {a} {r} {b}"),
    ),
    "post": Words(
        ("post {a}", "put {a} in the slot", "drop {a} into the slot", "please post {a}", "slide {a} into the slot",
         "take {a} and post it", "can you put {a} into the slot", "the slot is for {a}"),
        ("mail {a}", "{a} goes through the slot", "feed {a} into the slot", "let {a} disappear in the slot",
         "insert {a}, into the slot", "would you post {a}", "into the slot with {a}", "stick {a} in the slot"),
    ),
    "group": Words(
        ("sort {a}", "put {a} where it belongs", "put {a} with its kind", "put {a} with the other {b}",
         "{a} goes with the other {b}", "please sort {a}", "add {a} to the {b}", "move {a} to the {b}"),
        ("tidy {a} away", "find the right place for {a}", "with the other {b}, set {a}", "{a} should lie by the {b}",
         "bring {a} to its like", "would you sort {a}", "file {a} under {b}", "group {a} with the {b}"),
    ),
    "press": Words(
        ("press {a}", "push {a}", "press {a} down", "hit {a}", "please press {a}", "can you push {a}", "touch {a}",
         "press {a} once", "go and press {a}", "push down {a}"),
        ("tap {a}", "strike {a}", "{a}, press it", "activate {a}", "give {a} a push", "would you tap {a}",
         "bump {a} with the gripper", "poke {a}"),
    ),
}  # fmt: skip
WORDS: dict[str, Words] = {
    "on": Words(("on", "onto"), ("on top of", "upon")),
    "in": Words(("in", "into"), ("inside", "within")),
    "left": Words(("left of", "to the left of"), ("on the left side of", "on the left hand of")),
    "right": Words(("right of", "to the right of"), ("on the right side of", "on the right hand of")),
    "near": Words(("next to", "near"), ("beside", "close to")),
    "leftmost": Words(("the leftmost {n}", "the {n} on the left"), ("the {n} farthest to the left",)),
    "rightmost": Words(("the rightmost {n}", "the {n} on the right"), ("the {n} farthest to the right",)),
    "upper": Words(("the upper shelf", "the high shelf"), ("the top shelf", "the board above")),
    "lower": Words(("the lower shelf", "the low shelf"), ("the bottom shelf", "the board below")),
    "large": Words(("the large {n}", "the larger {n}"), ("the big {n}", "the bigger {n}")),
    "small": Words(("the small {n}", "the smaller {n}"), ("the little {n}", "the tiny {n}")),
}


@dataclass(frozen=True)
class Phrase:
    """Words for a thing, and the things of the scene that they may mean.

    Attributes:
        words: E.g. ``the mug left of the bowl``.
        means: Indices of things.
        coloured: Whether the words name a colour and a kind.
        new: Whether the words are held out of training.
        relative: Whether they say where the thing is.
    """

    words: str
    means: frozenset[int]
    coloured: bool = False
    new: bool = False
    relative: bool = False


def phrases(things: Sequence[Thing], spots: NDArray, i: int, new: bool = False, taken: str = "") -> Iterator[Phrase]:
    """Phrases for thing ``i`` of a scene, ambiguous ones among them.

    Args:
        things: What lies there.
        spots: Where, [n, 2] metres.
        i: Index of the thing that is to be named.
        new: Whether with words that training sentences have not.
        taken: A colour that something else in the scene has, so that a colour alone does not name a thing.
    """
    me, everything = things[i], range(len(things))
    kind = frozenset(j for j in everything if things[j].kind == me.kind)
    hue = frozenset(j for j in everything if things[j].colour == me.colour)
    names = [me.kind] + (list(KINDS[me.kind].other_names) if new and me.kind in KINDS else [])
    for name in names:
        other = name != me.kind
        yield Phrase(f"the {name}", kind, new=other)
        yield Phrase(f"the {me.colour} {name}", kind & hue, True, other)
        if new:
            yield Phrase(f"the {name} that is {me.colour}", kind & hue, True, new)
    if me.colour != taken:
        yield Phrase(f"the {me.colour} {'object' if new else 'thing'}", hue, new=new)
    for relation, means in _superlatives(things, spots, i, kind):
        for form in WORDS[relation].of(new):
            yield Phrase(form.format(n=me.kind), means, new=new, relative="most" in relation)
    for relation, anchor, means in _relations(things, spots, i, kind):
        for word in WORDS[relation].of(new):
            yield Phrase(f"the {me.kind} {word} {anchor}", means, new=new, relative=True)


def _superlatives(
    things: Sequence[Thing], spots: NDArray, i: int, kind: frozenset[int]
) -> Iterator[tuple[str, frozenset[int]]]:
    """Superlatives that hold for thing ``i`` among those of its kind."""
    if len(kind) < 2:
        return
    y = {j: float(spots[j, 1]) for j in kind}
    for relation, sign in (("leftmost", 1.0), ("rightmost", -1.0)):
        best = min(sign * y[j] for j in kind)
        if sign * y[i] == best:
            yield relation, frozenset(j for j in kind if sign * y[j] < best + CLEAR)
    sizes = {j: things[j].scale for j in kind}
    if max(sizes.values()) > min(sizes.values()):
        relation = "large" if sizes[i] == max(sizes.values()) else "small"
        yield relation, frozenset(j for j in kind if sizes[j] == sizes[i])


def _relations(
    things: Sequence[Thing], spots: NDArray, i: int, kind: frozenset[int]
) -> Iterator[tuple[str, str, frozenset[int]]]:
    """Relations that hold between thing ``i`` and another one, which its own words tell from all others."""
    for k, anchor in enumerate(things):
        if k in kind or anchor.kind not in library.SEEN:
            continue
        alone = sum(t.kind == anchor.kind for t in things) == 1
        words = f"the {anchor.kind}" if alone else f"the {anchor.colour} {anchor.kind}"
        aside = spots[:, 1] - spots[k, 1]
        for relation, sign in (("left", -1.0), ("right", 1.0)):
            if sign * aside[i] > CLEAR:
                yield relation, words, frozenset(j for j in kind if sign * aside[j] > -CLEAR)
        far = np.linalg.norm(spots - spots[k], axis=1)
        if far[i] == min(far[j] for j in kind) and len(kind) > 1:
            yield "near", words, frozenset(j for j in kind if far[j] < far[i] + 2 * CLEAR)


def name_thing(
    rng: np.random.Generator,
    things: Sequence[Thing],
    spots: NDArray,
    i: int,
    split: Split,
    relative: float = 0.4,
    taken: str = "",
) -> Phrase:
    """A phrase of the split that means thing ``i`` and nothing else in the scene.

    A composition that was never named is named by its colour and kind; a kind that was never named by its colour too;
    ``unseen-names`` has words that training has not.
    ``relative`` is the share of phrases that say where the thing is, where one of them means it alone; ``taken`` is a
    colour as for :func:`phrases`.
    """
    named = split in ("unseen-compositions", "unseen-objects") and i == 0
    found = list(phrases(things, spots, i, split == "unseen-names", taken))
    clear = [p for p in found if p.means == {i}]
    placed = [p for p in clear if p.relative]
    pool = [p for p in clear if not p.relative]
    if named:
        pool = [p for p in pool if p.coloured and not p.new]
    elif placed and rng.random() < relative:
        pool = placed
    if split == "unseen-names":
        pool = [p for p in pool if p.new]
    return pool[int(rng.integers(len(pool)))]


def order(rng: np.random.Generator, action: str, split: Split, a: str, b: str = "", relation: str = "") -> str:
    """A sentence that asks for ``action`` (of :data:`ORDERS`) in words of the split.

    Args:
        rng: Chooses among the orders.
        action: What is to be done.
        split: Whose words; a sentence about a thing that training has not leaves nothing out that may be said.
        a: Words for the thing.
        b: Words for where to.
        relation: Of :data:`WORDS`, between them.
    """
    forms = ORDERS[action].of(split == "unseen-orders")
    if split == "unseen-objects" and b:
        forms = tuple(f for f in forms if "{b}" in f)
    form = forms[int(rng.integers(len(forms)))]
    words = WORDS[relation].of(split == "unseen-names") if relation else ("",)
    return form.format(a=a, b=b, r=words[int(rng.integers(len(words)))])

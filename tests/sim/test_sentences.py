"""The grammar: what is said means one thing of the scene, and what is held out is never said in training."""

import re
from itertools import product

import numpy as np
import pytest

from sim import library, objects
from sim.sentences import CLEAR, ORDERS, SPLITS, WORDS, name_thing, order, phrases
from sim.slots import Thing
from sim.tabletop import SMALL, Tabletop, draw_things

N = 4


def scene(seed, split):
    rng = np.random.default_rng(seed)
    spots = objects.spread(rng, N, *Tabletop.area, Tabletop.gap)
    held_out = split == "unseen-objects"
    kind = str(rng.choice([k for k in library.KINDS if library.KINDS[k].held_out == held_out]))
    return rng, draw_things(rng, kind, N, split), spots


def said(split, n=200):
    """Sentences that ask for the first thing of a scene, with the scene."""
    for seed in range(n):
        rng, things, spots = scene(seed, split)
        for action, relation in (("lift", ""), ("put", "on"), ("put", "in"), ("post", ""), ("group", "")):
            words = name_thing(rng, things, spots, 0, split)
            place = {"put": "the plate", "group": "tools"}.get(action, "")
            yield order(rng, action, split, words.words, place, relation), words, things, spots


def meant(words, things, spots):
    """The things that a seen phrase means, read anew."""
    colours, kinds = "|".join(library.PALETTE), "|".join(sorted(library.KINDS, key=len, reverse=True))
    noun = rf"(?P<size>large |larger |small |smaller )?(?P<colour>{colours})? ?(?P<kind>{kinds}|thing)"
    anchor = rf"(?P<acolour>{colours})? ?(?P<akind>{kinds})"
    to = "left of|to the left of|right of|to the right of|next to|near"
    match = re.fullmatch(
        rf"the (?P<most>leftmost |rightmost )?{noun}( on the (?P<end>left|right))?( (?P<to>{to}) the {anchor})?", words
    )
    assert match, words
    g = match.groupdict()
    y = spots[:, 1]
    left = [i for i, t in enumerate(things) if g["kind"] in (t.kind, "thing") and g["colour"] in (None, t.colour)]
    if g["size"]:
        left = [i for i in left if (things[i].scale == SMALL) == g["size"].startswith("small")]
    side = (g["most"] or g["end"] or "")[:4]
    if side:
        best = (min if side == "left" else max)(y[i] for i in left)
        left = [i for i in left if abs(y[i] - best) < CLEAR]
    if g["to"]:
        (by,) = (i for i, t in enumerate(things) if t.kind == g["akind"] and g["acolour"] in (None, t.colour))
        if "left" in g["to"]:
            left = [i for i in left if y[i] < y[by]]
        elif "right" in g["to"]:
            left = [i for i in left if y[i] > y[by]]
        else:
            left = [min(left, key=lambda i: np.hypot(*(spots[i] - spots[by])))]
    return left


def test_what_is_said_in_training_means_one_thing_read_anew():
    for _, words, things, spots in said("seen"):
        assert meant(words.words, things, spots) == [0], (words, things, spots)


@pytest.mark.parametrize("split", SPLITS)
def test_every_thing_of_a_scene_can_be_named(split):
    for seed in range(100):
        rng, things, spots = scene(seed, split)
        named = [name_thing(rng, things, spots, i, split) for i in range(N)]
        assert [p.means for p in named] == [{i} for i in range(N)]
        assert len({p.words for p in named}) == N


def test_an_ambiguous_phrase_says_so():
    things = (Thing("mug", "red"), Thing("mug", "blue"), Thing("can", "red"), Thing("die", "pink"))
    spots = np.array([[0.4, -0.15], [0.4, 0.15], [0.5, 0.0], [0.55, 0.17]])
    found = {p.words: p.means for p in phrases(things, spots, 0)}
    assert found["the mug"] == {0, 1} and found["the red thing"] == {0, 2} and found["the red mug"] == {0}
    assert found["the leftmost mug"] == {0} and found["the mug left of the can"] == {0}
    assert not any("right" in words for words in found if "die" not in words)
    spots[0, 1] = 0.13  # hardly left of the other mug
    assert {p.words: p.means for p in phrases(things, spots, 0)}["the leftmost mug"] == {0, 1}


def test_there_are_enough_sentences_and_no_held_out_one_is_among_those_of_training():
    texts = {split: {text for text, *_ in said(split)} for split in SPLITS}
    assert len(texts["seen"]) >= 200
    for split in SPLITS[1:]:
        assert len(texts[split]) >= 100 and not texts[split] & texts["seen"]
    for words in (*ORDERS.values(), *WORDS.values()):
        assert not set(words.seen) & set(words.unseen) and len(set(words.seen + words.unseen)) == len(
            words.seen + words.unseen
        )
    forms = sum(len(w.seen) for w in ORDERS.values()), sum(len(w.unseen) for w in ORDERS.values())
    assert forms[0] >= 40 and forms[1] >= 35


@pytest.mark.parametrize("split", SPLITS)
def test_a_colour_that_something_else_has_does_not_name_a_thing(split):
    for seed in range(300):
        rng, things, spots = scene(seed, split)
        words = name_thing(rng, things, spots, 0, split, 0.0, taken=things[0].colour).words
        assert words not in {f"the {things[0].colour} {noun}" for noun in ("thing", "object")}


def test_training_names_no_held_out_thing_pair_or_word():
    pairs = {f"{c} {k}" for k, c in product(library.KINDS, library.PALETTE) if library.held_out_pair(k, c)}
    others = {name for kind in library.KINDS.values() for name in kind.other_names}
    for text, words, things, _ in said("seen"):
        assert not any(re.search(rf"\b{kind}\b", text) for kind in library.HELD_OUT), text
        assert not any(re.search(rf"\b{pair}\b", text) for pair in pairs), text
        assert not any(re.search(rf"\b{name}\b", words.words) for name in others), text
        assert not any(t.kind in library.HELD_OUT or library.held_out_pair(t.kind, t.colour) for t in things)


@pytest.mark.parametrize("split", ["unseen-compositions", "unseen-objects"])
def test_what_is_held_out_is_what_is_asked_for_and_nothing_else(split):
    for _, words, things, _ in said(split, 60):
        first, *others = things
        assert words.words == f"the {first.colour} {first.kind}"
        assert all(t.kind in library.SEEN and not library.held_out_pair(t.kind, t.colour) for t in others)
        if split == "unseen-objects":
            assert first.kind in library.HELD_OUT and first.colour not in {t.colour for t in others}
        else:
            assert first.kind in library.SEEN and library.held_out_pair(first.kind, first.colour)


def test_new_words_are_new():
    orders = {f for w in ORDERS.values() for f in w.unseen}
    texts = [(text, words) for text, words, *_ in said("unseen-orders", 100)]
    assert not any(words.new for _, words in texts)
    heads = {f.split("{a}")[0] for f in orders}
    assert all(any(text.startswith(head) for head in heads) for text, _ in texts)
    assert all(words.new for _, words, *_ in said("unseen-names", 100))

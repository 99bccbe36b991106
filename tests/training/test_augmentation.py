"""What training changes in pictures: seeded, in bounds, each camera as its recipe says, and nothing else of a batch."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from training_fakes import KEY, tiny_parts

from vla_stack.errors import UserError
from vla_stack.methods.imitation import loss as imitation
from vla_stack.training import augmentation
from vla_stack.training.augmentation import (
    DARKEST,
    GAIN,
    GRAIN,
    NONE,
    PATCH,
    TINT,
    Augmentation,
    augmented,
    half_planes,
    patches,
    random_shift,
    relit,
    reworded,
)
from vla_stack.training.build import build
from vla_stack.training.log import Window
from vla_stack.training.loop import Rate, Trainer
from vla_stack.training.placement import Local
from vla_stack.training.recipe import Recipe

FRONT, WRIST = "observation.images.front", "observation.images.wrist"


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def batch(b: int = 8, size: int = 64) -> dict:
    pictures = torch.randint(0, 256, (b, size, size, 3), dtype=torch.uint8, generator=seeded(7))
    pad = torch.zeros(b, dtype=torch.bool)
    return {
        FRONT: pictures,
        WRIST: pictures.clone(),
        f"{WRIST}_is_pad": pad,
        "action": torch.rand(b, 4),
        "task": ["a"] * b,
    }


def test_pictures_change_by_the_generator_and_nothing_else_does() -> None:
    given = batch()
    before = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in given.items()}
    one, two, other = (augmented(given, Augmentation(), seeded(s)) for s in (1, 1, 2))
    for key in (FRONT, WRIST):
        assert one[key].dtype == torch.uint8 and one[key].shape == given[key].shape
        assert torch.equal(one[key], two[key]) and not torch.equal(one[key], other[key])
        assert torch.equal(given[key], before[key]) and not torch.equal(one[key], given[key])
    assert not torch.equal(one[FRONT], one[WRIST])  # a camera has light of its own
    assert all(one[key] is given[key] for key in (f"{WRIST}_is_pad", "action", "task"))


def test_words_that_mean_nothing_come_in_place_of_others_or_before_them_and_a_sentence_may_begin_elsewhere() -> None:
    text, kept, turned = "please take the yellow teapot right of the orange goblet", [], 0
    told = text.split()
    random.seed(3)
    for _ in range(2000):
        words = reworded(text, 0.3).split()
        new = [w for w in words if w not in told]
        assert len(new) <= 3 and all(len(w) <= 5 for w in new)
        known = [w for w in words if w not in new]
        starts = [n for n in range(len(told)) if in_order(known, told[n:] + told[:n])]
        assert starts  # what is left is in its order, but for what came first and comes last
        kept.append(len(known))
        turned += 0 not in starts
    lost = 10 - sum(kept) / len(kept)
    assert 1.05 < lost < 1.4  # at most three of 0.3 * 10 words are touched, half of them replaced
    assert 0.2 < turned / 2000 < 0.3  # of 0.3, a tenth begin with the word that they begin with
    assert reworded(text, 0.0) == text


def in_order(words: list[str], of: list[str]) -> bool:
    rest = iter(of)
    return all(w in rest for w in words)


def test_instructions_of_a_batch_change_alone() -> None:
    batch = {"task": ["pick up the red mug"] * 8, "state": torch.ones(8)}
    random.seed(0)
    first = augmented(batch, Augmentation(strength=0.0, words=0.3), torch.Generator())
    random.seed(0)
    again = augmented(batch, Augmentation(strength=0.0, words=0.3), torch.Generator())
    assert first["task"] == again["task"] and len(set(first["task"])) > 4
    assert batch["task"] == ["pick up the red mug"] * 8 and first["state"] is batch["state"]
    assert augmented(batch, NONE, torch.Generator())["task"] is batch["task"]


def test_strength_0_leaves_pictures_and_generator_alone() -> None:
    given, generator = batch(), seeded(3)
    state = generator.get_state()
    out = augmented(given, NONE, generator)
    assert out[FRONT] is given[FRONT] and torch.equal(generator.get_state(), state)


def test_a_camera_may_stand_still_and_shifts_grow_with_the_picture() -> None:
    """Of columns that differ from all others, each picture says by how much it was shifted."""
    for size, most in ((64, 3), (128, 6)):
        ramp = torch.arange(size, dtype=torch.uint8).repeat(400, size, 1)[..., None].repeat(1, 1, 1, 3)
        given, moved = {FRONT: ramp, WRIST: ramp}, {}
        for key, pictures in augmented(given, Augmentation(1e-9, 3e9, {"front": 0.0}), seeded()).items():
            moved[key] = set((pictures[:, 0, size // 2, 0].long() - size // 2).tolist())
        assert moved[FRONT] == {0} and moved[WRIST] == set(range(-most, most + 1))


def test_half_of_the_pictures_have_noise_and_each_its_own_strength(monkeypatch) -> None:
    for name in ("GAIN", "TINT", "SHADOWED", "PATCHED"):
        monkeypatch.setattr(augmentation, name, 0.0)
    grey = torch.full((600, 16, 16, 3), 128, dtype=torch.uint8)
    for strength in (1.0, 0.5):
        found = relit(grey, strength, seeded()).float()
        spread = found.flatten(1).std(1)
        noisy = spread > 0.6  # of 255; less is rounded away
        assert 0.4 < noisy.float().mean() < 0.55
        assert 0.9 < spread.max() / (strength * GRAIN) < 1.1 and 0.4 < spread[noisy].mean() / (strength * GRAIN) < 0.6
        assert abs(float(found.mean()) - 128) < 1  # cut off, not rounded: half a step darker
        channels = (found[noisy] - 128).flatten(0, 2).T
        assert torch.corrcoef(channels).triu(1).abs().max() < 0.02


def test_light_stays_in_its_range(monkeypatch) -> None:
    monkeypatch.setattr(augmentation, "GRAIN", 0.0)
    grey = torch.full((400, 16, 16, 3), 100, dtype=torch.uint8)
    lit = relit(grey, 1.0, seeded()).float()
    unpatched = lit.flatten(1, 2).amax(1)  # of each channel the brightest pixel: outside the shadow
    low, high = 100 * (1 - GAIN) * (1 - TINT), 100 * (1 + GAIN) * (1 + TINT)
    seen = torch.where(unpatched > high, high, unpatched)  # brighter are patches alone
    assert seen.min() >= low * DARKEST - 1 and 1.6 < seen.max() / seen.min()
    spread = [relit(grey, s, seeded()).float().std() for s in (0.1, 0.5, 1.0)]
    assert spread[0] < spread[1] < spread[2]
    white = relit(torch.full((50, 8, 8, 3), 255, dtype=torch.uint8), 1.0, seeded())
    assert (white[:, 0, 0].amax(1) == 255).any()  # clipped, not wrapped


def test_patches_are_rectangles_of_limited_size_inside_the_picture() -> None:
    masks = patches(torch.rand(4, 300, generator=seeded()), 64, 48)
    for mask in masks.numpy():
        rows, cols = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
        assert len(rows) and len(cols) and mask.sum() == len(rows) * len(cols)
        assert rows[-1] - rows[0] + 1 == len(rows) <= np.ceil(64 * PATCH)
        assert cols[-1] - cols[0] + 1 == len(cols) <= np.ceil(48 * PATCH)


def test_shadows_are_half_planes() -> None:
    masks = half_planes(torch.rand(2, 300, generator=seeded()), 12, 12)
    share = masks.float().mean((1, 2))
    assert share.min() < 0.1 and share.max() > 0.9
    for mask in masks:  # along any row and column light changes at most once
        assert (mask[:, 1:] != mask[:, :-1]).sum(1).max() <= 1 and (mask[1:] != mask[:-1]).sum(0).max() <= 1


def test_shift_moves_pixels_and_repeats_the_border() -> None:
    images = torch.arange(36, dtype=torch.uint8).view(1, 6, 6, 1).repeat(40, 1, 1, 3)
    offsets = set()
    for image in random_shift(images, 2, seeded()):
        rows = (torch.arange(6)[:, None] + torch.arange(-2, 3)).clamp(0, 5)
        candidates = {(i, j): images[0][rows[:, i]][:, rows[:, j]] for i in range(5) for j in range(5)}
        hits = [k for k, v in candidates.items() if torch.equal(image, v)]
        assert len(hits) == 1
        offsets.update(hits)
    assert len(offsets) > 10
    assert torch.equal(random_shift(images, 0, seeded()), images)


def test_training_changes_pictures_before_they_become_floats(recipe: Recipe, tmp_path: Path) -> None:
    parts, seen = tiny_parts(recipe), []
    parts.augmentation, preprocess = Augmentation(), parts.preprocess
    parts.preprocess = lambda raw: (seen.append(raw[KEY].clone()), preprocess(raw))[1]
    trainer = Trainer(recipe, parts, Local("cpu"), tmp_path)
    for step in (0, 0, 1):  # the same batch; its change is the step's own, so a resumed run repeats it
        trainer.step = step
        parts.loader.load_state_dict({"count": 0})
        trainer.update(iter(parts.loader), Window(), Rate(1))
    assert seen[0].dtype == torch.uint8 and torch.equal(seen[0], seen[1]) and not torch.equal(seen[0], seen[2])


def test_a_recipe_names_cameras_that_the_policy_has(recipe: Recipe, dataset: Path) -> None:
    change = Augmentation(camera_shift={"top": 0.0})
    recipe = replace(recipe, data=replace(recipe.data, root=(str(dataset),), augmentation=change))
    with pytest.raises(UserError, match="the policy has no camera 'top' -- it has front"):
        build(recipe, imitation.loss, torch.device("cpu"))

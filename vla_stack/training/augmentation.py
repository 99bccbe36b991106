"""Random light, shadow, patches, noise and shifts on training pictures, and words that mean nothing in instructions, so
that a policy holds up where they change.

One draw a picture, for whole batches of uint8 pictures on the policy's device. Inference sees all as it is.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from vla_stack.schema import PAST_AGE, camera_name, past_key
from vla_stack.training.recipe import Augmentation

GAIN = 0.5  # brightness changes by at most this factor up or down
TINT = 0.2  # and each colour, on its own, by this one
SHADOWED, DARKEST = 0.5, 0.35  # share of pictures with a half-plane in shadow, and the least light in it
PATCHED, PATCH = 0.4, 14 / 64  # share of pictures with an erased patch, and its largest side, of the picture's
NOISY, GRAIN = 0.5, 20.0  # share of pictures with noise on every channel, and its largest standard deviation of 255
REFERENCE = 64  # height of the picture that shifts are given for, pixels
CONSONANTS, VOWELS = "bcdfghjklmnpqrstvwxyz", "aeiouy"  # of words that mean nothing
SYLLABLES, MADE_UP = 2, 3  # at most so many of a word, and of such words in an instruction: it has to stay short


NONE = Augmentation(strength=0.0)


def is_picture(key: str, value: Any) -> bool:
    """Whether an entry of a batch is a camera's pictures as recorded, uint8 [b, h, w, 3], whatever the camera's key."""
    return key.startswith("observation.") and value.dtype == torch.uint8 and value.ndim == 4


def augmented(batch: Mapping[str, Any], change: Augmentation, generator: torch.Generator) -> dict[str, Any]:
    """A batch with changed pictures and instructions; the rest is the same, and so is the batch that was given.

    Args:
        batch: Tensors; pictures ``observation.images.<camera>`` uint8 [b, h, w, 3], and earlier ones of a history; the
            instructions ``task``.
        change: What to change.
        generator: Source of the pictures' changes; with strength 0 nothing is drawn. Words are drawn from ``random``,
            which a training seeds in each step: a GPU would be waited for.
    """
    out = dict(batch)
    if change.words and "task" in batch:
        out["task"] = [reworded(text, change.words) for text in batch["task"]]
    for key, images in batch.items():
        if not is_picture(key, images) or change.strength == 0:
            continue
        shift = change.camera_shift.get(camera_name(key), change.shift)
        pixels = change.strength * shift * images.shape[1] / REFERENCE
        out[key] = relit(random_shift(images, round(pixels), generator), change.strength, generator)
        if (past := batch.get(past_key(key))) is not None:
            known = batch[PAST_AGE] > 0
            out[past_key(key)] = past.clone()
            seen = random_shift(past[known], round(pixels), generator)
            out[past_key(key)][known] = relit(seen, change.strength, generator)
    return out


def reworded(instruction: str, share: float) -> str:
    """An instruction with words that mean nothing, as those of a person do that no training sentence has, and with
    parts in another order.

    A policy is to learn by them to go by the words that it knows, wherever they stand.

    Args:
        instruction: The instruction.
        share: Of its words: half of them are replaced, half get one before them. Of instructions: they begin with
            another of their words, and what stood before it comes last.
    """
    words, made, told = [], 0, instruction.split()
    if told and random.random() < share:
        first = random.randrange(len(told))
        told = told[first:] + told[:first]
    for word in told:
        draw = random.random() if made < MADE_UP else 1.0
        if draw < share:
            words.append(made_up())
            made += 1
        if draw >= share / 2:
            words.append(word)
    return " ".join(words)


def made_up() -> str:
    """A word that means nothing."""
    syllables = (random.choice(CONSONANTS) + random.choice(VOWELS) for _ in range(random.randint(1, SYLLABLES)))
    return "".join(syllables) + random.choice(("", *CONSONANTS))


def random_shift(images: UInt8[Tensor, "b h w 3"], pixels: int, generator: torch.Generator) -> UInt8[Tensor, "b h w 3"]:
    """Shift each image by a random whole number of pixels, at most ``pixels`` along each axis, repeating its border."""
    b, h, w, _ = images.shape
    shift = torch.randint(-pixels, pixels + 1, (2, b, 1), generator=generator, device=generator.device)
    rows, cols = shift.to(images.device)
    rows = (torch.arange(h, device=images.device) + rows).clamp(0, h - 1)
    cols = (torch.arange(w, device=images.device) + cols).clamp(0, w - 1)
    first = h * torch.arange(b, device=images.device)[:, None]
    pixel = (w * (first + rows))[:, :, None] + cols[:, None, :]
    return images.reshape(-1, 3).index_select(0, pixel.flatten()).view(images.shape)


def relit(images: UInt8[Tensor, "b h w 3"], strength: float, generator: torch.Generator) -> UInt8[Tensor, "b h w 3"]:
    """Another brightness and tint for each image; some get half a plane in shadow, an erased patch, noise."""
    b, h, w, _ = images.shape

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device=generator.device).to(images.device)

    def about_one(spread: float, *shape: int) -> Tensor:
        return 1.0 + strength * spread * (2.0 * uniform(*shape) - 1.0)

    # Masks multiply, as float32: on a CPU `torch.where` and mixed types are ten times slower.
    colour = about_one(GAIN, b, 1) * about_one(TINT, b, 3)
    depth = (uniform(b) < SHADOWED) * strength * (1.0 - DARKEST) * uniform(b)
    light = half_planes(uniform(2, b), h, w).float().mul_(-depth[:, None, None]).add_(1.0)
    patch = (patches(uniform(4, b), h, w) & (uniform(b) < PATCHED * strength)[:, None, None]).float()
    seen = images.float().mul_(colour[:, None, None]).mul_(light.mul_(1.0 - patch)[..., None])
    seen.addcmul_(patch[..., None], (255.0 * uniform(b, 3))[:, None, None])
    grain = (uniform(b) < NOISY) * (strength * GRAIN) * uniform(b)
    noise = torch.randn(images.shape, generator=generator, device=generator.device).to(images.device)
    seen.addcmul_(noise, grain[:, None, None, None])
    return seen.clamp_(0.0, 255.0).to(torch.uint8)


def half_planes(draws: Float[Tensor, "2 b"], h: int, w: int) -> Bool[Tensor, "b h w"]:
    """The pixels on one side of a line of random direction through a random point of the image."""
    angle = 2 * torch.pi * draws[0, :, None, None]
    y = torch.linspace(-0.5, 0.5, h, device=draws.device)[:, None]
    x = torch.linspace(-0.5, 0.5, w, device=draws.device)
    return angle.cos() * x + angle.sin() * y > draws[1, :, None, None] - 0.5


def patches(draws: Float[Tensor, "4 b"], h: int, w: int) -> Bool[Tensor, "b h w"]:
    """The pixels of a rectangle of random sides and place inside the image."""

    def span(length: int, side: Float[Tensor, " b"], place: Float[Tensor, " b"]) -> Bool[Tensor, "b n"]:
        size = (side * PATCH * length).ceil()
        first = (place * (length - size + 1)).floor()
        at = torch.arange(length, device=draws.device)
        return (at >= first[:, None]) & (at < (first + size)[:, None])

    return span(h, draws[0], draws[1])[:, :, None] & span(w, draws[2], draws[3])[:, None, :]

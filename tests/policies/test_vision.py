"""Random shifts."""

import torch

from vla_stack.policies.vision import random_shift


def test_shift_moves_pixels_and_repeats_the_border():
    images = torch.arange(6 * 6.0).view(1, 1, 6, 6).repeat(40, 3, 1, 1)
    shifted = random_shift(images, 2, torch.Generator().manual_seed(0))
    assert shifted.shape == images.shape and shifted.is_contiguous(memory_format=torch.channels_last)
    offsets = set()
    for image in shifted:
        rows = (torch.arange(6)[:, None] + torch.arange(-2, 3)).clamp(0, 5)
        candidates = {(i, j): images[0, 0][rows[:, i]][:, rows[:, j]] for i in range(5) for j in range(5)}
        hits = [k for k, v in candidates.items() if torch.equal(image, v.expand(3, 6, 6))]
        assert len(hits) == 1
        offsets.update(hits)
    assert len(offsets) > 10


def test_recorded_images_shift_like_the_same_images_as_float():
    images = torch.randint(0, 256, (5, 6, 7, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    shifted = random_shift(images, 2, torch.Generator().manual_seed(0))
    as_float = random_shift(images.permute(0, 3, 1, 2).float(), 2, torch.Generator().manual_seed(0))
    assert torch.equal(shifted.permute(0, 3, 1, 2).float(), as_float)


def test_no_shift_is_the_identity():
    images = torch.rand(2, 3, 5, 7)
    assert torch.equal(random_shift(images, 0, torch.Generator()), images)

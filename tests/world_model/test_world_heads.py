"""Judges and their calibration; the autoencoder's scale; limits of guards."""

from __future__ import annotations

import torch

from vla_stack.world_model.heads import Heads, HeadsConfig, balanced_threshold
from vla_stack.world_model.vae import Vae, VaeConfig, object_mask, ssim, to_planes


def test_a_judge_can_be_asked_frame_by_frame() -> None:
    torch.manual_seed(0)
    heads = Heads(HeadsConfig(width=8, judges=2), views=2, size=16, tasks=3, horizon=4)
    pictures = torch.randint(0, 255, (2, 5, 2, 16, 16, 3), dtype=torch.uint8)
    task = torch.tensor([0, 2])
    with torch.no_grad():
        whole, _ = heads.success(pictures, task)
        first, states = heads.success(pictures[:, :2], task)
        rest, _ = heads.success(pictures[:, 2:], task, states)
    torch.testing.assert_close(torch.cat([first, rest], 1), whole)
    assert not torch.equal(heads.success(pictures, task.flip(0))[0], whole)  # the instruction counts


def test_calibration_makes_an_overconfident_judge_doubt() -> None:
    heads = Heads(HeadsConfig(width=8, judges=1), views=1, size=16, tasks=1, horizon=4)
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(4000, generator=generator)
    labels = torch.rand(4000, generator=generator) < truth.sigmoid()
    heads.calibrate(5 * truth[None], labels)
    assert 4.0 < heads.temperature < 6.25
    assert balanced_threshold(torch.tensor([0.1, 0.2, 0.7, 0.8]), torch.tensor([False, False, True, True])) < 0.7
    assert balanced_threshold(torch.tensor([0.1, 0.9]), torch.tensor([True, True])) == 0.5


def test_latents_have_unit_variance_and_pictures_their_size() -> None:
    torch.manual_seed(0)
    vae = Vae(VaeConfig(channels=3, stem=2, widths=(8, 8)))
    pictures = torch.randint(0, 255, (20, 2, 16, 16, 3), dtype=torch.uint8)
    vae.standardise(pictures)
    with torch.no_grad():
        latents = vae.encode(pictures)
        assert vae.factor == 4 and latents.shape == (20, 2, 3, 4, 4)
        assert vae.pictures(latents).shape == pictures.shape
    torch.testing.assert_close(latents.mean((0, 1, 3, 4)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(latents.std((0, 1, 3, 4)), torch.ones(3), atol=1e-4, rtol=0)


def test_what_counts_as_an_object_and_as_similar() -> None:
    pictures = torch.full((1, 16, 16, 3), 128, dtype=torch.uint8)
    pictures[0, 2:4, 2:4] = torch.tensor([220, 50, 45], dtype=torch.uint8)
    assert object_mask(pictures).sum() == 4
    x = to_planes(pictures)
    assert abs(float(ssim(x, x)) - 1) < 1e-5 and ssim(x, -x) < 0.9

"""The world model of the package."""

from __future__ import annotations

import numpy as np
import torch

from vla_stack.world_model.model import SHIPPED, load
from vla_stack.world_model.quality import chunk_noise


@torch.no_grad()
def test_it_imagines_what_it_imagined_when_it_was_trained() -> None:
    """Directories of a world model load and imagine as ever, whatever becomes of the code."""
    model = load("shipped")
    assert sum(f.stat().st_size for f in (SHIPPED / "pick").iterdir()) < 25e6
    rng, size = np.random.default_rng(0), model.robot.cameras[0].height
    pictures = rng.integers(0, 256, (1, len(model.cameras), size, size, 3), np.uint8)
    pose = np.array([[0.45, 0.0, 0.2, 0.0, 1.0]], np.float32)
    ahead = torch.tensor([[[0.46, 0.01, 0.18, 0.1, 1.0], [0.47, 0.02, 0.16, 0.2, 0.0]]])
    latents, spread = model.chunk(model.begin(pictures, pose), ahead, chunk_noise(model, [3], 0))
    assert latents.shape == (1, 4, 2, 8, 8, 8)
    torch.testing.assert_close(latents[0, 3, :, 0, 4, 4], torch.tensor([-0.9350, -2.3096]), atol=2e-3, rtol=1e-2)
    torch.testing.assert_close(spread, torch.tensor([0.00500]), atol=1e-4, rtol=1e-2)
    assert [round(float(p), 2) for p in model.heads.probe(torch.from_numpy(pictures))[0, :3]] == [0.15, -0.01, 0.03]

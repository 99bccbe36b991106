"""The full-scale configuration on a tiny random UNet: views, tokens, frames, and a world model made of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from world_toys import ROBOT, TASKS

from vla_stack.errors import UserError
from vla_stack.world_model.dynamics import DynamicsConfig, Remembered, loss
from vla_stack.world_model.heads import HeadsConfig
from vla_stack.world_model.model import WorldConfig, WorldModel, load
from vla_stack.world_model.poses import PoseScale
from vla_stack.world_model.svd import SvdConfig, SvdDynamics, build, stack_views, unstack_views

UNET: dict[str, Any] = {
    "sample_size": 8,
    "down_block_types": ["CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"],
    "up_block_types": ["UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"],
    "block_out_channels": [32, 32],
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 24,
    "layers_per_block": 1,
    "cross_attention_dim": 16,
    "num_attention_heads": [2, 2],
}
VAE: dict[str, Any] = {
    "block_out_channels": [32, 32],
    "down_block_types": ["DownEncoderBlock2D"] * 2,
    "sample_size": 16,
}
SVD = SvdConfig(unet=UNET, vae=VAE, gradient_checkpointing=False)
CONFIG = DynamicsConfig(history=2, future=2, members=1, steps=2)


def random_dynamics(**options: Any) -> SvdDynamics:
    torch.manual_seed(0)
    dynamics = build(dataclasses.replace(CONFIG, **options), SVD, 2, 16)[1].eval()
    for name, p in dynamics.named_parameters():
        if "attn2" in name:  # poses come in here; a random network hardly listens
            torch.nn.init.normal_(p, std=0.5)
    return dynamics


def inputs() -> tuple[torch.Tensor, Remembered, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(1, 5, 2, 4, 8, 8, generator=generator)
    tokens = torch.randn(1, 5, 11, generator=generator)
    return latents[:, 2:], Remembered.clean(latents[:, :2], latents[:, 2]), tokens, torch.full((1,), 1.5)


def test_views_are_stacked_and_come_back_and_seams_stay_between_positions() -> None:
    latents = torch.randn(2, 3, 4, 8, 6)
    stacked = stack_views(latents)
    assert stacked.shape == (2, 4, 24, 6) and torch.equal(stacked[:, :, 8:16], latents[:, 1])
    assert torch.equal(unstack_views(stacked, 3), latents)
    assert [24 / 2**level % 1 for level in range(4)] == [0, 0, 0, 0]  # 192 px, f = 8, three halvings
    with pytest.raises(UserError, match="halvings do not divide"):
        build(CONFIG, SVD, 2, 18)


def test_a_single_token_is_a_bias_whatever_asks() -> None:
    dynamics = random_dynamics()
    attention = dynamics.unet.down_blocks[0].attentions[0].transformer_blocks[0].attn2
    context = torch.randn(3, 1, 16)
    with torch.no_grad():
        out = attention(torch.randn(3, 7, 32), encoder_hidden_states=context)
        again = attention(torch.randn(3, 7, 32), encoder_hidden_states=context)
    torch.testing.assert_close(out, again)
    torch.testing.assert_close(out, out[:, :1].expand_as(out))


def test_each_frame_hears_its_own_pose() -> None:
    x, remembered, tokens, sigma = inputs()
    moved = tokens.clone()
    moved[:, 4] += 1
    order = tokens[:, [0, 1, 2, 4, 3]]
    with torch.no_grad():
        per_frame, mean = random_dynamics(), random_dynamics(conditioning="mean")
        base, other = (per_frame.denoise(x, remembered, t, sigma) for t in (tokens, moved))
        assert int((base - other).abs().mean((0, 1, 3, 4, 5, 6)).argmax()) == 2  # frame 4 is the third denoised one
        assert not torch.allclose(base, per_frame.denoise(x, remembered, order, sigma), atol=1e-4)
        one, two = (mean.denoise(x, remembered, t, sigma) for t in (tokens, order))
        torch.testing.assert_close(one, two, atol=1e-4, rtol=1e-3)
        assert torch.equal(per_frame.denoise(x, remembered, tokens, sigma, 1.0), base)


def test_the_loss_reaches_poses_and_history_is_no_target() -> None:
    dynamics = random_dynamics()
    latents = torch.randn(1, 5, 2, 4, 8, 8)
    value, _ = loss(dynamics, latents, torch.randn(1, 5, 11), torch.ones(1, 3, dtype=torch.bool), torch.Generator())
    value.backward()
    assert dynamics.pose[0].weight.grad is not None and dynamics.pose[0].weight.grad.abs().sum() > 0


def test_a_world_model_of_it_is_saved_with_its_architecture(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = WorldConfig("", TASKS, PoseScale((0, 0, 0), (1, 1, 1)), dynamics=CONFIG, heads=HeadsConfig(8, 1), svd=SVD)
    model = WorldModel(config, ROBOT).eval()
    model.save(tmp_path)
    again = load(tmp_path)
    pictures = np.random.default_rng(0).integers(0, 255, (1, 2, 16, 16, 3), dtype=np.uint8)
    noise = torch.randn(1, *model.noise_shape())
    chunks = [
        m.chunk(m.begin(pictures, np.zeros((1, 5), np.float32)), torch.zeros(1, 2, 5), noise)[0] for m in (model, again)
    ]
    torch.testing.assert_close(*chunks)
    assert again.vae.pictures(chunks[1]).shape == (1, 2, 2, 16, 16, 3)
    with pytest.raises(UserError, match="holds no Stable Video Diffusion"):
        build(CONFIG, dataclasses.replace(SVD, pretrained=str(tmp_path)), 2, 16)

"""The full-scale configuration: Stable Video Diffusion's UNet and autoencoder, told one pose a frame.

As published for Ctrl-World: views are stacked along the height and processed as one picture; a frame's pose is its only
cross-attention token, so it acts as a bias that is the same at every position; history, current and future frames are
one clip. Loss, noise, memory and sampler are those of :mod:`vla_stack.world_model.dynamics`.
The pose goes in with a continuous rotation, where the published code has Euler angles that wrap; text is left out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from diffusers import AutoencoderKLTemporalDecoder, UNetSpatioTemporalConditionModel
from torch import Tensor, nn

from vla_stack.errors import UserError
from vla_stack.world_model.config import SvdConfig
from vla_stack.world_model.dynamics import Dynamics, DynamicsConfig, Remembered
from vla_stack.world_model.poses import TOKEN
from vla_stack.world_model.vae import to_planes


def stack_views(latents: Tensor) -> Tensor:
    """Latents [*, V, C, h, w] of views below each other: [*, C, V h, w]."""
    return latents.movedim(-4, -3).flatten(-3, -2)


def unstack_views(stacked: Tensor, views: int) -> Tensor:
    """Inverse of :func:`stack_views`."""
    return stacked.unflatten(-2, (views, -1)).movedim(-3, -4)


class SvdVae(nn.Module):
    """The image autoencoder of Stable Video Diffusion; latents are scaled to about unit variance."""

    def __init__(self, net: AutoencoderKLTemporalDecoder) -> None:
        super().__init__()
        self.net = net.requires_grad_(False)

    @property
    def factor(self) -> int:
        """How many pixels a latent position is wide."""
        return 2 ** (len(self.net.config.block_out_channels) - 1)

    @property
    def channels(self) -> int:
        return int(self.net.config.latent_channels)

    @property
    def scale(self) -> Tensor:
        """[1]."""
        return torch.tensor([float(self.net.config.scaling_factor)])

    @torch.no_grad()
    def encode(self, pictures: Tensor) -> Tensor:
        """Scaled mean latents [*, C, h, w] of uint8 pictures [*, H, W, 3]."""
        mean = self.net.encode(to_planes(pictures)).latent_dist.mean
        return (mean * self.net.config.scaling_factor).unflatten(0, pictures.shape[:-3])

    @torch.no_grad()
    def pictures(self, latents: Tensor) -> Tensor:
        """Pictures uint8 [*, H, W, 3] of scaled latents [*, C, h, w], each decoded by itself."""
        flat = latents.flatten(0, -4) / self.net.config.scaling_factor
        planes = self.net.decode(flat, num_frames=1).sample.clamp(-1, 1).unflatten(0, latents.shape[:-3])
        return ((planes + 1) * 127.5).round().to(torch.uint8).movedim(-3, -1)


class SvdDynamics(Dynamics):
    """Dynamics whose network is the pretrained UNet.

    Args:
        config: Frames, noise, sampler; its shape of a transformer is not used, and it has one member.
        svd: Micro-conditions.
        unet: The network.
        views: Cameras, V.
        size: Latent height and width of a view.
        scale: Of the latents; the anchor goes in without it, as in the published code.

    Raises:
        UserError: More than one member, or seams between views that would not fall between positions at every level.
    """

    def __init__(
        self,
        config: DynamicsConfig,
        svd: SvdConfig,
        unet: UNetSpatioTemporalConditionModel,
        views: int,
        size: int,
        scale: float,
    ) -> None:
        nn.Module.__init__(self)
        self.config, self.svd, self.views, self.size, self.scale = config, svd, views, size, scale
        self.channels = int(unet.config.out_channels)
        levels = len(unet.config.block_out_channels) - 1
        if config.members != 1 or config.conditioning in ("flat", "none"):
            raise UserError("svd has one member and conditioning per_frame or mean", "set dynamics.members=1")
        if size % 2**levels:
            raise UserError(f"views are {size} latent positions high, which {levels} halvings do not divide")
        self.unet = unet
        if svd.gradient_checkpointing:
            unet.enable_gradient_checkpointing()
        width = int(unet.config.cross_attention_dim)
        self.pose = nn.Sequential(
            nn.Linear(TOKEN, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width)
        )
        self._context: Tensor | None = None
        # diffusers repeats one context over all frames; each block is given a frame's own instead.
        for block in (*unet.down_blocks, unet.mid_block, *unet.up_blocks):
            if getattr(block, "has_cross_attention", False):
                block.register_forward_pre_hook(self._tell, with_kwargs=True)

    def forward(self, x: Tensor, remembered: Remembered, tokens: Tensor, c_noise: Tensor, told: Tensor) -> Tensor:
        """See :meth:`vla_stack.world_model.dynamics.Dynamics.forward`; noise levels of history are not told."""
        frames = stack_views(torch.cat([remembered.history, x], 1))
        anchor = stack_views(remembered.anchor / self.scale)[:, None].expand(-1, frames.shape[1], -1, -1, -1)
        poses = self.pose(tokens)
        if self.config.conditioning == "mean":
            poses = poses.mean(1, keepdim=True).expand_as(poses)
        self._context = (poses * told[:, None, None]).flatten(0, 1)[:, None]
        micro = torch.tensor([self.svd.fps - 1, self.svd.motion, self.svd.augmentation], device=x.device, dtype=x.dtype)
        out = self.unet(
            torch.cat([frames, anchor], 2),
            c_noise,
            poses.new_zeros(len(x), 1, poses.shape[-1]),
            micro.expand(len(x), -1),
        ).sample
        return unstack_views(out, self.views)[:, None]

    def _tell(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, kwargs | {"encoder_hidden_states": self._context}


def build(config: DynamicsConfig, svd: SvdConfig, views: int, pixels: int) -> tuple[SvdVae, SvdDynamics, SvdConfig]:
    """Autoencoder, dynamics and the configuration from which they can be built again without ``pretrained``.

    Args:
        config: Frames, noise, sampler.
        svd: Weights or architecture.
        views: Cameras.
        pixels: Height and width of a picture.

    Raises:
        UserError: ``pretrained`` holds no such model.
    """
    if svd.pretrained:
        try:
            unet = UNetSpatioTemporalConditionModel.from_pretrained(
                svd.pretrained, subfolder="unet", use_safetensors=True
            )
            vae = AutoencoderKLTemporalDecoder.from_pretrained(svd.pretrained, subfolder="vae", use_safetensors=True)
        except (OSError, ValueError) as e:
            raise UserError(
                f"'{svd.pretrained}' holds no Stable Video Diffusion ({str(e).splitlines()[0]})",
                "give a directory or hub id with unet/ and vae/ as safetensors",
            ) from None
    else:
        unet, vae = UNetSpatioTemporalConditionModel(**svd.unet), AutoencoderKLTemporalDecoder(**svd.vae)
    if int(unet.config.in_channels) != 2 * int(unet.config.out_channels):
        raise UserError("the UNet has no room for the anchor", "it takes twice as many channels as it gives")
    coder = SvdVae(vae)
    own = replace(svd, pretrained="", unet=_arguments(unet), vae=_arguments(vae))
    dynamics = SvdDynamics(config, svd, unet, views, pixels // coder.factor, float(vae.config.scaling_factor))
    return coder, dynamics, own


def _arguments(module: Any) -> dict[str, Any]:
    """What a diffusers class was built with, as JSON."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in module.config.items() if not k.startswith("_")}

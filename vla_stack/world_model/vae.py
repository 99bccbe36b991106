"""A small image autoencoder: pictures [3, S, S] to latents [C, S/f, S/f] frozen once it is trained."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_stack.world_model.config import VaeConfig

SATURATED = 0.25  # largest minus smallest colour, in [0, 1], from which on a pixel counts as of an object


class ResBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        nn.init.zeros_(self.conv2.weight)  # begins as the identity, and needs no normalisation

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(F.silu(self.conv1(F.silu(x))))


class Vae(nn.Module):
    """Encoder, decoder, and the scale of each latent channel.

    Latents that leave and enter this class have zero mean and unit variance in each channel over the training data
    (``shift`` and ``scale`` [C], set by :meth:`standardise`).
    """

    def __init__(self, config: VaeConfig) -> None:
        super().__init__()
        self.config = config
        w, c, s = config.widths, config.channels, config.stem
        down: list[nn.Module] = [nn.PixelUnshuffle(s), nn.Conv2d(3 * s * s, w[0], 3, padding=1), ResBlock(w[0])]
        for a, b in zip(w, w[1:], strict=False):
            down += [nn.Conv2d(a, b, 4, stride=2, padding=1), ResBlock(b)]
        down += [nn.SiLU(), nn.Conv2d(w[-1], 2 * c, 1)]
        up: list[nn.Module] = [nn.Conv2d(c, w[-1], 3, padding=1), ResBlock(w[-1])]
        for a, b in zip(w[::-1], w[-2::-1], strict=False):
            up += [nn.Conv2d(a, 4 * b, 3, padding=1), nn.PixelShuffle(2), ResBlock(b)]
        up += [nn.SiLU(), nn.Conv2d(w[0], 3 * s * s, 3, padding=1), nn.PixelShuffle(s)]
        self.encoder, self.decoder = nn.Sequential(*down), nn.Sequential(*up)
        self.register_buffer("shift", torch.zeros(c))
        self.register_buffer("scale", torch.ones(c))

    @property
    def factor(self) -> int:
        """How many pixels a latent position is wide."""
        return self.config.stem * 2 ** (len(self.config.widths) - 1)

    def encode(self, pictures: Tensor) -> Tensor:
        """Standardised mean latents [*, C, h, w] of uint8 pictures [*, H, W, 3]."""
        mean, _ = self._posterior(to_planes(pictures))
        z = (mean - self._column(self.shift)) / self._column(self.scale)
        return z.unflatten(0, pictures.shape[:-3])

    def decode(self, latents: Tensor) -> Tensor:
        """Pictures float [*, 3, H, W] in [-1, 1], not clipped, of standardised latents [*, C, h, w]."""
        lead = latents.shape[:-3]
        z = latents.flatten(0, -4) * self._column(self.scale) + self._column(self.shift)
        return self.decoder(z).unflatten(0, lead)

    def pictures(self, latents: Tensor) -> Tensor:
        """:meth:`decode` as uint8 [*, H, W, 3]."""
        planes = self.decode(latents).clamp(-1, 1)
        return ((planes + 1) * 127.5).round().to(torch.uint8).movedim(-3, -1)

    def loss(self, pictures: Tensor, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        """L1 + SSIM + KL of uint8 pictures [B, H, W, 3] from a sampled posterior; before :meth:`standardise`."""
        config, x = self.config, to_planes(pictures)
        mean, logvar = self._posterior(x)
        noise = torch.randn(mean.shape, generator=generator, device=mean.device)
        y = self.decoder(mean + (0.5 * logvar).exp() * noise)
        mask = object_mask(pictures).unsqueeze(1)
        l1 = ((y - x).abs() * (1 + (config.object_weight - 1) * mask)).mean()
        similarity = ssim(x, y, stride=3)  # every third window costs a ninth
        kl = 0.5 * (mean**2 + logvar.exp() - 1 - logvar).mean()
        mse = ((y.clamp(-1, 1) - x) ** 2).detach()
        crop = (mse * mask).sum() / (3 * mask.sum()).clamp(min=1)
        metrics = {"l1": l1, "ssim": similarity, "kl": kl, "psnr": psnr(mse.mean()), "psnr_object": psnr(crop)}
        return l1 + config.ssim * (1 - similarity) + config.kl * kl, metrics

    @torch.no_grad()
    def standardise(self, pictures: Tensor) -> None:
        """Set ``shift`` and ``scale`` so that the latents of these pictures have unit variance in each channel."""
        mean, _ = self._posterior(to_planes(pictures))
        self.shift.copy_(mean.mean((0, 2, 3)))
        self.scale.copy_(mean.std((0, 2, 3)).clamp(min=1e-4))

    def _posterior(self, planes: Tensor) -> tuple[Tensor, Tensor]:
        mean, logvar = self.encoder(planes).chunk(2, 1)
        return mean, logvar.clamp(-12, 6)

    @staticmethod
    def _column(values: Tensor) -> Tensor:
        return values[:, None, None]


def to_planes(pictures: Tensor) -> Tensor:
    """uint8 [*, H, W, 3] as float [N, 3, H, W] in [-1, 1]."""
    return pictures.flatten(0, -4).movedim(-1, -3).float().div(127.5).sub(1)


def object_mask(pictures: Tensor) -> Tensor:
    """Pixels of saturated colour, float [*, H, W] 0 or 1, of uint8 [*, H, W, 3]: things stand out by colour."""
    spread = pictures.amax(-1).float() - pictures.amin(-1).float()
    return (spread > 255 * SATURATED).float()


def psnr(mse: Tensor) -> Tensor:
    """Peak signal-to-noise ratio in dB of a mean square error of values in [-1, 1]."""
    return 10 * torch.log10(4 / mse.clamp(min=1e-10))


def ssim(x: Tensor, y: Tensor, window: int = 7, stride: int = 1) -> Tensor:
    """Mean structural similarity (Wang et al. 2004) of [N, 3, H, W] in [-1, 1], with a uniform window."""

    def local(v: Tensor) -> Tensor:
        return F.avg_pool2d(v, window, stride)

    mx, my = local(x), local(y)
    vx, vy, cov = local(x * x) - mx**2, local(y * y) - my**2, local(x * y) - mx * my
    c1, c2 = (0.01 * 2) ** 2, (0.03 * 2) ** 2
    return (((2 * mx * my + c1) * (2 * cov + c2)) / ((mx**2 + my**2 + c1) * (vx + vy + c2))).mean()

"""Diffusion of Karras et al. 2022 (EDM, arXiv:2206.00364) at sigma_data = 1: scaling, loss weight, levels, sampler.

x = z + sigma * eps is noised data; a network F sees c_in * x and c_noise, and D(x) = c_skip * x + c_out * F estimates
z.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Denoise = Callable[[Tensor, Tensor], Tensor]  # (x, sigma [B]) -> estimate of z


@dataclass(frozen=True)
class Scaling:
    """The four coefficients for noise levels of any shape (EDM table 1)."""

    c_skip: Tensor
    c_out: Tensor
    c_in: Tensor
    c_noise: Tensor


def scaling(sigma: Tensor) -> Scaling:
    """Coefficients at ``sigma``; c_out is negative, as in v-prediction."""
    root = (sigma**2 + 1).sqrt()
    return Scaling(1 / (sigma**2 + 1), -sigma / root, 1 / root, sigma.log() / 4)


def weight(sigma: Tensor) -> Tensor:
    """Loss weight of the error of D: (sigma^2 + 1) / sigma^2 = 1 / c_out^2, so that F is weighted evenly."""
    return (sigma**2 + 1) / sigma**2


def draw_sigma(n: int, mean: float, std: float, generator: torch.Generator, device: torch.device) -> Tensor:
    """Noise levels [n], one a clip: ln(sigma) ~ N(mean, std^2)."""
    return (mean + std * torch.randn(n, generator=generator, device=device)).exp()


def schedule(steps: int, sigma_max: float, sigma_min: float, rho: float = 7.0) -> list[float]:
    """``steps`` falling noise levels and a final 0 (EDM eq. 5)."""
    if steps == 1:
        return [sigma_max, 0.0]
    high, low = sigma_max ** (1 / rho), sigma_min ** (1 / rho)
    return [(high + i / (steps - 1) * (low - high)) ** rho for i in range(steps)] + [0.0]


@torch.no_grad()
def sample(denoise: Denoise, noise: Tensor, sigmas: list[float]) -> Tensor:
    """Euler's method from ``noise`` (unit variance, batch first) along ``sigmas``, which end in 0."""
    x = noise * sigmas[0]
    for sigma, following in zip(sigmas, sigmas[1:], strict=False):
        clean = denoise(x, torch.full((len(x),), sigma, device=x.device, dtype=x.dtype))
        x = x + (x - clean) / sigma * (following - sigma)
    return x


def guidance_scales(frames: int, guidance: float, device: torch.device | None = None) -> Tensor:
    """Scale of classifier-free guidance for each frame, [frames]: 1 at the current frame, rising to ``guidance``."""
    return torch.linspace(1.0, guidance, frames, device=device)


def guided(conditional: Tensor, unconditional: Tensor, scales: Tensor) -> Tensor:
    """u + g (c - u) for each frame; dim 1 of both is the frame. Scale 1 gives ``conditional`` bit for bit."""
    scales = scales.to(conditional.dtype).reshape(1, -1, *[1] * (conditional.ndim - 2))
    return torch.where(scales == 1, conditional, unconditional + scales * (conditional - unconditional))

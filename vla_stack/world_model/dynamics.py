"""The world model: a diffusion transformer over all views of history, present and future, one pose a frame.

Frames are ordered history (K, oldest first), current, future (H). The current frame is the first of H + 1 *denoised*
frames, and its clean latent is concatenated to every frame as an anchor (Ctrl-World, section 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_stack.world_model import edm
from vla_stack.world_model.config import DynamicsConfig
from vla_stack.world_model.poses import Waves
from vla_stack.world_model.sight import PLANES, TOOL, Sight

DRAWN = 48  # features of a position, of what it should show of the tool
GUESSED = 0.5  # noise level from which on more of a frame is guessed than seen


class Block(nn.Module):
    """Attention over all frames and views at once, then an MLP; both scaled by the frame's condition."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.modulate = nn.Linear(width, 6 * width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
        nn.init.zeros_(self.modulate.weight)  # "AdaLN-zero": a block begins as the identity (Peebles & Xie 2023)
        nn.init.zeros_(self.modulate.bias)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """Tokens [B, F, N, D] of frames with conditions [B, F, D]."""
        shift, scale, gate = self.modulate(F.silu(condition)).unflatten(-1, (3, 2, 1, -1)).unbind(2)
        x = x + gate[:, :, 0] * self._attend(_modulated(x, shift[:, :, 0], scale[:, :, 0]))
        return x + gate[:, :, 1] * self.mlp(_modulated(x, shift[:, :, 1], scale[:, :, 1]))

    def _attend(self, x: Tensor) -> Tensor:
        """Attention among all F * N tokens of [B, F, N, D]."""
        q, k, v = self.qkv(x.flatten(1, 2)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # [B, A, L, d]
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)).view(x.shape)


def _modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift


@dataclass(frozen=True)
class Remembered:
    """What a chunk starts from.

    Attributes:
        history: Latents [B, K, V, C, h, w], oldest first, possibly noised.
        anchor: Latents [B, V, C, h, w] of the current frame, possibly noised.
        history_level: Noise on each remembered frame, [B, K].
        anchor_level: Noise on the anchor, [B].
        sight: What cameras tell that are calibrated.
    """

    history: Tensor
    anchor: Tensor
    history_level: Tensor
    anchor_level: Tensor
    sight: Sight | None = None

    @classmethod
    def clean(cls, history: Tensor, anchor: Tensor, sight: Sight | None = None) -> Remembered:
        """Without noise, as at sampling time."""
        return cls(history, anchor, history.new_zeros(history.shape[:2]), anchor.new_zeros(len(anchor)), sight)


class Dynamics(nn.Module):
    """Network and its preconditioning.

    Args:
        config: Shape.
        views: Cameras, V.
        channels: Latent channels, C.
        size: Latent height and width.
        moving: Of calibrated cameras, those on the tool, by their place among the views; None without calibration.
        factor: Pixels of a picture to a latent position, even.
    """

    def __init__(
        self,
        config: DynamicsConfig,
        views: int,
        channels: int,
        size: int,
        moving: Sequence[int] | None = None,
        factor: int = 8,
    ) -> None:
        super().__init__()
        self.config, self.views, self.channels, self.size = config, views, channels, size
        d, p, n = config.width, config.patch, size // config.patch
        self.embed = nn.Linear(2 * channels * p * p, d)
        self.view = nn.Parameter(torch.randn(views, 1, 1, d) * 0.02)
        self.row = nn.Parameter(torch.randn(n, 1, d) * 0.02)
        self.column = nn.Parameter(torch.randn(n, d) * 0.02)
        self.frame = nn.Parameter(torch.randn(config.frames, d) * 0.02)
        self.noise = nn.Sequential(nn.Linear(16, d), nn.SiLU(), nn.Linear(d, d))
        self.level = nn.Linear(2, d)
        self.waves = Waves(config.history)
        inputs = self.waves.size * (config.frames if config.conditioning == "flat" else 1)
        # Poses reach a frame twice: as its condition, and as what they alone say about each position.
        self.render = nn.Linear(inputs, views * n * n * d)
        nn.init.normal_(self.render.weight, std=0.02)
        nn.init.zeros_(self.render.bias)
        self.pose = nn.Sequential(nn.Linear(inputs, d), nn.SiLU(), nn.Linear(d, d), nn.SiLU(), nn.Linear(d, d))
        self.blocks = nn.ModuleList(Block(d, config.heads) for _ in range(config.blocks))
        self.modulate = nn.Linear(d, 2 * d)
        self.moving, kept = list(moving or ()), config.history + 1
        self.calibrated = moving is not None
        if self.calibrated:  # the tool, drawn where it is
            self.draw = nn.Sequential(
                nn.Linear(TOOL + views, 128),
                nn.SiLU(),
                nn.Linear(128, 128),
                nn.SiLU(),
                nn.Linear(128, DRAWN),
                nn.SiLU(),
            )
            self.outline, self.drawn = nn.Linear(DRAWN * p * p, d), nn.Linear(DRAWN, channels, bias=False)
            kept += 1
        if self.moving:  # pictures seen from elsewhere, as latents
            sources = (1 + (config.history > 0)) * views
            step = factor // 2  # as it is seen at half the resolution
            self.glance = nn.Sequential(nn.Conv2d(PLANES, 32, step, stride=step), nn.SiLU(), nn.Conv2d(32, channels, 1))
            self.notice = nn.Linear(sources * channels * p * p, d)
            kept += sources
        self.project = nn.Linear(d, (config.members * channels + kept) * p * p)
        # Past the blocks, which are narrower than a patch of all inputs, what does not move is copied at full
        # resolution: by position from remembered frames and anchor, and channels' shares of noised frame and anchor.
        self.skip = nn.Linear(d, 2 * channels)
        for layer in (self.project, self.skip):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor, remembered: Remembered, tokens: Tensor, c_noise: Tensor, told: Tensor) -> Tensor:
        """The network F of all members on *all* frames; those of history mean nothing.

        Args:
            x: Scaled noised latents [B, H + 1, V, C, h, w].
            remembered: Where the chunk starts.
            tokens: Pose tokens [B, F, 11].
            c_noise: [B].
            told: bool [B], whether the poses are told.

        Returns:
            [B, members, F, V, C, h, w].
        """
        frames = torch.cat([remembered.history, x], 1)
        anchor = remembered.anchor[:, None].expand(-1, self.config.frames, *[-1] * 4)
        h = self.embed(self._patches(torch.cat([frames, anchor], 3)))
        h = h + (self.view + self.row + self.column).flatten(0, 2)
        condition = self.frame + self.noise(_waves(c_noise))[:, None] + self._levels(remembered)
        if (poses := self._poses(tokens)) is not None:
            condition = condition + self.pose(poses) * told[:, None, None]
            h = h + (self.render(poses) * told[:, None, None]).unflatten(-1, h.shape[2:])
        drawn, looked = self._drawing(remembered, told), self._glances(remembered, told)
        if drawn is not None:
            h = h + self.outline(self._patches(drawn))
        if looked is not None:
            h = h + self.notice(self._patches(looked.flatten(3, 4)))
        for block in self.blocks:
            h = block(h, condition)
        shift, scale = self.modulate(F.silu(condition)).unsqueeze(2).chunk(2, -1)
        out = self._unpatched(self.project(_modulated(h, shift, scale)))  # [B, F, V, outputs, h, w]
        made, kept = out.tensor_split([self.config.members * self.channels], 3)
        kept, turned = kept.tensor_split([self.config.history + 1], 3)
        seen = torch.cat([remembered.history, remembered.anchor[:, None]], 1)
        still = torch.einsum("bfvkhw,bkvchw->bfvchw", kept, seen)
        if drawn is not None:
            share, turned = turned[:, :, :, :1], turned[:, :, :, 1:]
            still = still + share * self.drawn(drawn.movedim(3, -1)).movedim(-1, 3)
        if looked is not None:
            still = still + torch.einsum("bfvshw,bfvschw->bfvchw", turned, looked)
        shares = self.skip(F.silu(condition)).unflatten(-1, (2, 1, -1, 1, 1))  # [B, F, 2, 1, C, 1, 1]
        still = still + shares[:, :, 0] * frames + shares[:, :, 1] * anchor
        return made.unflatten(3, (self.config.members, -1)).movedim(3, 1) + still[:, None]

    def denoise(
        self, x: Tensor, remembered: Remembered, tokens: Tensor, sigma: Tensor, guidance: float = 1.0
    ) -> Tensor:
        """All members' estimates [B, members, H + 1, V, C, h, w] of what is under noise ``sigma`` [B] in ``x``."""
        s, k = edm.scaling(sigma.reshape(-1, *[1] * 5)), self.config.history
        told = torch.ones(len(x), dtype=torch.bool, device=x.device)

        def estimate(told: Tensor) -> Tensor:
            out = self(s.c_in * x, remembered, tokens, s.c_noise.flatten(), told)[:, :, k:]
            return (s.c_skip * x)[:, None] + s.c_out[:, None] * out

        clean = estimate(told)
        if guidance <= 1:
            return clean
        scales = edm.guidance_scales(x.shape[1], guidance, x.device)
        free = estimate(~told)
        return edm.guided(clean.flatten(0, 1), free.flatten(0, 1), scales).unflatten(0, clean.shape[:2])

    @torch.no_grad()
    def imagine(self, remembered: Remembered, tokens: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Sample a chunk.

        Args:
            remembered: Where it starts.
            tokens: Pose tokens [B, F, 11].
            noise: Standard normal [B, H + 1, V, C, h, w].

        Returns:
            Latents [B, H + 1, V, C, h, w], the current frame first; and how much the members disagree, [B]: the mean
            standard deviation of their estimates of the future, over the steps at which these estimates are theirs and
            not the noised chunk's (c_out is the step's share of the network in them).
        """
        config = self.config
        spreads: list[Tensor] = []

        def denoise(x: Tensor, sigma: Tensor) -> Tensor:
            estimates = self.denoise(x, remembered, tokens, sigma, config.guidance)
            if len(spreads) < max(1, guessed):
                spreads.append(estimates.std(1, correction=0)[:, 1:].mean((1, 2, 3, 4, 5)))
            return estimates.mean(1)

        levels = edm.schedule(config.steps, config.sigma_max, config.sigma_min)
        guessed = sum(level >= GUESSED for level in levels)
        chunk = edm.sample(denoise, noise, levels)
        return chunk, torch.stack(spreads).mean(0)

    def _drawing(self, remembered: Remembered, told: Tensor) -> Tensor | None:
        """What each position of each frame and view should show of the tool: [B, F, V, DRAWN, h, w], 0 in the past."""
        if remembered.sight is None:
            return None
        tool = remembered.sight.tool
        which = torch.eye(self.views, device=tool.device)[:, None, None].expand(
            *tool.shape[:2], -1, *tool.shape[3:5], -1
        )
        drawn = self.draw(torch.cat([tool, which], -1)) * told.view(-1, *[1] * 5)
        return F.pad(drawn, [0] * 8 + [self.config.history + 1, 0]).movedim(-1, 3)

    def _glances(self, remembered: Remembered, told: Tensor) -> Tensor | None:
        """What was seen, as each frame and view sees it: latents [B, F, V, S * V, C, h, w], 0 where nobody can tell."""
        if remembered.sight is None or (seen := remembered.sight.seen) is None:
            return None
        seen = self.glance(seen.flatten(0, 3)).unflatten(0, seen.shape[:4])
        seen = seen * told.view(-1, *[1] * 6)
        everywhere = seen.new_zeros(len(seen), self.config.frames, self.views, *seen.shape[3:])
        everywhere[:, self.config.history + 1 :, self.moving] = seen
        return everywhere

    def _patches(self, x: Tensor) -> Tensor:
        """[B, F, V, C, h, w] as tokens [B, F, V * h / p * w / p, C * p * p]."""
        p = self.config.patch
        x = x.unflatten(-1, (-1, p)).unflatten(-3, (-1, p))  # B F V C rows p columns p
        return x.permute(0, 1, 2, 4, 6, 3, 5, 7).flatten(5).flatten(2, 4)

    def _unpatched(self, x: Tensor) -> Tensor:
        """Tokens [B, F, N, A * p * p] as [B, F, V, A, h, w]."""
        p, n = self.config.patch, self.size // self.config.patch
        x = x.unflatten(2, (self.views, n, n)).unflatten(-1, (-1, p, p))
        return x.permute(0, 1, 2, 5, 3, 6, 4, 7).flatten(6).flatten(4, 5)

    def _levels(self, remembered: Remembered) -> Tensor:
        """How noisy history and anchor are, as a condition [B, F, D]."""
        levels = F.pad(remembered.history_level, (0, self.config.frames - self.config.history))
        return self.level(torch.stack([levels, remembered.anchor_level[:, None].expand_as(levels)], -1))

    def _poses(self, tokens: Tensor) -> Tensor | None:
        """What frames are told of poses, [B, F or 1, features]."""
        match self.config.conditioning:
            case "per_frame":
                return self.waves(tokens)
            case "mean":  # without their times, by which the network could tell whose pose is whose
                timeless = torch.cat([tokens[..., :-1], torch.zeros_like(tokens[..., -1:])], -1)
                return self.waves(timeless).mean(1, True)
            case "flat":
                return self.waves(tokens).flatten(1)[:, None]
        return None


def _waves(c_noise: Tensor) -> Tensor:
    """Fourier features [B, 16] of c_noise [B]."""
    angle = c_noise[:, None] * torch.pi * 2.0 ** torch.arange(-2, 6, device=c_noise.device)
    return torch.cat([angle.cos(), angle.sin()], -1)


def noised_history(history: Tensor, scale: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """History [B, K, ...] with noise of a random level for each frame, at unit variance; and the levels [B, K]."""
    shape, device = history.shape[:2], history.device
    level = scale * torch.randn(shape, generator=generator, device=device).abs()
    return _noised(history, level, generator), level


def _noised(x: Tensor, level: Tensor, generator: torch.Generator) -> Tensor:
    wide = level.reshape(*level.shape, *[1] * (x.ndim - level.ndim))
    return (x + wide * torch.randn(x.shape, generator=generator, device=x.device)) / (1 + wide**2).sqrt()


def loss(
    model: Dynamics,
    latents: Tensor,
    tokens: Tensor,
    valid: Tensor,
    generator: torch.Generator,
    sight: Sight | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Weighted error of the denoised frames alone.

    lambda |c_skip x + c_out F - z|^2 is the square error of F against (z - c_skip x) / c_out.

    Args:
        model: The network.
        latents: Clips [B, F, V, C, h, w].
        tokens: Pose tokens [B, F, 11].
        valid: bool [B, H + 1], denoised frames that count.
        generator: Noise.
        sight: See :class:`Remembered`.
    """
    config, b, device = model.config, len(latents), latents.device
    past, z = latents[:, : config.history], latents[:, config.history :]
    sigma = edm.draw_sigma(b, config.sigma_mean, config.sigma_std, generator, device)
    s = edm.scaling(sigma.reshape(-1, *[1] * 5))
    x = z + sigma.reshape(-1, *[1] * 5) * torch.randn(z.shape, generator=generator, device=device)
    history, level = noised_history(past, config.history_noise, generator)
    anchor_level = config.anchor_noise * torch.rand(b, generator=generator, device=device)
    anchor = _noised(z[:, 0], anchor_level, generator)
    told = torch.rand(b, generator=generator, device=device) >= config.dropout
    out = model(s.c_in * x, Remembered(history, anchor, level, anchor_level, sight), tokens, s.c_noise.flatten(), told)
    error = (out[:, :, config.history :] - ((z - s.c_skip * x) / s.c_out)[:, None]) ** 2  # [B, M, H + 1, V, C, h, w]
    counts = valid[:, None].float().expand(-1, config.members, -1)
    if config.members > 1:
        chosen = torch.rand(b, config.members, 1, generator=generator, device=device) < 0.5
        counts = counts * (chosen | ~chosen.any(1, keepdim=True))
    value = (error.mean((3, 4, 5, 6)) * counts).sum() / counts.sum().clamp(min=1)
    future = (error.mean((1, 3, 4, 5, 6))[:, 1:] * valid[:, 1:]).sum() / valid[:, 1:].sum().clamp(min=1)
    return value, {"future": future.detach()}

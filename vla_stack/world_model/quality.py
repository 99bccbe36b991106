"""How well a world model predicts: free-running against what was recorded, on held-out episodes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vla_stack.errors import UserError
from vla_stack.world_model.clips import HELD_OUT, Recording
from vla_stack.world_model.model import End, WorldModel
from vla_stack.world_model.vae import psnr, ssim, to_planes

MOVING = 0.1  # change of a colour since the first frame, of its range, from which on a pixel has moved
BATCH = 16  # rollouts imagined together
# dB, dB, similarity, and the distance of features: root mean square, of the autoencoder's standardised latents.
METRICS = ("psnr", "psnr_moving", "ssim", "feature_distance")


def held_out_starts(recording: Recording, frames: int) -> NDArray[np.int64]:
    """First frames of held-out episodes of more than ``frames`` frames."""
    starts = np.unique(recording.start[recording.held_out])
    return starts[recording.end[starts] - starts > frames]


def chunk_noise(model: WorldModel, seeds: Sequence[int], chunk: int) -> Tensor:
    """Noise [B, H + 1, V, C, h, w] of one chunk; of every rollout a function of its seed and the chunk alone."""
    rows = []
    for seed in seeds:
        words = np.random.SeedSequence([seed, chunk]).generate_state(2)
        generator = torch.Generator().manual_seed(int(words[0]) << 31 | int(words[1]) >> 1)
        rows.append(torch.randn(model.noise_shape(), generator=generator))
    return torch.stack(rows).to(model.bank.device)


@torch.no_grad()
def imagine_along(
    model: WorldModel,
    recording: Recording,
    starts: NDArray[np.int64],
    frames: int,
    seed: int = 0,
    poses: NDArray[np.float32] | None = None,
) -> tuple[Tensor, Tensor]:
    """Free-running rollouts from recorded frames along recorded poses; equal starts have noise of their own.

    Args:
        model: The world model.
        recording: The data.
        starts: First frames [B].
        frames: How many to imagine, a multiple of a chunk.
        seed: Of the noise.
        poses: Other poses than recorded ones, [B, frames, 5].

    Returns:
        Latents [B, frames, V, C, h, w] and the members' disagreement [B, chunks].
    """
    out, spreads, h = [], [], model.horizon
    seeds = [seed * 1_000_003 + int(s) + 500_009 * int((starts[:i] == s).sum()) for i, s in enumerate(starts)]
    for i in range(0, len(starts), BATCH):
        now = starts[i : i + BATCH]
        memories = model.begin(recording.stacked(now), recording.poses[now])
        index = np.minimum(now[:, None] + 1 + np.arange(frames), recording.end[now, None] - 1)
        told = torch.from_numpy(recording.poses[index] if poses is None else poses[i : i + BATCH]).to(model.bank.device)
        parts, spread = [], []
        for c in range(frames // h):
            noise = chunk_noise(model, seeds[i : i + BATCH], c)
            latents, u = model.chunk(memories, told[:, c * h : (c + 1) * h], noise)
            for row, memory in enumerate(memories):
                memory.push(End(latents[row, -1], told[row, (c + 1) * h - 1]))
            parts.append(latents)
            spread.append(u)
        out.append(torch.cat(parts, 1))
        spreads.append(torch.stack(spread, 1))
    return torch.cat(out), torch.cat(spreads)


def decode(model: WorldModel, latents: Tensor) -> NDArray[np.uint8]:
    """Pictures uint8 [*, H, W, 3] of latents [*, C, h, w], some at a time."""
    flat = latents.flatten(0, -4)
    with torch.no_grad():
        parts = [model.vae.pictures(flat[i : i + 64]).cpu() for i in range(0, len(flat), 64)]
    return torch.cat(parts).unflatten(0, latents.shape[:-3]).numpy()


def moving(real: NDArray[np.uint8], first: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Pixels [*, H, W] that differ from the first frame's."""
    return np.abs(real.astype(np.int16) - first.astype(np.int16)).max(-1) > 255 * MOVING


def scores(real: NDArray[np.uint8], guess: NDArray[np.uint8], mask: NDArray[np.bool_]) -> dict[str, float]:
    """PSNR in dB of one picture [H, W, 3], of all of it and of its moving pixels (NaN without any), and SSIM."""
    x, y = (to_planes(torch.from_numpy(np.ascontiguousarray(p))[None]) for p in (real, guess))
    error = ((x - y) ** 2).mean(1)[0]
    inside = torch.from_numpy(np.ascontiguousarray(mask))
    part = float(psnr(error[inside].mean())) if inside.any() else float("nan")
    return {"psnr": float(psnr(error.mean())), "psnr_moving": part, "ssim": float(ssim(x, y))}


def measure(
    model: WorldModel,
    recording: Recording,
    clips: int,
    ks: Sequence[int],
    seed: int = 0,
    starts: NDArray[np.int64] | None = None,
) -> list[dict[str, Any]]:
    """Quality after k imagined frames, beside copying the first frame and beside the autoencoder's own loss.

    Args:
        model: The world model.
        recording: Its data.
        clips: Rollouts at most, from held-out episodes that are longer than the smallest horizon.
        ks: Horizons in frames; each is measured on the episodes that last as long. (Those of the longest alone would
            hold no success: who succeeds is done sooner.)
        seed: Of the noise.
        starts: Where rollouts begin instead.

    Returns:
        One row for each k, camera and clip: ``{"k", "view", "start", metric: {arm: value}}``, the arms being ``model``,
        ``copy_last`` and ``autoencoder``, the metrics :data:`METRICS`.
    """
    starts = held_out_starts(recording, min(ks))[:clips] if starts is None else starts
    if not len(starts):
        raise UserError(
            f"no held-out episode is longer than {min(ks)} frames", f"every {HELD_OUT}th is held out: record more"
        )
    longest = -(-max(ks) // model.horizon) * model.horizon
    imagined = decode(model, imagine_along(model, recording, starts, longest, seed)[0][:, np.array(ks) - 1])
    rows = []
    for i, k in enumerate(ks):
        lasting = np.flatnonzero(recording.end[starts] - starts > k)
        if not len(lasting):
            continue
        first, real = recording.stacked(starts[lasting]), recording.stacked(starts[lasting] + k)
        seen = _encoded(model, real)
        arms = {"model": imagined[lasting, i], "copy_last": first, "autoencoder": decode(model, seen)}
        apart = {a: (_encoded(model, p) - seen).square().mean((2, 3, 4)).sqrt().cpu().numpy() for a, p in arms.items()}
        masks = moving(real, first)
        for b, start in enumerate(starts[lasting]):
            for v, view in enumerate(model.cameras):
                of = {
                    arm: scores(real[b, v], pictures[b, v], masks[b, v]) | {"feature_distance": float(apart[arm][b, v])}
                    for arm, pictures in arms.items()
                }
                row: dict[str, Any] = {"k": int(k), "view": view, "start": int(start)}
                rows.append(row | {m: {arm: s[m] for arm, s in of.items()} for m in METRICS})
    return rows


def _encoded(model: WorldModel, pictures: NDArray[np.uint8]) -> Tensor:
    """Latents [B, V, C, h, w] of pictures [B, V, H, W, 3]."""
    with torch.no_grad():
        return model.vae.encode(torch.from_numpy(np.ascontiguousarray(pictures)).to(model.bank.device))


def write_strip(
    model: WorldModel, recording: Recording, path: Path, episodes: int = 3, frames: int = 16, every: int = 2
) -> None:
    """A picture of held-out episodes, recorded above imagined, one pair of rows a camera; time goes to the right."""
    starts = held_out_starts(recording, frames)[:episodes]
    if not len(starts):
        return
    whole = -(-frames // model.horizon) * model.horizon
    imagined = decode(model, imagine_along(model, recording, starts, whole)[0][:, :frames])
    real = np.stack([recording.stacked(starts + 1 + k) for k in range(frames)], 1)
    rows = []
    for b in range(len(starts)):
        for v in range(len(model.cameras)):
            rows += [np.concatenate(list(film[b, ::every, v]), 1) for film in (real, imagined)]
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = cv2.resize(np.concatenate(rows), None, fx=2, fy=2, interpolation=cv2.INTER_NEAREST)
    cv2.imwrite(str(path), cv2.cvtColor(picture, cv2.COLOR_RGB2BGR))

"""What the heads learn from, real and imagined, and what the guards are set by."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vla_stack.world_model import guards
from vla_stack.world_model.clips import Recording
from vla_stack.world_model.heads import balanced_threshold
from vla_stack.world_model.model import Limits, WorldModel
from vla_stack.world_model.quality import decode, imagine_along

BANK = 2000  # recorded (pose, command) pairs that a model carries


def window_starts(recording: Recording, n: int, length: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """``n`` training frames from which windows of ``length`` begin; every second one holds a success, if any does."""
    frames = np.arange(len(recording.end))
    usable = ~recording.held_out & (frames + 1 < recording.end)
    won = np.concatenate([[0], np.cumsum(recording.success)])
    soon = usable & (won[np.minimum(frames + length, recording.end)] > won[frames])
    anywhere, winning = np.flatnonzero(usable), np.flatnonzero(soon)
    picked = rng.choice(anywhere, n)
    if len(winning):
        picked[::2] = rng.choice(winning, len(picked[::2]))
    return picked


def window_index(starts: NDArray[np.int64], length: int, recording: Recording) -> NDArray[np.int64]:
    """Frames int64 [B, length] of windows; past an episode's end the last frame is repeated."""
    return np.minimum(starts[:, None] + np.arange(length), recording.end[starts, None] - 1)


def imagine_rollouts(
    model: WorldModel, recording: Recording, n: int, seed: int, held_out: bool = False
) -> dict[str, Tensor]:
    """Rollouts along recorded poses, from the first frames of episodes, of which every second one succeeds if any does.

    Returns:
        ``latents`` [n, T, V, C, h, w] with T the heads' rollout rounded to chunks, ``index`` int64 [n, T] of the frames
        that were recorded there, ``start`` int64 [n], and ``spread`` [n, chunks].
    """
    length = _whole(model, model.config.heads.rollout)
    rng = np.random.default_rng([seed, held_out])
    first = np.unique(recording.start[recording.held_out == held_out])
    winning = first[np.isin(first, recording.start[recording.success])]
    starts = rng.choice(first, n)
    if len(winning):
        starts[::2] = rng.choice(winning, len(starts[::2]))
    latents, spread = imagine_along(model, recording, starts, length, seed)
    index = torch.from_numpy(window_index(starts + 1, length, recording))
    return {"latents": latents.cpu(), "index": index, "start": torch.from_numpy(starts), "spread": spread.cpu()}


def _whole(model: WorldModel, frames: int) -> int:
    """Frames, rounded to chunks."""
    return max(1, frames // model.horizon) * model.horizon


class HeadsLoader:
    """Endless batches as :meth:`vla_stack.world_model.heads.Heads.loss` takes them.

    Of the sequences of a batch one half are recorded pictures, a quarter went through the autoencoder, and a quarter
    were imagined: judges that never saw imagined pictures misjudge them.
    """

    def __init__(
        self,
        model: WorldModel,
        recording: Recording,
        latents: Tensor,
        generated: dict[str, Tensor],
        batch_size: int,
        seed: int,
    ) -> None:
        self._model, self._recording, self._latents, self._generated = model, recording, latents, generated
        self._length = min(_whole(model, model.config.heads.window), generated["index"].shape[1])
        self._batch_size, self._seed, self._position = batch_size, seed, 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        rng = np.random.default_rng([self._seed, self._position])
        self._position += 1
        r, n = self._recording, self._batch_size
        quarter = n // 4
        index = window_index(window_starts(r, n - quarter, self._length, rng), self._length, r)
        again = decode(self._model, self._latents[torch.from_numpy(index[:quarter])].to(self._model.bank.device))
        which = rng.integers(len(self._generated["index"]), size=quarter)
        cut = rng.integers(self._generated["index"].shape[1] - self._length + 1, size=quarter)
        part = torch.from_numpy(cut[:, None] + np.arange(self._length))
        rows = torch.from_numpy(which)[:, None]
        imagined = decode(self._model, self._generated["latents"][rows, part].to(self._model.bank.device))
        pictures = np.concatenate([again, r.stacked(index[quarter:]), imagined])
        index = np.concatenate([index, self._generated["index"][rows, part].numpy()])
        return {
            "pictures": pictures,
            "measured": r.states[index][..., :5],
            "task": r.task[index[:, 0]],
            "success": r.success[index],
            "real": np.arange(n) < n - quarter,
        } | self._commands(rng)

    def _commands(self, rng: np.random.Generator) -> dict[str, NDArray[np.float32]]:
        """Measured poses and the commands that followed, and where they led."""
        r, h = self._recording, self._model.horizon
        frames = np.arange(len(r.end))
        now = rng.choice(np.flatnonzero(~r.held_out & (frames + h < r.end)), 16 * self._batch_size)
        ahead = now[:, None] + np.arange(h)
        before = np.where((now > r.start[now])[:, None], r.commands[now - 1], r.states[now, :5])
        return {"pose": r.poses[now], "before": before, "commands": r.commands[ahead], "reached": r.poses[ahead + 1]}

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._position = int(state["position"])


@torch.no_grad()
def calibrate(model: WorldModel, recording: Recording, n: int, seed: int) -> tuple[Limits, Tensor]:
    """Temperature of the judges and limits of the guards, from rollouts along held-out episodes.

    Returns:
        The limits, with the threshold of success; and the recorded (pose, command) pairs that G5 compares with.
    """
    device, h = model.bank.device, model.horizon
    rollouts = imagine_rollouts(model, recording, n, seed, held_out=True)
    index, latents = rollouts["index"].numpy(), rollouts["latents"].to(device)
    pictures = torch.from_numpy(decode(model, latents)).to(device)
    task = torch.from_numpy(recording.task[index[:, 0]]).to(device)
    labels = torch.from_numpy(recording.success[index])
    logits = torch.stack([j(pictures, task)[0] for j in model.heads.judges]).cpu()
    model.heads.calibrate(logits.flatten(1), labels.flatten())
    probability = (logits / model.heads.temperature.cpu()).sigmoid().mean(0)

    told = torch.from_numpy(recording.poses[index]).to(device).unflatten(1, (-1, h)).flatten(0, 1)
    by_chunk = latents.unflatten(1, (-1, h)).flatten(0, 1)
    residual = guards.pose_residual(model, pictures.unflatten(1, (-1, h)).flatten(0, 1), told)
    frames = np.flatnonzero(~recording.held_out)
    some = np.random.default_rng(seed).choice(frames, min(BANK, len(frames)), replace=False)
    others = np.flatnonzero(recording.held_out)
    bank, others = (
        guards.features(model, *(torch.from_numpy(a[rows]).to(device) for a in (recording.poses, recording.commands)))
        for rows in (some, others)
    )
    model.bank = bank
    limits = Limits(
        disagreement=guards.limit(rollouts["spread"].flatten()),
        residual=guards.limit(residual),
        latent=guards.limit(guards.latent_deviation(by_chunk)),
        distance=guards.limit(guards.neighbour_distance(model, others)),
        success=balanced_threshold(probability.flatten(), labels.flatten()),
    )
    return limits, bank

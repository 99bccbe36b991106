"""What the heads learn from, real and imagined, and what the guards are set by."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vla_stack.world_model import guards
from vla_stack.world_model.clips import Recording
from vla_stack.world_model.heads import strict_threshold
from vla_stack.world_model.model import Limits, WorldModel
from vla_stack.world_model.quality import decode, held_out_starts, imagine_along

BANK = 2000  # recorded (pose, command) pairs that a model carries
SOME = 10  # rollouts that last as long, without which nothing is said of that length
FOLLOWED = 0.03  # m between where the tool is told to be and is seen, up to which a rollout follows its commands
OTHER = 0.3  # of the judges' sequences, shown with another instruction
BLUR, NOISE = 5, 25.0  # of what the probe is shown: pixels, and of 255
FRAMES = 16  # that the probe is shown for each of the judges' sequences, of other moments: a window's are all alike


def window_starts(recording: Recording, n: int, length: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """``n`` training frames from which windows of ``length`` begin; every second one holds a success, if any does.

    Windows end where their episodes do, or begin with them: nothing that a judge is asked about stands still.
    """
    frames = np.arange(len(recording.end))
    usable = ~recording.held_out & ((frames + length <= recording.end) | (frames == recording.start))
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

    Those of held-out episodes last a chunk at least: guards are set by whole ones.

    Returns:
        ``latents`` [n, T, V, C, h, w] with T the heads' rollout rounded to chunks, ``index`` int64 [n, T] of the frames
        that were recorded there, ``length`` int64 [n] of them within the episode, and ``spread`` [n, chunks].
    """
    length = _whole(model, model.config.heads.rollout)
    rng = np.random.default_rng([seed, held_out])
    first = held_out_starts(recording, model.horizon) if held_out else np.unique(recording.start[~recording.held_out])
    winning = first[np.isin(first, recording.start[recording.success])]
    starts = rng.choice(first, n)
    if len(winning):
        starts[::2] = rng.choice(winning, len(starts[::2]))
    latents, spread = imagine_along(model, recording, starts, length, seed)
    index = torch.from_numpy(window_index(starts + 1, length, recording))
    within = torch.from_numpy(np.minimum(recording.end[starts] - starts - 1, length))
    return {"latents": latents.cpu(), "index": index, "length": within, "spread": spread.cpu()}


def _whole(model: WorldModel, frames: int) -> int:
    """Frames, rounded to chunks."""
    return max(1, frames // model.horizon) * model.horizon


class HeadsLoader:
    """Endless batches as :meth:`vla_stack.world_model.heads.Heads.loss` takes them.

    Of the judges' sequences one half are recorded pictures, a quarter went through the autoencoder, and a quarter were
    imagined: judges that never saw imagined pictures misjudge them. A share :data:`OTHER` is shown with another
    instruction and is no success: in recordings each episode does what it was told, so judges would learn that anything
    that is lifted is right.
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
        cut = rng.integers(np.maximum(self._generated["length"].numpy()[which] - self._length, 0) + 1)
        part = torch.from_numpy(cut[:, None] + np.arange(self._length))
        rows = torch.from_numpy(which)[:, None]
        imagined = decode(self._model, self._generated["latents"][rows, part].to(self._model.bank.device))
        pictures = np.concatenate([again, r.stacked(index[quarter:]), imagined])
        index = np.concatenate([index, self._generated["index"][rows, part].numpy()])
        task, right = with_other_tasks(r.task[index[:, 0]], len(r.tasks), rng.random(n) < OTHER, rng)
        judged = {"pictures": pictures, "task": task, "success": r.success[index] & right[:, None]}
        return judged | self._frames(rng) | self._commands(rng)

    def _frames(self, rng: np.random.Generator) -> dict[str, NDArray[Any]]:
        """Any recorded moments, a quarter of the pictures through the autoencoder, and the poses measured there.

        None was imagined, or the probe would learn what the model draws where it is told a pose; but all are coarser to
        some degree, as imagined ones are.
        """
        r, n = self._recording, FRAMES * self._batch_size
        index = rng.choice(np.flatnonzero(~r.held_out), n)
        again = decode(self._model, self._latents[torch.from_numpy(index[: n // 4])].to(self._model.bank.device))
        frames = coarser(np.concatenate([again, r.stacked(index[n // 4 :])]), rng)
        return {"frames": frames, "measured": r.measured[index]}

    def _commands(self, rng: np.random.Generator) -> dict[str, NDArray[np.float32]]:
        """Measured poses and the commands that followed, and where they led."""
        r, h = self._recording, self._model.horizon
        frames = np.arange(len(r.end))
        now = rng.choice(np.flatnonzero(~r.held_out & (frames + h < r.end)), 16 * self._batch_size)
        ahead = now[:, None] + np.arange(h)
        return {
            "pose": r.poses[now],
            "before": r.before(now),
            "commands": r.commands[ahead],
            "reached": r.poses[ahead + 1],
        }

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._position = int(state["position"])


def coarser(pictures: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Pictures uint8 [N, V, H, W, 3] in the means of squares of 1 to :data:`BLUR` pixels, with noise up to NOISE."""
    n, _, height, width = pictures.shape[:4]
    out = pictures.astype(np.float32)
    for views, square in zip(out, rng.integers(1, BLUR + 1, n), strict=True):
        for view in views:
            if square > 1:
                small = cv2.resize(view, (width // square, height // square), interpolation=cv2.INTER_AREA)
                view[:] = cv2.resize(small, (width, height), interpolation=cv2.INTER_LINEAR)
    noise = rng.standard_normal(out.shape, np.float32) * rng.uniform(0, NOISE, (n, 1, 1, 1, 1)).astype(np.float32)
    return (out + noise).clip(0, 255).astype(np.uint8)


def with_other_tasks(
    task: NDArray[np.int64], tasks: int, chosen: NDArray[np.bool_], rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Instructions [B], of which the chosen ones are replaced by others of ``tasks``; and whether each is its own.

    Where there is one instruction, it stays.
    """
    if tasks < 2:
        return task, np.ones(len(task), bool)
    other = (task + rng.integers(1, tasks, len(task))) % tasks
    return np.where(chosen, other, task), ~chosen


@torch.no_grad()
def judged_films(model: WorldModel, recording: Recording) -> tuple[Tensor, Tensor]:
    """Largest success probability [E] of each held-out episode as it was recorded, and whether it succeeded."""
    largest, won = [], []
    for start in np.unique(recording.start[recording.held_out]):
        frames = np.arange(start, recording.end[start])
        pictures = torch.from_numpy(recording.stacked(frames))[None].to(model.bank.device)
        task = torch.tensor([recording.task[start]], device=model.bank.device)
        largest.append(model.heads.success(pictures, task)[0].amax().cpu())
        won.append(bool(recording.success[frames].any()))
    return torch.stack(largest), torch.tensor(won)


@torch.no_grad()
def calibrate(model: WorldModel, recording: Recording, n: int, seed: int) -> tuple[Limits, Tensor]:
    """Scale of the judges' logits and limits of the guards, from rollouts along held-out episodes.

    What is decided at an episode's largest probability, and ended by its worst chunk, is calibrated on those: a success
    counts at the first frame above the threshold, a guard ends a rollout at the first chunk above its limit.

    Returns:
        The limits, with the threshold of success; and the recorded (pose, command) pairs that G5 compares with.
    """
    device, h = model.bank.device, model.horizon
    rng = np.random.default_rng([seed, 2])
    rollouts = imagine_rollouts(model, recording, n, seed, held_out=True)
    index, latents = rollouts["index"].numpy(), rollouts["latents"].to(device)
    within = torch.arange(index.shape[1]) < rollouts["length"][:, None]  # past an episode's end all stands still
    pictures = torch.from_numpy(decode(model, latents)).to(device)
    own = recording.task[index[:, 0]]
    tasks, rights = zip(
        *(with_other_tasks(own, len(recording.tasks), np.full(n, wrong), rng) for wrong in (False, True)), strict=True
    )
    labels = torch.from_numpy(np.concatenate([recording.success[index] & right[:, None] for right in rights]))
    logits = torch.cat(
        [
            torch.stack([j(pictures, torch.from_numpy(task).to(device))[0] for j in model.heads.judges]).cpu()
            for task in tasks
        ],
        1,
    )
    counted = within.repeat(2, 1)
    model.heads.calibrate(logits[:, counted], labels[counted])
    probability = model.heads.probability(logits.to(device)).cpu().where(counted, 0.0)
    seen, won = judged_films(model, recording)
    largest = torch.cat([probability.amax(1), seen])
    threshold = strict_threshold(largest, torch.cat([(labels & counted).any(1), won]))

    told = torch.from_numpy(recording.poses[index]).to(device).unflatten(1, (-1, h)).flatten(0, 1)
    by_chunk = latents.unflatten(1, (-1, h)).flatten(0, 1)
    poses_seen = guards.seen_poses(model, pictures.unflatten(1, (-1, h)).flatten(0, 1))
    residual = guards.pose_residual(poses_seen, told)
    whole = within.unflatten(1, (-1, h)).all(2).to(device)  # [n, chunks]

    def worst(of_chunks: Tensor) -> Tensor:
        """The largest of each rollout's whole chunks; of rollouts that have one."""
        return of_chunks.reshape(whole.shape).masked_fill(~whole, -torch.inf).amax(1)[whole.any(1)]

    at = (residual.reshape(whole.shape) * whole).sum(0) / whole.sum(0)  # NaN where no rollout lasts as long
    lost = ((at > FOLLOWED) & (whole.sum(0) >= min(SOME, len(whole)))).nonzero().flatten()

    frames = np.flatnonzero(~recording.held_out)
    some = np.random.default_rng(seed).choice(frames, min(BANK, len(frames)), replace=False)
    others = np.flatnonzero(recording.held_out)
    bank, unseen = (
        guards.features(model, *(torch.from_numpy(a[rows]).to(device) for a in (recording.poses, recording.commands)))
        for rows in (some, others)
    )
    model.bank = bank
    distance = guards.neighbour_distance(model, unseen).cpu()
    by_episode = torch.stack(
        [distance[recording.start[others] == s].amax() for s in np.unique(recording.start[others])]
    )
    limits = Limits(
        disagreement=guards.limit(worst(rollouts["spread"].to(device))),
        residual=guards.limit(worst(residual)),
        latent=guards.limit(worst(guards.latent_deviation(by_chunk))),
        distance=guards.limit(by_episode),
        chunks=float(lost[0]) if len(lost) else float("inf"),
        success=threshold,
    )
    return limits, bank

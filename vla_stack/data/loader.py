"""Training batches: an observation, the action chunk that follows it, and nothing decoded on the way where disks allow.

A batch is a vectorised gather from contiguous columns and memory-mapped frames (``frame_cache.py``), or from frames
that were decoded in time (``on_demand.py``). Everything random is a function of (seed, epoch), so the position in the
stream is the whole state of a loader and a resumed run sees the same batches.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vla_stack.data.chunks import ActionChunks
from vla_stack.data.dataset import Dataset, open_dataset
from vla_stack.data.frame_cache import open_frames
from vla_stack.data.on_demand import FramesOnDemand, raw_bytes, seekable
from vla_stack.data.past import sampled
from vla_stack.errors import UserError
from vla_stack.schema import ACTION, IMAGE_TOKENS, PAST_AGE, TASK, past_key

Batch = dict[str, Any]
RESUME_ALIKE = "resume with the data, episodes, weights and seed that the run was started with"
AHEAD = 2  # batches that are decoded while one is trained on, where frames are decoded on demand


class ChunkLoader:
    """Endless shuffled batches of action chunks; an iterator.

    Each batch holds, for B frames: ``observation.images.<camera>`` uint8 [B, H, W, 3]; ``action`` float32
    [B, horizon, A], which repeats the chunk's last action past its end; ``action_is_pad`` bool [B, horizon], true
    there, and for first actions that are no labels; ``task`` list[str]; and every other numeric column of the dataset
    at the frame itself, among them ``observation.state`` float32 [B, S], ``index``, ``episode_index`` and
    ``frame_index`` int64 [B]. Where there are image tokens, also ``observation.image_tokens`` int16 [B, n, d] of one
    view of each frame. With a history of P earlier observations also ``observation.past.<camera>`` uint8
    [B, P, H, W, 3] and ``observation.past_age`` float32 [B, P], control steps, 0 where there is none.

    A chunk is the frame's own label where the dataset has chunk labels (:mod:`vla_stack.data.chunks`), and otherwise
    the actions of the frames that follow, up to the episode's end. Where only some frames are ``trainable``, chunks
    start at these alone, and a series is padded from the first step on that :func:`vla_stack.data.labels.reach` does
    not allow.

    Without weights every frame is drawn once an epoch. With weights, frame i is drawn ``N w_i / sum(w)`` times an
    epoch in expectation, rounded up or down (systematic resampling: the lowest variance for given expectations).

    Args:
        root: Dataset folder, or a dataset that is open already.
        horizon: Actions per chunk.
        batch_size: Frames per batch, B.
        seed: Determines the order of frames.
        episodes: Episodes to draw from; all by default.
        cameras: Camera names; all by default, none if empty.
        image_sizes: Height and width of a camera's pictures; as recorded where it is not named.
        weights: float [N] over all frames of the dataset, non-negative; frames of weight 0 are never drawn.
        trainable: bool [N], which frames may be trained on; all where it is not given.
        history: Ages of earlier observations (``PolicySpec.history``) whose pictures are to be gathered, too.
        cache_dir: Folder of decoded frames; :func:`~vla_stack.data.frame_cache.cache_folder` by default.
        cache_gb: What decoded frames may take there; where they would take more, those of videos are decoded when they
            are sampled. The batches are the same.
        progress: Show a progress bar while frames are decoded for the first time.
        tokens: int16 [V, N, n, d], the bits of bfloat16: what encoders made of V views of each frame.

    Raises:
        UserError: The dataset is damaged, or an argument does not fit it.
    """

    def __init__(
        self,
        root: str | Path | Dataset,
        horizon: int,
        batch_size: int,
        seed: int = 0,
        episodes: Sequence[int] | None = None,
        cameras: Sequence[str] | None = None,
        image_sizes: Mapping[str, tuple[int, int]] | None = None,
        weights: NDArray[np.floating] | None = None,
        trainable: NDArray[np.bool_] | None = None,
        history: Sequence[int] = (),
        cache_dir: str | Path | None = None,
        cache_gb: float = np.inf,
        progress: bool = True,
        tokens: NDArray[np.int16] | None = None,
    ) -> None:
        self.dataset = dataset = root if isinstance(root, Dataset) else open_dataset(root)
        if horizon < 1 or batch_size < 1:
            raise UserError(f"horizon {horizon} and batch_size {batch_size} must be at least 1")
        self.horizon, self.batch_size, self.seed, self.history = horizon, batch_size, seed, tuple(history)
        self._offsets = np.arange(horizon)
        self._chunks, self._tokens = ActionChunks(dataset, horizon, trainable), tokens
        names = list(dataset.cameras) if cameras is None else list(cameras)
        folder = Path(cache_dir) if cache_dir is not None else None
        self._frames, self._on_demand = _pictures(dataset, names, folder, progress, image_sizes or {}, cache_gb)
        if trainable is not None:
            weights = np.where(trainable, 1.0 if weights is None else weights, 0.0)
        self._weights = _frame_weights(dataset, episodes, weights)
        self.epoch_size = int(np.count_nonzero(self._weights))
        self._position = 0
        self._orders: dict[int, NDArray[np.int64]] = {}

    def __len__(self) -> int:
        """Batches in one epoch, rounded up."""
        return -(-self.epoch_size // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        for later in range(1, 1 + AHEAD) if self._on_demand else ():
            self._decode_ahead(self._position + later * self.batch_size)
        frames = self._frames_at(self._position)
        batch = self.gather(frames)
        if self.history:
            batch |= self._past(frames, self._position)
        if self._tokens is not None:
            rng = np.random.default_rng((self.seed, self._position))
            batch[IMAGE_TOKENS] = self._tokens[rng.integers(len(self._tokens), size=len(frames)), frames]
        self._position += self.batch_size
        return batch

    @property
    def epoch(self) -> float:
        """How often the data has been seen so far."""
        return self._position / self.epoch_size

    def gather(self, frames: NDArray[np.int64]) -> Batch:
        """The batch of given frames, int [B] (rows of the dataset)."""
        data = self.dataset
        batch: Batch = {data.cameras[c]: pictures.take(frames, axis=0) for c, pictures in self._frames.items()}
        for name, column in data.columns.items():
            batch[name] = column[frames]
        batch[ACTION] = self._chunks.take(frames)
        begin, end = self._chunks.given[frames, None], self._chunks.steps[frames, None]
        batch[f"{ACTION}_is_pad"] = (self._offsets < begin) | (self._offsets >= end)
        batch[TASK] = [data.tasks[i] for i in batch["task_index"]]
        return batch

    def _past(self, frames: NDArray[np.int64], position: int) -> Batch:
        """Pictures uint8 [B, P, H, W, 3] of earlier observations, and how old they are."""
        back, rows = self._recalled(frames, position)
        pictures = {
            past_key(self.dataset.cameras[c]): p.take(rows, axis=0).reshape(*back.shape, *p.shape[1:])
            for c, p in self._frames.items()
        }
        return {**pictures, PAST_AGE: back.astype(np.float32)}

    def _recalled(self, frames: NDArray[np.int64], position: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Steps back [B, P] of what is recalled in the batch at a position, and its frames [B * P]."""
        rng = np.random.default_rng((self.seed, position))
        back = sampled(self.dataset.columns["frame_index"][frames], self.history, rng)
        return back, (frames[:, None] - back).ravel()

    def _decode_ahead(self, position: int) -> None:
        """Begin with the pictures of the batch at a position."""
        frames = self._frames_at(position)
        for film in self._on_demand:
            film.ahead(frames)
            if self.history:
                film.ahead(self._recalled(frames, position)[1])

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON state from which :meth:`load_state_dict` continues with the same batches."""
        return {"seed": self.seed, "position": self._position, "epoch_size": self.epoch_size, "data": self._recorded}

    @cached_property
    def _recorded(self) -> int:
        """Tells what is drawn from apart, where it is as much too; what else a dataset holds does not matter."""
        actions, drawn = self.dataset.columns[ACTION], self._weights != 0
        return zlib.crc32(np.ascontiguousarray(actions if drawn.all() else actions[drawn]))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where a loader with this state stood.

        Raises:
            UserError: The state is of another kind of loader, another seed or another set of frames.
        """
        state = {"data": self._recorded, **state}  # older checkpoints do not say
        check_kind(state, self.state_dict())
        for key, mine in (("seed", self.seed), ("epoch_size", self.epoch_size)):
            if state[key] != mine:
                raise UserError(
                    f"the loader's state has {key} {state[key]}, this loader has {mine}: the batches would differ",
                    RESUME_ALIKE,
                )
        if state["data"] != self._recorded:
            what = f"the run that is to go on has learnt from another dataset than {self.dataset.root} in its place"
            raise UserError(what, RESUME_ALIKE)
        self._position = int(state["position"])
        for film in self._on_demand:
            film.forget()

    def _frames_at(self, position: int) -> NDArray[np.int64]:
        """B entries of the endless stream of epochs from a position on, int64 [B]."""
        parts, need = [], self.batch_size
        while need:
            epoch, start = divmod(position, self.epoch_size)
            part = self._epoch_order(epoch)[start : start + need]
            parts.append(part)
            position, need = position + len(part), need - len(part)
        return np.concatenate(parts)

    def _epoch_order(self, epoch: int) -> NDArray[np.int64]:
        """Frames of one epoch in the order in which they are drawn, int64 [epoch size]."""
        if epoch not in self._orders:
            rng = np.random.default_rng((self.seed, epoch))
            size = self.epoch_size
            offset = rng.random()
            drawable = np.flatnonzero(self._weights)
            if (self._weights[drawable] == 1.0).all():
                drawn = drawable
            else:
                edges = np.cumsum(self._weights) * (size / self._weights.sum())
                drawn = np.searchsorted(edges, np.arange(size) + offset, side="right")
                # Rounding may leave the last edge just short of the last draw.
                drawn = np.minimum(drawn, drawable[-1])
            self._orders = {e: o for e, o in self._orders.items() if e == epoch - 1}  # a batch may end in the next
            self._orders[epoch] = rng.permutation(drawn)
        return self._orders[epoch]


def reseeded(state: Any, own: Any) -> Any:
    """A loader's state with the seeds of another one's, whose order of the data is thus kept, from this position on.

    Args:
        state: Of a loader of another process, plain JSON.
        own: Of the loader that is to continue there.
    """
    if isinstance(state, dict) and isinstance(own, dict):
        return {k: own.get(k, v) if k == "seed" else reseeded(v, own.get(k)) for k, v in state.items()}
    if isinstance(state, list) and isinstance(own, list) and len(state) == len(own):
        return [reseeded(one, mine) for one, mine in zip(state, own, strict=True)]
    return state


def check_kind(state: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Refuse a loader the state of another kind of loader, of one dataset where it has several, say.

    Raises:
        UserError: The two have other keys.
    """
    if state.keys() != own.keys():
        what = "one dataset, several of them, or text pairs as well"
        raise UserError(f"'data' is of another kind than what the run was started with ({what})", RESUME_ALIKE)


def _pictures(
    dataset: Dataset,
    cameras: list[str],
    folder: Path | None,
    progress: bool,
    sizes: Mapping[str, tuple[int, int]],
    cache_gb: float,
) -> tuple[dict[str, NDArray[np.uint8] | FramesOnDemand], list[FramesOnDemand]]:
    """Where the pictures of each camera come from, and those cameras whose are decoded on demand."""
    known = [c for c in cameras if c in dataset.cameras]
    over = raw_bytes(dataset, known, sizes) > cache_gb * 1e9
    films = {c: FramesOnDemand(dataset, c, sizes.get(c)) for c in known if over and seekable(dataset, c)}
    kept = open_frames(dataset, [c for c in cameras if c not in films], folder, progress, sizes)
    return {c: films[c] if c in films else kept[c] for c in cameras}, list(films.values())


def _frame_weights(
    dataset: Dataset, episodes: Sequence[int] | None, weights: NDArray[np.floating] | None
) -> NDArray[np.float64]:
    """float64 [N], zero outside the chosen episodes."""
    out = np.ones(dataset.num_frames) if weights is None else np.array(weights, np.float64)
    if out.shape != (dataset.num_frames,) or not np.isfinite(out).all() or (out < 0).any():
        raise UserError(
            f"weights {list(out.shape)} must be finite, non-negative and one a frame of {dataset.root}",
            f"it has {dataset.num_frames} frames",
        )
    if episodes is not None:
        odd = [e for e in episodes if not 0 <= e < dataset.num_episodes]
        if odd:
            raise UserError(f"{dataset.root} has no episode {odd[0]}", f"it has 0 … {dataset.num_episodes - 1}")
        chosen = np.isin(dataset.columns["episode_index"], list(episodes))
        out[~chosen] = 0
    if not out.any():
        raise UserError(f"{dataset.root}: no frame is left to draw from", "check episodes=... and weights=...")
    return out

"""Training batches: an observation, the action chunk that follows it, and nothing decoded on the way.

A batch is a vectorised gather from contiguous columns and memory-mapped frames. Everything random is a function of
(seed, epoch), so the position in the stream is the whole state of a loader and a resumed run sees the same batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vla_stack.data.chunks import ActionChunks
from vla_stack.data.dataset import Dataset, open_dataset
from vla_stack.data.frame_cache import open_frames
from vla_stack.errors import UserError
from vla_stack.schema import ACTION, TASK

Batch = dict[str, Any]


class ChunkLoader:
    """Endless shuffled batches of action chunks; an iterator.

    Each batch holds, for B frames: ``observation.images.<camera>`` uint8 [B, H, W, 3]; ``action`` float32
    [B, horizon, A], which repeats the chunk's last action past its end; ``action_is_pad`` bool [B, horizon], true
    there; ``task`` list[str]; and every other numeric column of the dataset at the frame itself, among them
    ``observation.state`` float32 [B, S], ``index``, ``episode_index`` and ``frame_index`` int64 [B].

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
        cache_dir: Folder of decoded frames; ``<root>.frames`` by default.
        progress: Show a progress bar while frames are decoded for the first time.

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
        cache_dir: str | Path | None = None,
        progress: bool = True,
    ) -> None:
        self.dataset = dataset = root if isinstance(root, Dataset) else open_dataset(root)
        if horizon < 1 or batch_size < 1:
            raise UserError(f"horizon {horizon} and batch_size {batch_size} must be at least 1")
        self.horizon, self.batch_size, self.seed = horizon, batch_size, seed
        self._offsets = np.arange(horizon)
        self._chunks = ActionChunks(dataset, horizon, trainable)
        names = list(dataset.cameras) if cameras is None else list(cameras)
        folder = Path(cache_dir) if cache_dir is not None else None
        self._frames = open_frames(dataset, names, folder, progress, image_sizes)
        if trainable is not None:
            weights = np.where(trainable, 1.0 if weights is None else weights, 0.0)
        self._weights = _frame_weights(dataset, episodes, weights)
        self.epoch_size = int(np.count_nonzero(self._weights))
        self._position = 0
        self._order: tuple[int, NDArray[np.int64]] = (-1, np.empty(0, np.int64))

    def __len__(self) -> int:
        """Batches in one epoch, rounded up."""
        return -(-self.epoch_size // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = self.gather(self._next_frames())
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
        batch[f"{ACTION}_is_pad"] = self._offsets >= self._chunks.steps[frames, None]
        batch[TASK] = [data.tasks[i] for i in batch["task_index"]]
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON state from which :meth:`load_state_dict` continues with the same batches."""
        return {"seed": self.seed, "position": self._position, "epoch_size": self.epoch_size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where a loader with this state stood.

        Raises:
            UserError: The state is of another seed or another set of frames.
        """
        for key, mine in (("seed", self.seed), ("epoch_size", self.epoch_size)):
            if state[key] != mine:
                raise UserError(
                    f"the loader's state has {key} {state[key]}, this loader has {mine}: the batches would differ",
                    "resume with the data, episodes, weights and seed that the run was started with",
                )
        self._position = int(state["position"])

    def _next_frames(self) -> NDArray[np.int64]:
        """The next B entries of the endless stream of epochs, int64 [B]."""
        parts, position, need = [], self._position, self.batch_size
        while need:
            epoch, start = divmod(position, self.epoch_size)
            part = self._epoch_order(epoch)[start : start + need]
            parts.append(part)
            position, need = position + len(part), need - len(part)
        return np.concatenate(parts)

    def _epoch_order(self, epoch: int) -> NDArray[np.int64]:
        """Frames of one epoch in the order in which they are drawn, int64 [epoch size]."""
        if self._order[0] != epoch:
            rng = np.random.default_rng((self.seed, epoch))
            size = self.epoch_size
            edges = np.cumsum(self._weights) * (size / self._weights.sum())
            drawn = np.searchsorted(edges, np.arange(size) + rng.random(), side="right")
            last = np.flatnonzero(self._weights)[-1]  # rounding may leave the last edge just short of the last draw
            self._order = (epoch, rng.permutation(np.minimum(drawn, last)))
        return self._order[1]


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

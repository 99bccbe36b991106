"""Statistics: per episode in LeRobot's format, aggregated by its rule, and exact ones over action chunks.

``meta/stats.json`` is what LeRobot's processors read: count-weighted moments, which are exact, and count-weighted
means of the episodes' quantiles, which are not. Training here uses :func:`load_stats`, where quantiles are exact and
actions are seen as a policy sees them: every (frame, offset) pair of a chunk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vla_stack.data.blocks import Rows, exact
from vla_stack.data.chunks import ActionChunks
from vla_stack.data.dataset import Dataset, open_dataset
from vla_stack.data.stored_stats import stored_stats
from vla_stack.errors import UserError
from vla_stack.schema import ACTION, OBS_STATE

QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}
RELATIVE_ACTION = "action.relative"
Stats = dict[str, NDArray[Any]]


def column_stats(values: NDArray[Any]) -> Stats:
    """Statistics of one column of an episode, [T, *shape] or [T], over time; float64."""
    x = np.asarray(values, np.float64)
    x = x.reshape(len(x), -1) if x.ndim == 1 else x
    stats = {"min": x.min(0), "max": x.max(0), "mean": x.mean(0), "std": x.std(0), "count": np.array([len(x)])}
    return stats | dict(zip(QUANTILES, np.quantile(x, list(QUANTILES.values()), axis=0), strict=True))


class ImageHistogram:
    """Running histogram of a camera's 256 levels, from which its statistics are exact.

    Large pictures are thinned to about 150 pixels a side, as LeRobot does.
    """

    def __init__(self) -> None:
        self._counts = np.zeros((3, 256), np.int64)
        self._frames = 0

    def add(self, image: NDArray[np.uint8]) -> None:
        """Count one uint8 [H, W, 3] frame."""
        step = max(1, min(image.shape[:2]) // 150)
        pixels = image[::step, ::step]
        for channel in range(3):
            self._counts[channel] += np.bincount(pixels[..., channel].ravel(), minlength=256)
        self._frames += 1

    def stats(self) -> Stats:
        """Per channel, [3, 1, 1], of pixels in [0, 1]; ``count`` is the number of frames."""
        level = np.arange(256) / 255.0
        total = self._counts.sum(1)
        mean = self._counts @ level / total
        cumulative = self._counts.cumsum(1)
        out: dict[str, NDArray[Any]] = {
            "min": np.array([level[np.flatnonzero(c)[0]] for c in self._counts]),
            "max": np.array([level[np.flatnonzero(c)[-1]] for c in self._counts]),
            "mean": mean,
            "std": np.sqrt(np.maximum(self._counts @ level**2 / total - mean**2, 0)),
        }
        for name, q in QUANTILES.items():
            out[name] = np.array([level[np.searchsorted(c, q * n)] for c, n in zip(cumulative, total, strict=True)])
        return {k: v.reshape(3, 1, 1) for k, v in out.items()} | {"count": np.array([self._frames])}


def aggregate(parts: Sequence[Mapping[str, Stats]]) -> dict[str, Stats]:
    """Statistics of a dataset from those of its parts, by LeRobot's rule (parallel variance; weighted quantiles)."""
    out: dict[str, Stats] = {}
    for key in parts[0]:
        n = np.array([p[key]["count"][0] for p in parts], np.float64)

        def stack(name: str, key: str = key) -> NDArray[np.float64]:
            return np.stack([p[key][name] for p in parts])

        def weighted(x: NDArray[np.float64], n: NDArray[np.float64] = n) -> NDArray[np.float64]:
            return np.tensordot(n, x, 1) / n.sum()

        mean = weighted(stack("mean"))
        out[key] = {
            "min": stack("min").min(0),
            "max": stack("max").max(0),
            "mean": mean,
            "std": np.sqrt(weighted(stack("std") ** 2 + (stack("mean") - mean) ** 2)),
            "count": np.array([int(n.sum())]),
        } | {name: weighted(stack(name)) for name in QUANTILES}
    return out


def to_json(stats: Mapping[str, Stats]) -> dict[str, dict[str, Any]]:
    """JSON form, as in ``meta/stats.json``."""
    return {key: {name: value.tolist() for name, value in entry.items()} for key, entry in stats.items()}


def from_json(value: Mapping[str, Mapping[str, Any]]) -> dict[str, Stats]:
    """Inverse of :func:`to_json`."""
    return {key: {name: np.asarray(x) for name, x in entry.items()} for key, entry in value.items()}


def _with_room(stats: Stats) -> Stats:
    """Statistics with a range of 1 to both sides of dimensions that never moved.

    What stood still while recording may stand elsewhere on the robot that is driven later; divided by nothing, the
    smallest difference would be all that a policy sees.
    """
    still = stats["max"] == stats["min"]
    room = {"std": 1.0, "min": -1.0, "q01": -1.0, "max": 1.0, "q99": 1.0}
    return stats | {name: np.where(still, stats[name] + by, stats[name]) for name, by in room.items()}


def chunk_rows(
    dataset: Dataset,
    horizon: int,
    relative: NDArray[np.bool_] | None = None,
    trainable: NDArray[np.bool_] | None = None,
) -> Rows:
    """Every action that a chunk policy is trained on: all (frame, offset) without padding.

    Args:
        dataset: An open dataset.
        horizon: Actions per chunk.
        relative: bool [A]; where true, the state at the chunk's first frame is subtracted.
        trainable: bool [N]; as in :class:`~vla_stack.data.loader.ChunkLoader`.
    """
    chunks, states = ActionChunks(dataset, horizon, trainable), dataset.columns[OBS_STATE]
    size = dataset.columns[ACTION].shape[1]

    def take(frames: NDArray[np.int64]) -> NDArray[Any]:
        actions = chunks.unpadded(frames)
        if relative is None:
            return actions
        return actions - np.repeat(states[frames, :size] * relative, chunks.steps[frames], axis=0)

    frames = None if trainable is None else np.flatnonzero(trainable)
    steps = chunks.steps if frames is None else chunks.steps[frames]
    return Rows(take, frames, steps, horizon, size, dataset.columns.release)


def load_stats(
    root: str | Path | Dataset,
    horizon: int,
    relative: NDArray[np.bool_] | Sequence[bool] | None = None,
    trainable: NDArray[np.bool_] | None = None,
    progress: bool = True,
) -> dict[str, Stats]:
    """Normalisation statistics of a dataset, exact, float32; computed once and kept beside it (``stored_stats.py``).

    Args:
        root: Dataset folder, or a dataset that is open already.
        horizon: Actions per chunk.
        relative: bool [A]; dimensions learned relative to the state at the chunk's start.
        trainable: bool [N]; frames that are trained on, all by default. The others do not count.
        progress: Show a progress bar, and a line of what was done, where there is much to do.

    Returns:
        ``observation.state`` over frames, and over all (frame, offset) pairs without padding ``action`` (absolute) or,
        if ``relative`` is given, ``action.relative`` (absolute where the mask is false). Each holds ``mean``,
        ``std``, ``min``, ``max``, ``q01``, ``q99``, in the column's unit. Quantiles that coincide are the extremes; a
        state that never changes has a range of 1 to both sides and a deviation of 1.

    Raises:
        UserError: The dataset cannot be read, or the mask does not fit it.
    """
    dataset = root if isinstance(root, Dataset) else open_dataset(root)
    actions, states = dataset.columns[ACTION], dataset.columns[OBS_STATE]
    mask = None if relative is None else np.asarray(relative, bool)
    if mask is not None and (mask.shape != (actions.shape[1],) or states.shape[1] < actions.shape[1]):
        raise UserError(
            f"{dataset.root}: a relative mask {list(mask.shape)} does not fit action[{actions.shape[1]}] "
            f"and state[{states.shape[1]}]",
            "give one bool per action dimension; the state must begin with what the action commands",
        )
    chunks = chunk_rows(dataset, horizon, mask, trainable)
    if not chunks.steps.any():
        raise UserError(f"{dataset.root}: no frame is left to train on", "check data.episodes and data.interventions")

    def compute() -> dict[str, Stats]:
        ones = np.ones_like(chunks.steps)
        once = Rows(states.__getitem__, chunks.frames, ones, 1, states.shape[1], dataset.columns.release)
        return {
            OBS_STATE: _with_room(exact(once, "statistics of states", progress)),
            ACTION if mask is None else RELATIVE_ACTION: exact(chunks, "statistics of chunks", progress),
        }

    return stored_stats(dataset, (horizon, mask, trainable, chunks.steps), compute, progress)

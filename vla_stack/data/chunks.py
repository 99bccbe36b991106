"""Chunk labels: where a dataset says what an expert would have done from a frame on, that is the frame's chunk.

Two columns. ``chunk.action`` float32 [H * A] is a chunk of H actions (row-major [H, A]; LeRobot's columns have one
axis), which repeats its last action past its end. ``chunk.steps`` int64 is how many of them are labels; 0 where a frame
has no such label, e.g. one that a person recorded: its chunk is the series of recorded actions. The names lie outside
``action*``, so that no loader takes them for a policy's output.

A dataset may have a third, ``chunk.given`` int64: so many of a label's first actions are what the robot executed while
a chunk was computed, and no label: what the expert would do follows them. A policy is to continue them, whatever they
are (``max_delay`` of the native one), and learns nothing of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from vla_stack.data.dataset import CHUNK, CHUNK_GIVEN, CHUNK_STEPS, Dataset
from vla_stack.data.features import Column
from vla_stack.data.labels import reach
from vla_stack.errors import UserError
from vla_stack.schema import ACTION


def chunk_columns(horizon: int, action_dim: int, late: bool = False) -> dict[str, Column]:
    """The two columns, or three where chunks come late, for ``EpisodeRecorder(extra=...)``."""
    columns = {CHUNK: Column("float32", (horizon * action_dim,)), CHUNK_STEPS: Column("int64")}
    return columns | ({CHUNK_GIVEN: Column("int64")} if late else {})


def without_chunks(count: int, size: int) -> dict[str, NDArray[Any]]:
    """The columns of ``count`` frames that have no chunk label; ``size`` is H * A."""
    none = np.zeros(count, np.int64)
    return {CHUNK: np.zeros((count, size), np.float32), CHUNK_STEPS: none, CHUNK_GIVEN: none}


class ActionChunks:
    """The action chunk of every frame of a dataset: its label where it has one, the series of actions elsewhere.

    Args:
        dataset: An open dataset of N frames.
        horizon: Actions per chunk.
        trainable: bool [N], which frames may be trained on; all where it is not given. A series ends where
            :func:`vla_stack.data.labels.reach` says; a label depends on no other frame.

    Attributes:
        steps: int64 [N], how many actions a frame's chunk has, at least 0 and at most ``horizon``; the rest is padding.
            0 where a frame is not trainable.
        given: int64 [N], how many of its first ones were executed meanwhile, and are no labels.

    Raises:
        UserError: The dataset's chunk labels are shorter than the horizon.
    """

    def __init__(self, dataset: Dataset, horizon: int, trainable: NDArray[np.bool_] | None = None) -> None:
        self._actions = dataset.columns[ACTION]
        frames = np.arange(dataset.num_frames)
        steps = reach(dataset, trainable) if trainable is not None else np.subtract(dataset.frame_end, frames, frames)
        given = dataset.columns[CHUNK_STEPS] if CHUNK in dataset.columns else None
        self._offsets = np.arange(horizon)
        self._labelled = given > 0 if given is not None else np.zeros(dataset.num_frames, bool)
        if given is not None and self._labelled.any():
            self._labels = dataset.columns[CHUNK].reshape(dataset.num_frames, -1, self._actions.shape[1])
            if (longest := self._labels.shape[1]) < horizon:
                raise UserError(
                    f"{dataset.root}: its chunk labels hold {longest} actions, the policy's chunks {horizon}",
                    f"collect with --branch {horizon}, or train on the series of actions with data.branched=false",
                )
            steps = np.where(self._labelled & (steps > 0), given, steps)
        self.steps = np.minimum(steps, horizon, out=steps)
        late = dataset.columns[CHUNK_GIVEN] if self._labelled.any() and CHUNK_GIVEN in dataset.columns else 0
        self.given = np.where(self._labelled, late, 0)

    def take(self, frames: NDArray[np.int64]) -> NDArray[np.float32]:
        """Chunks [B, horizon, A] of given frames; the last label repeats past a chunk's end."""
        last = np.maximum(self.steps[frames], 1)[:, None] - 1
        # A label may reach past the dataset's last frame, where there is no series.
        series = np.minimum(frames[:, None] + np.minimum(self._offsets, last), len(self._actions) - 1)
        chunks = self._actions[series]
        rows = np.flatnonzero(self._labelled[frames])
        if len(rows):
            chunks[rows] = self._labels[frames[rows, None], np.minimum(self._offsets, last[rows])]
        return chunks

    def unpadded(self, frames: NDArray[np.int64]) -> NDArray[np.float32]:
        """Chunks of given frames without what pads them, [P, A]: ``steps`` rows a frame, one frame after the other."""
        steps = self.steps[frames]
        begins = np.cumsum(steps) - steps
        rows = np.arange(steps.sum())
        # A label may reach past the dataset's last frame, where there is no series.
        actions = self._actions.take(np.repeat(frames - begins, steps) + rows, axis=0, mode="clip")
        labelled = np.flatnonzero(np.repeat(self._labelled[frames], steps))
        if len(labelled):
            of = np.repeat(np.arange(len(frames)), steps)[labelled]
            actions[labelled] = self._labels[frames[of], labelled - begins[of]]
        return actions

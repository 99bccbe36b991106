"""Keyframes: the next moment of an episode at which a gripper opens or closes, and where the robot then is.

What the hand is going to do next says where the thing is that the instruction means, at every frame and without the
detours of the way there. Keyframes of demonstrations are found from gripper commands alone, as in keyframe discovery
(James and Davison 2021, arXiv:2105.14829), so any dataset of a robot with a gripper has them, also one of people. An
auxiliary head that predicts them (``methods/imitation``) makes a policy see earlier what it is told to go to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from vla_stack.data.dataset import Dataset
from vla_stack.schema import ACTION, OBS_STATE

KEYFRAME = "keyframe"  # float32 [B, A], a column that is made for training and stands in no file
BLOCK, LEAST_STD = 1 << 18, 1e-6


def next_keyframes(commands: NDArray[np.floating], episode: NDArray[np.integer]) -> NDArray[np.int64]:
    """Row [N] of the keyframe that comes after each frame: the first at which a gripper has changed sides, else the
    episode's last.

    Args:
        commands: Of the grippers, [N, G]; the sides are those of the middle of each one's range. G may be 0.
        episode: Index of each frame's episode [N]; an episode's frames follow one another.
    """
    n = len(commands)
    if not n:
        return np.zeros(0, np.int64)
    closed = commands > (commands.min(0) + commands.max(0)) / 2
    last = np.append(episode[1:] != episode[:-1], True)
    changes = np.append((closed[1:] != closed[:-1]).any(1), False) & ~last  # between a frame and its successor
    rows = np.arange(n)
    marked = np.where(last, rows, np.where(changes, rows + 1, n))  # of a frame that is followed by an event
    return np.minimum.accumulate(marked[::-1])[::-1]


def keyframe_offsets(dataset: Dataset, grippers: Sequence[int], relative: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Action [N, A] at the next keyframe of every frame, in the dataset's units.

    Args:
        dataset: An open dataset of N frames.
        grippers: Action dimensions that are grippers.
        relative: bool [A], dimensions from which the frame's own state is taken off; the state's first A entries
            measure them.
    """
    actions = dataset.columns[ACTION]
    goals = actions[next_keyframes(actions[:, list(grippers)], dataset.columns["episode_index"])]
    if relative.any():
        dims = np.flatnonzero(relative)
        goals[:, dims] -= dataset.columns[OBS_STATE][:, dims]
    return goals


def add_keyframes(datasets: Sequence[Dataset], grippers: Sequence[int], relative: NDArray[np.bool_]) -> None:
    """Give open datasets of one robot the column ``keyframe``, float32 [N, A], of zero mean and unit variance over all.

    See :func:`keyframe_offsets`.
    """
    offsets = [keyframe_offsets(dataset, grippers, relative) for dataset in datasets]
    count = sum(map(len, offsets))
    mean = sum(offset.sum(0, dtype=np.float64) for offset in offsets) / count
    square = sum(np.square(block - mean).sum(0) for offset in offsets for block in _blocks(offset)) / count
    std = np.sqrt(square)
    std[std < LEAST_STD] = 1.0  # what never differs is no target
    for dataset, offset in zip(datasets, offsets, strict=True):
        for block in _blocks(offset):
            block[:] = (block - mean) / std
        dataset.columns[KEYFRAME] = offset


def _blocks(rows: NDArray[np.float32]) -> Iterator[NDArray[np.float32]]:
    """Views of a large array, of which a copy in float64 is small."""
    for at in range(0, len(rows), BLOCK):
        yield rows[at : at + BLOCK]

"""Episodes on disk and training batches: recorder, repair, decoded-frame cache, loader, statistics.

Nothing here imports torch or lerobot; datasets are LeRobotDataset v3 directories that LeRobot's own loader opens.
Names are resolved on first use so that recording does not pay for loading and the other way round.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_EXPORTS = {
    "ChunkLoader": "loader",
    "Column": "features",
    "Dataset": "dataset",
    "EpisodeFacts": "sidecar",
    "EpisodeRecorder": "recorder",
    "RepairReport": "integrity",
    "demo_labels": "labels",
    "frame_labels": "labels",
    "label_columns": "labels",
    "load_stats": "stats",
    "open_dataset": "dataset",
    "read_robot_spec": "features",
    "repair": "integrity",
}
__all__ = [
    "ChunkLoader",
    "Column",
    "Dataset",
    "EpisodeFacts",
    "EpisodeRecorder",
    "RepairReport",
    "demo_labels",
    "frame_labels",
    "label_columns",
    "load_stats",
    "open_dataset",
    "read_robot_spec",
    "repair",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)

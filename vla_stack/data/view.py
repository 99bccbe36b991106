"""``vla data view``: an episode in Rerun, pictures, state, action and labels on one time line."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from vla_stack.data.dataset import open_dataset
from vla_stack.data.labels import CONTROL_SOURCE, SEGMENT_TYPE
from vla_stack.data.loader import ChunkLoader
from vla_stack.errors import UserError
from vla_stack.intervention import Control, Segment
from vla_stack.lerobot_units import dimension_names
from vla_stack.schema import ACTION, OBS_STATE


def view(root: Path, episode: int, save: Path | None = None) -> int:
    """Show an episode, or write it to a file.

    Args:
        root: Dataset folder.
        episode: Its index.
        save: ``.rrd`` file to write instead of opening the viewer.

    Returns:
        Frames shown.

    Raises:
        UserError: There is no such episode, the dataset has no actions, or Rerun is not installed.
    """
    try:
        import rerun as rr
    except ModuleNotFoundError:
        raise UserError("`vla data view` needs the package 'rerun-sdk'", 'pip install "vla-stack[viz]"') from None
    dataset = open_dataset(root)
    if not 0 <= episode < dataset.num_episodes:
        raise UserError(f"{root} has no episode {episode}", f"it has 0 … {dataset.num_episodes - 1}")
    frames = np.arange(dataset.episode_from[episode], dataset.episode_to[episode])
    loader = ChunkLoader(dataset, 1, len(frames), episodes=[episode])  # before a viewer opens: it may be refused
    recording = rr.RecordingStream("vla_data", recording_id=f"{root.name}-{episode}")
    recording.spawn() if save is None else recording.save(save)
    for i, frame in enumerate(frames):
        row = loader.gather(frames[i : i + 1])
        recording.set_time("frame", sequence=i)
        recording.set_time("time", duration=float(dataset.columns["timestamp"][frame]))
        for camera, key in dataset.cameras.items():
            recording.log(f"cameras/{camera}", rr.Image(row[key][0]).compress())
        for key in (OBS_STATE, ACTION):
            values = row[key].reshape(-1) if key in row else []
            names = dimension_names(dataset.features[key]) if key in row else None
            for name, value in zip(names or range(len(values)), values, strict=True):
                recording.log(f"{key}/{name}", rr.Scalars(float(value)))
        if SEGMENT_TYPE in dataset.columns:
            kind, source = (int(dataset.columns[k][frame]) for k in (SEGMENT_TYPE, CONTROL_SOURCE))
            recording.log("labels/segment_type", rr.Scalars(kind))
            recording.log("labels", rr.TextLog(f"{Segment(kind).name.lower()}, by {Control(source).name.lower()}"))
    recording.flush()
    return len(frames)

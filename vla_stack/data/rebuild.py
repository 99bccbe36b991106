"""Rows of ``meta/episodes`` made anew from the files that they describe: those say everything but where they are."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from vla_stack.data import stats as statistics
from vla_stack.data.dataset import read_parquet, read_tasks
from vla_stack.data.features import NUMERIC
from vla_stack.data.layout import CHUNK_SIZE, EPISODES_PATH, VIDEO_PATH, next_file, place
from vla_stack.data.store import row_table
from vla_stack.data.video import decode
from vla_stack.errors import UserError

Row = Mapping[str, Any]


def rebuild_rows(root: Path, info: Row, data: Mapping[int, Path], previous: Row | None) -> pa.Table:
    """The rows of consecutive episodes whose frames are all there, for one new file of ``meta/episodes``.

    Args:
        root: Dataset folder.
        info: ``meta/info.json``.
        data: Episode -> the parquet file with its frames.
        previous: The row of the episode before them; None if the first one is among them.

    Returns:
        [E] rows in LeRobot's columns, statistics included.

    Raises:
        UserError: The files do not say enough, or are not those of a recorder of ours; names the first one.
    """
    home, rows = _free_file(root, info, previous), []
    for episode, path in data.items():
        rows.append(_row(root, info, episode, path, previous, home))
        previous = rows[-1].to_pylist()[0]
    return pa.concat_tables(rows).combine_chunks()


def _row(root: Path, info: Row, episode: int, data: Path, previous: Row | None, home: dict[str, int]) -> pa.Table:
    table = read_parquet(data)
    table = table.filter(pc.equal(table["episode_index"], episode)).combine_chunks()
    start, length = previous["dataset_to_index"] if previous else 0, table.num_rows
    if not np.array_equal(table["index"].to_numpy(), np.arange(start, start + length)):
        raise UserError(f"{data} does not go on where episode {episode - 1} ends")
    tasks = read_tasks(root)
    row: dict[str, Any] = {
        "episode_index": episode,
        "tasks": [tasks[i] for i in dict.fromkeys(table["task_index"].to_pylist())],
        "length": length,
        "dataset_from_index": start,
        "dataset_to_index": start + length,
    }
    chunk, file = (int(n) for n in re.findall(r"-(\d+)", f"{data.parent.name}/{data.stem}"))
    row |= home | {"data/chunk_index": chunk, "data/file_index": file}
    stats: dict[str, statistics.Stats] = {}
    for key, feature in info["features"].items():
        if feature["dtype"] == "video":
            where = _following(info, previous, f"videos/{key}")
            template = str(info.get("video_path") or VIDEO_PATH)
            path = place(root, template, where["chunk_index"], where["file_index"], video_key=key)
            pictures = _histogram(image for _, image in decode(path))
            if pictures["count"][0] != length:
                raise UserError(f"{path} holds {pictures['count'][0]} frames, episode {episode} has {length}")
            row |= {f"videos/{key}/{name}": n for name, n in where.items()}
            row |= {f"videos/{key}/from_timestamp": 0.0, f"videos/{key}/to_timestamp": length / info["fps"]}
            stats[key] = pictures
        elif feature["dtype"] == "image":
            stats[key] = _histogram(_decoded(image["bytes"]) for image in table[key].to_pylist())
        elif feature["dtype"] in NUMERIC:
            stats[key] = statistics.column_stats(np.array(table[key].to_pylist()))
    return row_table(row, stats)


def _following(info: Row, previous: Row | None, prefix: str) -> dict[str, int]:
    """Chunk and file index of the file after the previous episode's, as a recorder of ours counts them."""
    chunk, file = 0, 0
    if previous:
        before = previous[f"{prefix}/chunk_index"], previous[f"{prefix}/file_index"]
        chunk, file = next_file(*before, info.get("chunks_size", CHUNK_SIZE))
    return {"chunk_index": chunk, "file_index": file}


def _free_file(root: Path, info: Row, previous: Row | None) -> dict[str, int]:
    """Where the row goes: a file of ``meta/episodes`` that is not there yet."""
    where = _following(info, previous, "meta/episodes")
    while (root / EPISODES_PATH.format(**where)).exists():
        where = dict(zip(where, next_file(*where.values()), strict=True))
    return {f"meta/episodes/{name}": n for name, n in where.items()}


def _histogram(images: Iterable[NDArray[np.uint8]]) -> statistics.Stats:
    histogram = statistics.ImageHistogram()
    for image in images:
        histogram.add(image)
    return histogram.stats()


def _decoded(png: bytes) -> NDArray[np.uint8]:
    image = cv2.imdecode(np.frombuffer(png, np.uint8), cv2.IMREAD_COLOR)
    if image is None:
        raise UserError("an image of its data cannot be decoded")
    return np.asarray(cv2.cvtColor(image, cv2.COLOR_BGR2RGB), np.uint8)

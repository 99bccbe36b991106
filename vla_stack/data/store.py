"""The committed half of recording: a dataset folder that grows by whole episodes or not at all.

One episode is one parquet file and one video per camera, and a row of ``meta/episodes``, whose newest file is rewritten
with it (a file of 150 columns for each episode would take 14 ms each to open). LeRobot's writer instead appends to open
files, whose contents are lost if the process dies before ``finalize()``, and reopening it after each episode costs
~0.2 s. Files are written and flushed under ``.recording/``, renamed into place, and ``meta/info.json`` is replaced
last: an episode exists once info.json counts it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from vla_stack import locks
from vla_stack.data import digests
from vla_stack.data import stats as statistics
from vla_stack.data.dataset import read_episode_rows, read_parquet, read_tasks
from vla_stack.data.features import Features, read_robot_spec
from vla_stack.data.layout import (
    CHUNK_SIZE,
    DATA_PATH,
    EPISODES_PATH,
    INFO,
    ROBOT,
    STAGING,
    STATS,
    TASKS,
    VERSION,
    VIDEO_PATH,
    encode_json,
    make_folder,
    next_file,
    place,
    read_info,
    read_json,
    replace_file,
    sync_file,
    sync_folder,
)
from vla_stack.data.sidecar import write_facts
from vla_stack.errors import UserError
from vla_stack.schema import RobotSpec

ROWS_PER_FILE = 200  # of meta/episodes: bounds what is rewritten with each episode


@dataclass(frozen=True)
class Episode:
    """A finished episode on its way to the disk.

    Attributes:
        table: Its rows, one column a feature, videos excepted. Numbered as if it were the only episode of a dataset:
            its place is known when it is committed.
        videos: Feature key -> encoded file in the staging folder.
        stats: Statistics by feature.
        tasks: Distinct instructions, in order of appearance.
        facts: Its row of the sidecar, see ``sidecar.py``; None where the dataset has no label columns.
    """

    table: pa.Table
    videos: Mapping[str, Path]
    stats: Mapping[str, statistics.Stats]
    tasks: tuple[str, ...]
    facts: dict[str, Any] | None = None


@contextlib.contextmanager
def locked(root: Path) -> Iterator[Path]:
    """Hold the dataset's writer lock; gives the folder for unfinished files.

    Raises:
        UserError: Another process holds it, or a link leads out of the folder.
    """
    locks.check_links(root)
    staging = root / STAGING
    staging.mkdir(parents=True, exist_ok=True)
    with locks.locked(staging / "lock", root, "wait for it to end, or record into another folder"):
        yield staging


class EpisodeStore:
    """Appends episodes to a dataset folder. The caller holds :func:`locked`.

    Args:
        root: Dataset folder.
        spec: The robot; ``meta/robot.json``.
        features: Column descriptions.

    Raises:
        UserError: The folder holds another kind of dataset, or something else.
    """

    def __init__(self, root: Path, spec: RobotSpec, features: Features) -> None:
        self.root = root
        self.staging = root / STAGING
        if (root / INFO).exists():
            self._open(spec, features)
        else:
            self._create(spec, features)

    @property
    def num_episodes(self) -> int:
        return int(self.info["total_episodes"])

    @property
    def num_frames(self) -> int:
        return int(self.info["total_frames"])

    def task_index(self, task: str) -> int:
        """Index of an instruction; a new one becomes durable with the next episode."""
        if task not in self.tasks:
            self.tasks.append(task)
        return self.tasks.index(task)

    def _create(self, spec: RobotSpec, features: Features) -> None:
        ours = {STAGING, ".pending", "meta"}
        foreign = sorted(p.name for p in self.root.iterdir() if p.name not in ours)
        if foreign:
            raise UserError(f"{self.root} is not a dataset but holds '{foreign[0]}'", "choose an empty or a new folder")
        fps = int(spec.rate_hz) if float(spec.rate_hz).is_integer() else spec.rate_hz
        videos = any(ft["dtype"] == "video" for ft in features.values())
        self.info: dict[str, Any] = {
            "codebase_version": VERSION,
            "robot_type": spec.name,
            "total_episodes": 0,
            "total_frames": 0,
            "total_tasks": 0,
            "chunks_size": CHUNK_SIZE,
            "data_files_size_in_mb": 100,
            "video_files_size_in_mb": 200,
            "fps": fps,
            "splits": {},
            "data_path": DATA_PATH,
            "video_path": VIDEO_PATH if videos else None,
            "features": features,
        }
        self.tasks: list[str] = []
        self._stats: dict[str, statistics.Stats] | None = None
        self._last: dict[str, Any] | None = None
        self._rows: pa.Table | None = None
        digests.begin(self.root)
        digests.write_json(self.root, ROBOT, spec.to_json())
        digests.write_json(self.root, INFO, self.info)

    def _open(self, spec: RobotSpec, features: Features) -> None:
        self.info = read_info(self.root)
        check_same(self.root, read_robot_spec(self.root), spec, self.info["features"], features)
        rows = read_episode_rows(self.root)
        if len(rows) != self.num_episodes:
            raise UserError(
                f"{self.root}/meta/episodes has {len(rows)} episodes, {INFO} counts {self.num_episodes}",
                f"run `vla data repair {self.root}`",
            )
        self._last = rows[-1] if rows else None
        self._rows = read_parquet(self._path(EPISODES_PATH, rows[-1], "meta/episodes")) if rows else None
        self.tasks = list(read_tasks(self.root)) if (self.root / TASKS).exists() else []
        has_stats = self._last is not None and (self.root / STATS).exists()
        self._stats = statistics.from_json(read_json(self.root / STATS)) if has_stats else None

    def commit(self, episode: Episode) -> int:
        """Make an episode part of the dataset; durable on return.

        Returns:
            The index of the episode.

        Raises:
            OSError: Writing failed, for example on a full disk; the dataset is as it was before.
        """
        episode, length = self._placed(episode), episode.table.num_rows
        row, rows = self._append_row(episode, length)
        moves = {self.staging / "data.parquet": self._path(DATA_PATH, row, "data")}
        digests.write_pages(episode.table, self.staging / "data.parquet")
        for key, path in episode.videos.items():
            moves[path] = self._path(VIDEO_PATH, row, f"videos/{key}", video_key=key)
        digests.write_pages(rows, self.staging / "episodes.parquet")
        moves[self.staging / "episodes.parquet"] = self._path(EPISODES_PATH, row, "meta/episodes")

        info = self.info | {
            "total_episodes": self.num_episodes + 1,
            "total_frames": self.num_frames + length,
            "total_tasks": len(self.tasks),
            "splits": {"train": f"0:{self.num_episodes + 1}"},
        }
        stats = dict(episode.stats)
        stats = statistics.aggregate([self._stats, stats]) if self._stats else stats
        try:
            if episode.facts is not None:
                write_facts(self.root, [episode.facts])
            self._publish(moves, stats, info)
        except BaseException as e:
            if read_info(self.root)["total_episodes"] == self.num_episodes:
                self._undo(moves)
                raise
            # It is counted, so it stands: whoever was told otherwise would record it again.
            self._adopt(info, stats, row, rows)
            if not isinstance(e, OSError):
                raise
        else:
            self._adopt(info, stats, row, rows)
        return self.num_episodes - 1

    def _adopt(
        self, info: dict[str, Any], stats: dict[str, statistics.Stats], row: dict[str, Any], rows: pa.Table
    ) -> None:
        self.info, self._stats, self._last, self._rows = info, stats, row, rows

    def _placed(self, episode: Episode) -> Episode:
        """The episode with the numbers that it gets as the next one of this dataset."""
        table, stats = episode.table, dict(episode.stats)
        tasks = np.array([self.task_index(task) for task in episode.tasks])
        numbers = {
            "episode_index": np.full(table.num_rows, self.num_episodes),
            "index": np.arange(table.num_rows) + self.num_frames,
            "task_index": tasks[table["task_index"].to_numpy()],
        }
        for name, values in numbers.items():
            table = table.set_column(table.column_names.index(name), name, pa.array(values))
            stats[name] = statistics.column_stats(values)
        return replace(episode, table=table, stats=stats)

    def _publish(self, moves: Mapping[Path, Path], stats: Mapping[str, statistics.Stats], info: dict[str, Any]) -> None:
        if len(self.tasks) != self.info["total_tasks"]:
            write_tasks(self.root, self.tasks)
        texts = {STATS: encode_json(statistics.to_json(stats)), INFO: encode_json(info)}
        names: dict[str, Path | bytes] = {t.relative_to(self.root).as_posix(): source for source, t in moves.items()}
        for source in moves:
            sync_file(source)
        digests.record(self.root, names | texts)
        for source, target in moves.items():
            make_folder(target.parent)
            _before(source).unlink(missing_ok=True)
            if target.exists():  # the newest file of meta/episodes; a second name needs no space on a full disk
                os.link(target, _before(source))
            os.replace(source, target)
        for folder in {target.parent for target in moves.values()}:
            sync_folder(folder)
        for name, text in texts.items():  # the last one is the commit
            replace_file(self.root / name, text)
        for source in moves:
            _before(source).unlink(missing_ok=True)

    def _undo(self, moves: Mapping[Path, Path]) -> None:
        """Take back what was moved; a target whose source is still there is an earlier commit's."""
        for source, target in moves.items():
            if source.exists():
                source.unlink()
                _before(source).unlink(missing_ok=True)
            elif _before(source).exists():
                os.replace(_before(source), target)
            else:
                target.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # `repair` aggregates them anew
            if self._stats:
                digests.write_json(self.root, STATS, statistics.to_json(self._stats))
            else:
                (self.root / STATS).unlink(missing_ok=True)

    def _path(self, template: str, row: Mapping[str, Any], prefix: str, **names: str) -> Path:
        return place(self.root, template, row[f"{prefix}/chunk_index"], row[f"{prefix}/file_index"], **names)

    def _append_row(self, episode: Episode, length: int) -> tuple[dict[str, Any], pa.Table]:
        """The episode's row of ``meta/episodes``, in LeRobot's columns, and the file that will hold it."""
        row: dict[str, Any] = {
            "episode_index": self.num_episodes,
            "tasks": list(episode.tasks),
            "length": length,
            "dataset_from_index": self.num_frames,
            "dataset_to_index": self.num_frames + length,
        }
        row |= self._next("meta/episodes") | self._next("data")
        for key in episode.videos:
            row |= self._next(f"videos/{key}")
            row |= {f"videos/{key}/from_timestamp": 0.0, f"videos/{key}/to_timestamp": length / self.info["fps"]}
        table = row_table(row, episode.stats)
        if self._rows is None or self._rows.schema != table.schema or self._rows.num_rows >= ROWS_PER_FILE:
            return row, table
        row |= {k: v for k, v in (self._last or {}).items() if k.startswith("meta/episodes/")}
        return row, pa.concat_tables([self._rows, row_table(row, episode.stats)]).combine_chunks()

    def _next(self, prefix: str) -> dict[str, int]:
        chunk, file = 0, 0
        if self._last is not None:
            size = self.info.get("chunks_size", CHUNK_SIZE)
            chunk, file = next_file(self._last[f"{prefix}/chunk_index"], self._last[f"{prefix}/file_index"], size)
        return {f"{prefix}/chunk_index": chunk, f"{prefix}/file_index": file}


def _before(source: Path) -> Path:
    """What the target of a staged file was until the file took its place."""
    return source.with_name(f"{source.name}.before")


def row_table(row: Mapping[str, Any], stats: Mapping[str, statistics.Stats]) -> pa.Table:
    """A row of ``meta/episodes``, followed by the statistics of its episode."""
    columns: dict[str, pa.Array] = {k: pa.array([v]) for k, v in row.items()}
    for key, entry in stats.items():
        for name, value in entry.items():
            kind: pa.DataType = pa.int64() if name == "count" else pa.float64()
            for _ in value.shape:
                kind = pa.list_(kind)
            columns[f"stats/{key}/{name}"] = pa.array([value.tolist()], kind)
    return pa.table(columns)


def write_tasks(root: Path, tasks: list[str]) -> None:
    """Replace ``meta/tasks.parquet``, whose index, to pandas and so to LeRobot, is the instruction."""
    table = pa.table({"task_index": pa.array(range(len(tasks)), pa.int64()), "task": pa.array(tasks, pa.string())})
    types = {"task_index": ("int64", "int64"), "task": ("unicode", "object")}
    columns = [
        {"name": name, "field_name": name, "pandas_type": a, "numpy_type": b, "metadata": None}
        for name, (a, b) in types.items()
    ]
    describe = {"index_columns": ["task"], "column_indexes": [], "columns": columns, "pandas_version": "2.2.0"}
    digests.write_parquet(root, TASKS, table.replace_schema_metadata({"pandas": json.dumps(describe)}))


def check_same(
    root: Path,
    have: RobotSpec,
    spec: RobotSpec,
    columns: Features,
    features: Features,
    other: str = "this recording",
    remedy: str = "record into another folder",
) -> None:
    """Raise :class:`UserError` naming the first difference between a dataset and what would be joined to it.

    Args:
        root: The dataset's folder.
        have: Its robot.
        spec: The robot of the other.
        columns: Its features.
        features: The features of the other.
        other: What the other is called.
        remedy: What to do about a difference.
    """
    if have.fingerprint() != spec.fingerprint():
        a, b = have.to_json(), spec.to_json()
        key = next((k for k in a if k != "name" and a[k] != b[k]), "units")
        raise UserError(f"{root} was recorded on a robot whose {key} differ from those of {other}", remedy)
    for key in sorted(set(columns) ^ set(features)):
        where = "the dataset" if key in columns else other
        raise UserError(f"{root}: column '{key}' is only in {where}", remedy)
    for key, ft in features.items():
        if (columns[key]["dtype"], list(columns[key]["shape"])) != (ft["dtype"], list(ft["shape"])):
            raise UserError(
                f"{root}: '{key}' is {columns[key]['dtype']}{list(columns[key]['shape'])} in the dataset and "
                f"{ft['dtype']}{list(ft['shape'])} in {other}",
                remedy,
            )


def clear_staging(root: Path) -> None:
    """Delete what an unfinished episode left behind."""
    shutil.rmtree(root / STAGING, ignore_errors=True)

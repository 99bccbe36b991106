"""A LeRobotDataset v3 opened for reading: its small columns as contiguous arrays, its episodes, its sources of frames.

Works for every v3 dataset, video or image, whoever wrote it. Everything that training relies on is checked here once,
so that a broken file is a sentence at the start and not a wrong batch later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from vla_stack.data import digests
from vla_stack.data.columns import Columns, fill
from vla_stack.data.features import NUMERIC
from vla_stack.data.layout import INFO, ROBOT, SIDECAR, STATS, TASKS, place, read_info
from vla_stack.errors import UserError
from vla_stack.schema import ACTION, OBS_STATE, camera_name

CAMERA_DTYPES = ("video", "image")
BLOCK = 1 << 20  # frames that are checked at a time
ABSURD = 1e6  # a value so many times larger than 1, and than half of its column, is damage
CHUNK = "chunk.action"  # columns of chunk labels, see vla_stack.data.chunks
CHUNK_STEPS = "chunk.steps"
CHUNK_GIVEN = "chunk.given"


@dataclass(frozen=True)
class Dataset:
    """An open dataset of N frames in E episodes.

    Attributes:
        root: Its folder.
        info: ``meta/info.json``.
        tasks: Instructions by ``task_index``.
        columns: Column name -> [N, *shape], or [N] for scalars. Cameras are not among them.
        episodes: One row per episode of ``meta/episodes``, without the statistics.
        episode_from: int64 [E], first frame of each episode.
        episode_to: int64 [E], one past its last frame.
        frame_end: int64 [N], ``episode_to`` of each frame's episode.
    """

    root: Path
    info: dict[str, Any]
    tasks: tuple[str, ...]
    columns: Columns
    episodes: tuple[dict[str, Any], ...]
    episode_from: NDArray[np.int64]
    episode_to: NDArray[np.int64]
    frame_end: NDArray[np.int64]

    @property
    def num_frames(self) -> int:
        return len(self.frame_end)

    @property
    def num_episodes(self) -> int:
        return len(self.episodes)

    @property
    def fps(self) -> float:
        return float(self.info["fps"])

    @property
    def features(self) -> dict[str, dict[str, Any]]:
        return self.info["features"]

    @property
    def cameras(self) -> dict[str, str]:
        """Camera name -> column, in the dataset's order; depth maps are not cameras here."""
        return {
            camera_name(key): key
            for key, ft in self.features.items()
            if ft["dtype"] in CAMERA_DTYPES and 3 in (ft["shape"][0], ft["shape"][2])
        }

    def image_size(self, camera: str) -> tuple[int, int]:
        """Recorded height and width; some datasets name the channels first."""
        a, b, c = self.features[self.cameras[camera]]["shape"]
        return (a, b) if c == 3 else (b, c)

    def data_file(self, episode: int) -> Path:
        row = self.episodes[episode]
        return place(self.root, self.info["data_path"], row["data/chunk_index"], row["data/file_index"])

    def video_file(self, episode: int, key: str) -> Path:
        row = self.episodes[episode]
        numbers = row[f"videos/{key}/chunk_index"], row[f"videos/{key}/file_index"]
        return place(self.root, self.info["video_path"], *numbers, video_key=key)


def read_parquet(path: Path, wanted: Callable[[str], bool] = lambda name: True) -> pa.Table:
    """Read those columns of a parquet file whose name is wanted.

    Raises:
        UserError: It is missing or was never finished.
    """
    try:
        with pq.ParquetFile(path, memory_map=True, page_checksum_verification=True) as file:
            return file.read(columns=[n for n in file.schema_arrow.names if wanted(n)])
    except FileNotFoundError:
        raise UserError(f"{path} is missing", "copy it again, or run `vla data repair`") from None
    except (pa.ArrowException, OSError, ValueError) as e:
        reason = str(e).splitlines()[0]
        raise UserError(f"{path} is not a readable parquet file ({reason})", "run `vla data repair`") from None


def read_episode_rows(root: Path, with_stats: bool = False) -> list[dict[str, Any]]:
    """Rows of ``meta/episodes`` in order of their episode."""
    rows: list[dict[str, Any]] = []
    for path in sorted((root / "meta" / "episodes").glob("*/*.parquet")):
        rows += read_rows(path, with_stats)
    return sorted(rows, key=lambda r: r["episode_index"])


def read_rows(path: Path, with_stats: bool = True) -> list[dict[str, Any]]:
    """Rows of one file of ``meta/episodes``.

    Raises:
        UserError: It cannot be read, or a row does not say where its episode lies.
    """
    rows = read_parquet(path, lambda name: with_stats or not name.startswith("stats/")).to_pylist()
    needed = (
        "episode_index",
        "dataset_from_index",
        "dataset_to_index",
        "length",
        "data/chunk_index",
        "data/file_index",
    )
    for row in rows:
        if missing := [name for name in needed if not isinstance(row.get(name), int)]:
            raise UserError(f"{path} does not say '{missing[0]}' of every episode", "run `vla data repair`")
    return rows


def read_tasks(root: Path) -> tuple[str, ...]:
    """Instructions in order of their index."""
    table = read_parquet(root / TASKS).to_pydict()
    names: list[Any] = next((v for k, v in table.items() if k != "task_index"), [])
    if len(names) != len(table.get("task_index", [])) or sorted(table["task_index"]) != list(range(len(names))):
        raise UserError(f"{root / TASKS} does not number its tasks from 0", "run `vla data repair`")
    order = np.argsort(table["task_index"])
    return tuple(str(names[i]) for i in order)


def open_dataset(root: str | Path, known: Dataset | None = None) -> Dataset:
    """Open and check a dataset.

    Args:
        root: Its folder.
        known: The same as it was opened before: where it has only grown, files that were read are not read again, for
            who follows what is being recorded.

    Raises:
        UserError: The dataset is incomplete or contradicts itself; names the file and the remedy.
    """
    root = Path(root)
    digests.require_unchanged(root, light_files(root))
    info = read_info(root)
    if info["total_episodes"] == 0:
        raise UserError(f"{root} holds no episode yet", "record one, e.g. with `vla collect`")
    repair = f"run `vla data repair {root}`"
    rows = read_episode_rows(root)[: info["total_episodes"]]
    if [r["episode_index"] for r in rows] != list(range(info["total_episodes"])):
        raise UserError(
            f"{root}/meta/episodes describes {len(rows)} of the {info['total_episodes']} episodes in meta/info.json",
            repair,
        )
    start = np.array([r["dataset_from_index"] for r in rows], np.int64)
    end = np.array([r["dataset_to_index"] for r in rows], np.int64)
    if start[0] != 0 or (start[1:] != end[:-1]).any() or end[-1] != info["total_frames"] or (end <= start).any():
        raise UserError(f"{root}/meta/episodes: the episodes' frame ranges do not join up", repair)
    dataset = Dataset(root, info, read_tasks(root), Columns(), tuple(rows), start, end, np.repeat(end, end - start))
    at: dict[tuple[Any, Any], list[int]] = {}
    for episode, row in enumerate(rows):
        at.setdefault((row["data/chunk_index"], row["data/file_index"]), []).append(episode)
    users = {dataset.data_file(group[0]): group for group in at.values()}
    if not any(feature["dtype"] == "image" for feature in info["features"].values()):  # whose files are large
        episodes = {path.relative_to(root).as_posix(): group for path, group in users.items()}
        digests.require_unchanged(root, episodes, episodes)
    wanted = {name for name, feature in info["features"].items() if feature["dtype"] in NUMERIC}
    total, read = info["total_frames"], lambda path: read_parquet(path, wanted.__contains__)
    files, first = list(users), None
    if known is not None and _has_grown(known, dataset, users.values()):
        files = [path for path, group in users.items() if group[0] >= known.num_episodes]
        first = {name: column for name, column in known.columns.items() if name in wanted}
    found = fill(dataset.columns, info["features"], total, files, read, root, first)
    if found != total:
        raise UserError(f"{root}/data holds {found} rows, meta/info.json counts {total} frames", repair)
    _check_columns(dataset, repair)
    return dataset


def _has_grown(known: Dataset, now: Dataset, files: Iterable[Sequence[int]]) -> bool:
    """Whether a dataset is as it was but for further episodes, in ``files`` of their own, each a list of episodes."""
    n = known.num_episodes
    same = known.root == now.root and known.features == now.features and known.episodes == now.episodes[:n]
    return same and all(group[-1] < n or group[0] >= n for group in files)


def light_files(root: Path, data: Iterable[Path] = ()) -> list[str]:
    """Files of a dataset that are small enough to be compared whenever it is opened, by their paths in there."""
    about = [root / name for name in (INFO, STATS, TASKS, ROBOT, SIDECAR)]
    return [
        p.relative_to(root).as_posix() for p in (*about, *sorted((root / "meta/episodes").glob("*/*.parquet")), *data)
    ]


def _check_columns(dataset: Dataset, repair: str) -> None:
    """Rows are where the episodes say, and what a policy reads is finite."""
    columns = dataset.columns
    for a, b in _blocks(dataset):
        first, last = np.searchsorted(dataset.episode_to, (a, b - 1), side="right")
        starts, ends = (side[first : last + 1].clip(a, b) for side in (dataset.episode_from, dataset.episode_to))
        episode_of = np.repeat(np.arange(first, last + 1), ends - starts)
        wrong = (columns["index"][a:b] != np.arange(a, b)) | (columns["episode_index"][a:b] != episode_of)
        if len(at := np.flatnonzero(wrong)):
            file = dataset.data_file(int(episode_of[at[0]]))
            raise UserError(f"{file}: rows are out of order from frame {a + at[0]} on", repair)
        if columns["task_index"][a:b].max(initial=0) >= len(dataset.tasks):
            message = f"{dataset.root / TASKS} lists {len(dataset.tasks)} tasks, the frames refer to more"
            raise UserError(message, repair)
    _check_rate(dataset)
    for key in (OBS_STATE, ACTION, CHUNK):
        if key in columns:
            _check_values(dataset, key)


def _blocks(dataset: Dataset) -> Iterator[tuple[int, int]]:
    """Frames from and to, a part at a time, so that a look at all of them does not take their memory."""
    for a in range(0, dataset.num_frames, BLOCK):
        yield a, min(a + BLOCK, dataset.num_frames)
        dataset.columns.release()


def _check_rate(dataset: Dataset) -> None:
    """Frames follow each other at the rate that is promised; LeRobot's and our own loader count on it."""
    if "timestamp" not in dataset.columns:
        return
    end = dataset.frame_end[:BLOCK]
    gaps = np.diff(dataset.columns["timestamp"][:BLOCK])[end[:-1] == end[1:]]
    gap = float(np.median(gaps)) if len(gaps) else 1.0 / dataset.fps
    if not 0.9 < gap * dataset.fps < 1.1:
        raise UserError(
            f"{dataset.root / INFO} says {dataset.fps:g} frames per second, the frames of "
            f"{dataset.data_file(0)} are {gap:g} s apart",
            "restore the one that was changed from a copy",
        )


def _check_values(dataset: Dataset, key: str) -> None:
    """What a policy reads or learns is a number that a robot can have."""
    values = dataset.columns[key].reshape(dataset.num_frames, -1)
    if all(-ABSURD <= values[a:b].min() and values[a:b].max() <= ABSURD for a, b in _blocks(dataset)):  # false for NaN
        return
    size = np.abs(values)
    usual = np.median(np.nan_to_num(size, posinf=np.inf), axis=0)
    wrong = ~np.isfinite(values) | (size > ABSURD * np.maximum(usual, 1.0))
    if not wrong.any():
        return
    frame = int(np.flatnonzero(wrong.any(1))[0])
    episode = int(dataset.columns["episode_index"][frame])
    value = values[frame][wrong[frame]][0]
    what = f"{value:.3g}, which no robot has," if np.isfinite(value) else "not finite"
    raise UserError(
        f"{dataset.data_file(episode)}: '{key}' is {what} in episode {episode}, "
        f"frame {frame - dataset.episode_from[episode]}",
        f"restore the file, or copy the others: `lerobot-edit-dataset --repo_id local/x --root {dataset.root} "
        f"--new_root COPY --operation.type delete_episodes --operation.episode_indices '[{episode}]'`",
    )

"""``vla data check --deep``: reads everything that a dataset holds, and names what cannot be as it was recorded.

What is compared: every file with its digest; every picture with the rows that it belongs to, in number, time, size and
brightness; every number with the robot's limits, with the statistics of its episode in ``meta/episodes``, and with the
rest of its column. Digests find a single bit; the rest is all there is for a dataset without them.
"""

from __future__ import annotations

import multiprocessing
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import cv2
import numpy as np
from av.error import FFmpegError
from numpy.typing import NDArray

from vla_stack.data import digests
from vla_stack.data.dataset import CHUNK, Dataset, light_files, open_dataset, read_episode_rows, read_parquet
from vla_stack.data.features import read_robot_spec
from vla_stack.data.layout import INFO, ROBOT, STATS, VIDEO_PATH, place, read_info
from vla_stack.errors import UserError
from vla_stack.schema import ACTION, OBS_STATE, Dim, SchemaError

BRIGHTNESS = 0.08  # of [0, 1]: more than a lossy codec changes the mean of an episode's pictures
OVERSHOOT = 0.1  # of a range: how far a measured value may lie beyond its limit, a finger that is pushed for one
FAR = 20.0  # spreads from the middle at which a value of a column is not one of the others


def deep_problems(root: Path, info: dict[str, Any], rows: dict[int, dict[str, Any]]) -> list[str]:
    """What a look at every byte finds, one sentence each, with the file and its episodes.

    Args:
        root: Dataset folder.
        info: ``meta/info.json``.
        rows: Episode -> its row of ``meta/episodes``, as far as they can be read.
    """
    users = _users(root, info, rows)
    found: list[str] = []
    # What has its digest is what an encoder of ours wrote; anything else may kill a decoder.
    with Decoder() if digests.read(root) is None else nullcontext(watch) as decoder:
        for path, group in _videos(root, info, rows).items():
            found += [f"{_name(root, path, users)}: {what}" for what in _video_problems(decoder, path, info, group)]
    for path in sorted((root / "data").glob("*/*.parquet")):
        found += [f"{_name(root, path, users)}: {what}" for what in _picture_problems(path, info)]
    try:
        dataset = open_dataset(root)
    except UserError as e:
        return [*found, e.message]
    if not (root / STATS).is_file():
        found.append(f"{STATS} is missing")
    return found + _robot_problems(dataset) + _value_problems(dataset)


def changed_files(root: Path, videos: bool) -> list[str]:
    """Files that are not as ``meta/digests.jsonl`` says, one sentence each; none where the dataset keeps no digests.

    Args:
        root: Dataset folder.
        videos: Read them too.
    """
    recorded = digests.read(root)
    if recorded is None:
        return []
    parts = ("data", "videos") if videos else ("data",)
    data = [path for part in parts for path in sorted((root / part).rglob("*")) if path.is_file()]
    wrong = digests.changed(root, recorded, light_files(root, data), strict=videos)
    lines = [f"{digests.DIGESTS}: line {number} is damaged" for number in recorded.damaged]
    return lines + [f"{name}{_episodes_of(root, name)} {what}" for name, what in wrong.items()]


def _episodes_of(root: Path, name: str) -> str:
    """The episodes of a file, as ``meta/episodes`` and the names of files say; empty where they do not."""
    try:
        info = read_info(root)
        rows = {row["episode_index"]: row for row in read_episode_rows(root)}
        return _name(root, root / name, _users(root, info, rows)).removeprefix(name)
    except UserError:
        return ""


def _users(root: Path, info: dict[str, Any], rows: dict[int, dict[str, Any]]) -> dict[Path, list[int]]:
    """File -> the episodes that lie in it."""
    users: dict[Path, list[int]] = defaultdict(list)
    for path, group in _videos(root, info, rows).items():
        users[path] += [episode for episode, _, _ in group]
    for path in sorted((root / "data").glob("*/*.parquet")):
        try:
            users[path] += sorted(set(read_parquet(path, "episode_index".__eq__)["episode_index"].to_pylist()))
        except (UserError, KeyError):  # then its digest, or the shallow check, has named it
            users[path] += [
                episode
                for episode, row in rows.items()
                if place(root, info["data_path"], row["data/chunk_index"], row["data/file_index"]) == path
            ]
    return users


def _videos(
    root: Path, info: dict[str, Any], rows: dict[int, dict[str, Any]]
) -> dict[Path, list[tuple[int, str, Any]]]:
    """Video file -> (episode, feature, row) of what lies in it."""
    out: dict[Path, list[tuple[int, str, Any]]] = defaultdict(list)
    for key in (k for k, ft in info["features"].items() if ft["dtype"] == "video"):
        for episode, row in sorted(rows.items()):
            if episode < info["total_episodes"] and f"videos/{key}/from_timestamp" in row:
                numbers = row[f"videos/{key}/chunk_index"], row[f"videos/{key}/file_index"]
                path = place(root, str(info.get("video_path") or VIDEO_PATH), *numbers, video_key=key)
                out[path].append((episode, key, row))
    return out


def _name(root: Path, path: Path, users: dict[Path, list[int]]) -> str:
    """A file and the episodes in it, as a message begins."""
    return path.relative_to(root).as_posix() + digests.span(users.get(path, []))


@dataclass(frozen=True)
class Film:
    """What a video file holds.

    Attributes:
        rate: Frames per second that it promises.
        sizes: Heights and widths of its pictures.
        times: Seconds at which they are shown, [T].
        means: Brightness of their channels, [T, 3] in [0, 1].
    """

    rate: float
    sizes: set[tuple[int, ...]]
    times: NDArray[np.float64]
    means: NDArray[np.float64]


class Decoder:
    """Decodes in another process: a decoder may die of a damaged file, and with it whoever called it."""

    def __enter__(self) -> Decoder:
        self._pool = self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def __call__(self, path: Path) -> Film:
        """The content of a video.

        Raises:
            UserError: It cannot be decoded.
        """
        try:
            return self._pool.submit(watch, path).result()
        except BrokenProcessPool:
            self._pool = self._start()
            raise UserError("cannot be decoded, the decoder died of it") from None

    def _start(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


def watch(path: Path) -> Film:
    """See :class:`Decoder`."""
    sizes: set[tuple[int, ...]] = set()
    times: list[float] = []
    means: list[NDArray[np.float64]] = []
    try:
        # As strict as the decoder can be: by default it paints over what it cannot read.
        with av.open(str(path), options={"err_detect": "explode"}) as container:
            stream = container.streams.video[0]
            stream.thread_count = 1
            for frame in container.decode(stream):
                picture = frame.to_ndarray(format="rgb24")
                sizes.add(picture.shape[:2])
                times.append(float(frame.time or 0.0))
                step = max(1, min(picture.shape[:2]) // 64)
                means.append(picture[::step, ::step].mean((0, 1)) / 255.0)
            rate = float(stream.average_rate or 0.0)
    except (OSError, FFmpegError, IndexError, ValueError) as e:
        raise UserError(f"cannot be decoded ({' '.join(str(e).split())[:120]})") from None
    return Film(rate, sizes, np.array(times), np.array(means).reshape(-1, 3))


def _video_problems(
    decoder: Callable[[Path], Film], path: Path, info: dict[str, Any], group: list[tuple[int, str, Any]]
) -> Iterator[str]:
    """What is wrong with the pictures of a video file."""
    fps, feature = info["fps"], info["features"][group[0][1]]
    try:
        film = decoder(path)
    except UserError as e:
        yield e.message
        return
    need = max(round(row[f"videos/{key}/from_timestamp"] * fps) + row["length"] for _, key, row in group)
    if len(film.times) < need:
        yield f"holds {len(film.times)} pictures, {need} are needed"
        return
    if abs(film.rate / fps - 1.0) > 0.01:
        yield f"runs at {film.rate:g} frames per second, {INFO} says {fps:g}"
    late = np.flatnonzero(np.abs(film.times * fps - np.arange(len(film.times))) > 0.5)
    if len(late):
        yield f"its picture {late[0]} is shown at {film.times[late[0]]:.3f} s"
    height, width = (n for n in feature["shape"] if n != 3) if feature["shape"].count(3) == 1 else feature["shape"][:2]
    if film.sizes != {(height, width)}:
        yield f"its pictures are {sorted(film.sizes)}, {INFO} says {height} x {width}"
    for episode, key, row in group:
        begin = round(row[f"videos/{key}/from_timestamp"] * fps)
        have = film.means[begin : begin + row["length"]].mean(0)
        want = row.get(f"stats/{key}/mean")
        if want is not None and np.abs(have - np.ravel(want)).max() > BRIGHTNESS:
            yield f"its pictures of episode {episode} are not those that were recorded: another brightness"


def _picture_problems(path: Path, info: dict[str, Any]) -> Iterator[str]:
    """What is wrong with pictures in a parquet file; all its pages are read, and so their checksums."""
    images = [key for key, feature in info["features"].items() if feature["dtype"] == "image"]
    try:
        table = read_parquet(path)
    except UserError as e:
        yield e.message.removeprefix(f"{path} ")
        return
    for key in (k for k in images if k in table.column_names):
        shape = sorted(info["features"][key]["shape"])
        for row, value in enumerate(table[key].to_pylist()):
            data = (value or {}).get("bytes")
            if data is None:  # beside the parquet file; the loader reads it
                continue
            picture = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
            if picture is None or sorted(picture.shape) != shape:
                yield f"the picture '{key}' of row {row} is damaged"
                break


def _robot_problems(dataset: Dataset) -> list[str]:
    """Where the dataset contradicts the robot that it names."""
    if not (dataset.root / ROBOT).exists():
        return []
    try:
        robot = read_robot_spec(dataset.root)
    except (UserError, SchemaError) as e:
        return [str(e)]
    found = []
    if abs(robot.rate_hz / dataset.fps - 1.0) > 1e-3:
        found.append(f"{INFO} says {dataset.fps:g} frames per second, {ROBOT} {robot.rate_hz:g}")
    for key, dims in ((OBS_STATE, robot.state), (ACTION, robot.action)):
        values = dataset.columns.get(key)
        if values is None:
            continue
        if values.shape[1:] != (len(dims),):
            found.append(f"{INFO}: '{key}' has {list(values.shape[1:])} entries, {ROBOT} {len(dims)}")
            continue
        for i, dim in enumerate(dims):
            found += _beyond(dataset, key, values[:, i], dim)
    return found


def _beyond(dataset: Dataset, key: str, values: NDArray[Any], dim: Dim) -> list[str]:
    """One sentence for an entry that leaves its limits, which names the first frame."""
    width = dim.high - dim.low
    room = OVERSHOOT * (width if np.isfinite(width) else 1.0)
    outside = np.flatnonzero((values < dim.low - room) | (values > dim.high + room))
    if not len(outside):
        return []
    where = _where(dataset, int(outside[0]))
    return [f"{where}: {dim.name} of '{key}' is {values[outside[0]]:.4g}, its limits are {dim.low:g} to {dim.high:g}"]


def _value_problems(dataset: Dataset) -> list[str]:
    """Numbers that differ from the statistics of their episode, or lie far from all others."""
    found = []
    rows = read_episode_rows(dataset.root, with_stats=True)
    for key in (k for k in (OBS_STATE, ACTION, CHUNK) if k in dataset.columns):
        values = dataset.columns[key].reshape(dataset.num_frames, -1).astype(np.float64)
        for episode in range(dataset.num_episodes):
            a, b = int(dataset.episode_from[episode]), int(dataset.episode_to[episode])
            found += _unlike_statistics(dataset, key, values[a:b], rows[episode], episode)
        low, middle, high = np.quantile(values, (0.05, 0.5, 0.95), axis=0)
        spread = np.maximum(high - low, 0.05 * np.maximum(1.0, np.abs(middle)))
        far = np.flatnonzero((np.abs(values - middle) > FAR * spread).any(1))
        if len(far):
            entry = int(np.argmax(np.abs(values[far[0]] - middle) / spread))
            found.append(
                f"{_where(dataset, int(far[0]))}: '{key}'[{entry}] is {values[far[0], entry]:.4g}, far from all others"
            )
    return found


def _unlike_statistics(
    dataset: Dataset, key: str, values: NDArray[np.float64], row: dict[str, Any], episode: int
) -> list[str]:
    """One sentence where an episode's smallest, largest or mean values are not those that were recorded with it."""
    for name, have in (("min", values.min(0)), ("max", values.max(0)), ("mean", values.mean(0))):
        want = row.get(f"stats/{key}/{name}")
        if want is None or np.size(want) != have.size:
            continue
        want = np.asarray(want, np.float64).ravel()
        room = 1e-5 + 1e-4 * np.maximum(np.abs(want), np.ptp(values, axis=0))
        if not (np.abs(have - want) <= room).all():
            entry = int(np.argmax(np.abs(have - want) - room))
            file = dataset.data_file(episode).relative_to(dataset.root)
            return [
                f"{file} (episode {episode}): the {name} of '{key}'[{entry}] is {have[entry]:.6g}, "
                f"meta/episodes says {want[entry]:.6g}"
            ]
    return []


def _where(dataset: Dataset, frame: int) -> str:
    episode = int(dataset.columns["episode_index"][frame])
    file = dataset.data_file(episode).relative_to(dataset.root)
    return f"{file} (episode {episode}, frame {frame - int(dataset.episode_from[episode])})"

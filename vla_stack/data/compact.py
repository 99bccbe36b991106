"""``vla data compact``: many episodes to a file, in the sizes that LeRobot's own writer aims at.

A recorder writes a file an episode, for those survive it; 50 000 episodes are 150 000 files, which no file system reads
fast. Rows are copied as they are, videos by their packets, undecoded. The new dataset is built beside its place and
gets its name at the end, so that whoever kills it finds what was there before.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
from av.container import InputContainer
from tqdm import tqdm

from vla_stack.data import digests
from vla_stack.data.building import built
from vla_stack.data.dataset import read_parquet
from vla_stack.data.layout import (
    CHUNK_SIZE,
    EPISODES_PATH,
    INFO,
    STAGING,
    next_file,
    place,
    read_info,
    sync_file,
    sync_folder,
)
from vla_stack.data.store import locked
from vla_stack.data.video import unreadable
from vla_stack.errors import UserError

DATA_MB, VIDEO_MB = 100, 200  # LeRobot's defaults, where meta/info.json names no size
_PACKED = ("data", "videos", "meta/episodes")
_AHEAD = 64  # files that are read while others are written


@dataclass(frozen=True)
class Compacted:
    """What :func:`compact` did: episodes, and files before and after."""

    episodes: int
    before: int
    after: int


def compact(root: Path, into: Path | None = None, progress: bool = True) -> Compacted:
    """Write a dataset's episodes into as few files as its target sizes allow.

    Args:
        root: Dataset folder.
        into: New folder; in place of the old dataset if None.
        progress: Show progress bars.

    Raises:
        UserError: The dataset is damaged, or the new folder exists.
    """
    root = root.resolve()  # a link stays one
    read_info(root)  # a folder that is no dataset is left as it is
    if into is not None and into.exists():
        raise UserError(f"{into} exists", "compact into a new folder, or in place without --into")
    with locked(root) if into is None else nullcontext(), built(into or root, "compacting") as work:
        return _Packing(root, work, progress).run()


class _Packing:
    """One dataset on its way into another folder."""

    def __init__(self, root: Path, work: Path, progress: bool) -> None:
        self.root, self.work, self.progress = root, work, progress
        self.info = read_info(root)
        self.rows = _rows(root, self.info)
        self.columns: dict[str, Any] = {}  # of meta/episodes that say where an episode lies: name -> [E]

    def run(self) -> Compacted:
        videos = [key for key, feature in self.info["features"].items() if feature["dtype"] == "video"]
        files = {key: self._files("video_path", f"videos/{key}", video_key=key) for key in videos}
        data = self._files("data_path", "data")
        names = [path.relative_to(self.root).as_posix() for paths in (data, *files.values()) for path in paths]
        digests.require_unchanged(self.root, dict.fromkeys(names))
        self._copy_rest()
        self._pack_data(data)
        for key in videos:
            self._pack_videos(key, files[key])
        self._write_rows()
        for folder in sorted({path.parent for path in self.work.rglob("*") if path.is_file()}):
            sync_folder(folder)
        if digests.read(self.root) is not None:
            digests.seal(self.work)
        return Compacted(self.rows.num_rows, _count(self.root), _count(self.work))

    def _files(self, template: str, prefix: str, **names: str) -> list[Path]:
        """The file of each episode."""
        numbers = (self.rows[f"{prefix}/{name}"].to_pylist() for name in ("chunk_index", "file_index"))
        return [place(self.root, self.info[template], *at, **names) for at in zip(*numbers, strict=True)]

    def _copy_rest(self) -> None:
        """Whatever else lies in the folder."""
        kept = {self.root / name for name in (*_PACKED, digests.DIGESTS, STAGING)}
        for path in sorted(self.root.iterdir()) + sorted((self.root / "meta").iterdir()):
            target = self.work / path.relative_to(self.root)
            if path in kept or path == self.root / "meta":
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(path, target) if path.is_dir() else shutil.copy2(path, target)
            if target.is_file():
                sync_file(target)

    def _pack_data(self, files: Sequence[Path]) -> None:
        """Rows of ``data``, checked on the way: those of an episode are where its row says."""
        lengths = np.array(self.rows["length"].to_pylist())
        paths, first, frame = list(dict.fromkeys(files)), 0, 0
        episodes = [(path, len(list(of))) for path, of in groupby(files)]
        if len(episodes) != len(paths):
            raise UserError(f"{self.root}/meta/episodes: the episodes of a data file do not follow each other")
        numbers: list[tuple[int, int]] = []
        with ThreadPoolExecutor(2) as pool, self._bar(len(paths), "rows") as bar:
            tables = _in_order(pool, paths)
            for at, group in _numbered(paths, self._limit("data", DATA_MB), self.info):
                parts = [next(tables) for _ in group]
                table = pa.concat_tables(parts, promote_options="default") if len(parts) > 1 else parts[0]
                last = first + sum(count for _, count in episodes[: len(group)])
                del episodes[: len(group)]
                of = np.repeat(np.arange(first, last), lengths[first:last])
                same = len(of) == table.num_rows and (table["episode_index"].to_numpy() == of).all()
                if not (same and (table["index"].to_numpy() == np.arange(frame, frame + len(of))).all()):
                    raise UserError(
                        f"{group[0]} to {group[-1].name}: their rows are not those that meta/episodes describes",
                        f"run `vla data check {self.root}`; nothing was changed",
                    )
                path = self._made("data_path", at)
                shutil.copy2(group[0], path) if len(group) == 1 else digests.write_pages(table, path)
                sync_file(path)
                numbers += [at] * (last - first)
                first, frame = last, frame + len(of)
                bar.update(len(group))
        self._placed("data", numbers)

    def _pack_videos(self, key: str, files: Sequence[Path]) -> None:
        """Packets of a camera, and from when to when an episode is shown in its new file."""
        paths = list(dict.fromkeys(files))
        where: dict[Path, tuple[tuple[int, int], Fraction]] = {}  # file -> the new one, and when it begins there
        with self._bar(len(paths), key) as bar:
            limit = self._limit("video", VIDEO_MB)
            for at, group in _numbered(paths, limit, self.info, kind=_kind if len(paths) > 1 else None):
                path = self._made("video_path", at, video_key=key)
                begins = [Fraction(0)]
                if len(group) == 1:
                    shutil.copy2(group[0], path)
                else:
                    begins = _joined(group, path)
                sync_file(path)
                where |= {source: (at, begin) for source, begin in zip(group, begins, strict=True)}
                bar.update(len(group))
        prefix = f"videos/{key}"
        self._placed(prefix, [where[path][0] for path in files])
        begins_at = np.array([float(where[path][1]) for path in files])
        for name in ("from_timestamp", "to_timestamp"):
            self.columns[f"{prefix}/{name}"] = np.array(self.rows[f"{prefix}/{name}"].to_pylist()) + begins_at

    def _write_rows(self) -> None:
        """``meta/episodes``, of which LeRobot has a file hold as much as one of ``data``."""
        table = self.rows
        per = max(1, int(self._limit("data", DATA_MB) // max(1, table.nbytes // table.num_rows)))
        chunk, file, size = 0, 0, self.info.get("chunks_size", CHUNK_SIZE)
        for start in range(0, table.num_rows, per):
            part = table.slice(start, per)
            here = {"meta/episodes/chunk_index": chunk, "meta/episodes/file_index": file}
            columns = {name: values[start : start + per] for name, values in self.columns.items()}
            for name, values in (columns | {n: np.full(part.num_rows, v) for n, v in here.items()}).items():
                column = part.column_names.index(name)
                part = part.set_column(column, name, pa.array(values, part.schema.field(column).type))
            path = self.work / EPISODES_PATH.format(chunk_index=chunk, file_index=file)
            path.parent.mkdir(parents=True, exist_ok=True)
            digests.write_pages(part, path)
            sync_file(path)
            chunk, file = next_file(chunk, file, size)

    def _placed(self, prefix: str, numbers: Sequence[tuple[int, int]]) -> None:
        for i, name in enumerate(("chunk_index", "file_index")):
            self.columns[f"{prefix}/{name}"] = np.array([at[i] for at in numbers], np.int64)

    def _made(self, template: str, at: tuple[int, int], **names: str) -> Path:
        path = place(self.work, self.info[template], *at, **names)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _limit(self, kind: str, default: int) -> float:
        return float(self.info.get(f"{kind}_files_size_in_mb") or default) * 2**20

    def _bar(self, total: int, what: str) -> tqdm[Any]:
        return tqdm(total=total, desc=f"packing {what}", unit=" files", disable=not self.progress or total < 100)


def _rows(root: Path, info: dict[str, Any]) -> pa.Table:
    """``meta/episodes``, one row an episode in their order, statistics included."""
    files = sorted((root / "meta/episodes").glob("*/*.parquet"))
    digests.require_unchanged(root, [path.relative_to(root).as_posix() for path in (root / INFO, *files)])
    table = pa.concat_tables([read_parquet(path) for path in files], promote_options="default")
    table = table.sort_by("episode_index").slice(0, info["total_episodes"]).combine_chunks()
    start, end = (table[f"dataset_{side}_index"].to_numpy() for side in ("from", "to"))
    joined = table.num_rows == info["total_episodes"] > 0 and start[0] == 0 and (start[1:] == end[:-1]).all()
    if not joined or end[-1] != info["total_frames"]:
        raise UserError(
            f"{root}/meta/episodes does not describe the episodes that {INFO} counts", "run `vla data check`"
        )
    return table


def _in_order(pool: ThreadPoolExecutor, paths: Sequence[Path]) -> Iterator[pa.Table]:
    jobs = [pool.submit(read_parquet, path) for path in paths[:_AHEAD]]
    for path in paths[_AHEAD:]:
        yield jobs.pop(0).result()
        jobs.append(pool.submit(read_parquet, path))
    for job in jobs:
        yield job.result()


def _numbered(
    paths: Sequence[Path], limit: float, info: dict[str, Any], kind: Any = None
) -> Iterator[tuple[tuple[int, int], list[Path]]]:
    """Files that go into one, and its chunk and file index; only files of one kind are joined."""
    group: list[Path] = []
    at, size, before = (0, 0), 0, None
    for path in paths:
        try:
            more = path.stat().st_size
        except FileNotFoundError:
            raise UserError(f"{path} is missing", "copy it again, or run `vla data repair`") from None
        what = kind(path) if kind else None
        if group and (size + more > limit or what != before):
            yield at, group
            at, group, size = next_file(*at, info.get("chunks_size", CHUNK_SIZE)), [], 0
        group.append(path)
        size, before = size + more, what
    yield at, group


def _kind(path: Path) -> tuple[Any, ...]:
    """What two videos must have in common for one decoder to read both."""
    with unreadable(path), av.open(str(path)) as container:
        return _stream_kind(container)


def _stream_kind(container: InputContainer) -> tuple[Any, ...]:
    stream = container.streams.video[0]
    c = stream.codec_context
    return c.name, c.extradata, c.width, c.height, c.pix_fmt, stream.time_base, stream.average_rate


def _joined(sources: Sequence[Path], path: Path) -> list[Fraction]:
    """Write the packets of several videos one after the other; when each begins, seconds."""
    begins, begin = [], 0
    with av.open(str(path), "w", format="mp4", options={"movflags": "faststart"}) as out:
        to = None
        for source in sources:
            with unreadable(source), av.open(str(source)) as container:
                stream = container.streams.video[0]
                if to is None:
                    to = out.add_stream_from_template(stream, opaque=True)
                    to.time_base = stream.time_base
                assert stream.time_base is not None
                begins.append(begin * stream.time_base)
                end = begin
                for packet in container.demux(stream):
                    if packet.dts is None or packet.pts is None:  # the end
                        continue
                    packet.pts, packet.dts, packet.stream = packet.pts + begin, packet.dts + begin, to
                    end = max(end, packet.pts + (packet.duration or 0))
                    out.mux(packet)
                begin = end
    return begins


def _count(root: Path) -> int:
    return sum(len(files) for folder, _, files in os.walk(root) if Path(folder).name != STAGING)

"""Decoded frames on the disk: each camera's pictures as one flat uint8 file that batches are gathered from.

Decoding a frame costs a hundred times more than copying it, and training reads every frame many times. The cache lies
beside the dataset in ``<root>.frames/`` or, where nothing can be written there, in the user's own cache; it can be
deleted at any time, and is memory-mapped: the kernel keeps in memory what fits. It is keyed by the source file (name,
size, time of change) of every episode, so appended episodes are added to it and changed ones make it stale. Where it
would be too large, a loader decodes on demand (``on_demand.py``).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from vla_stack.data.dataset import Dataset, read_parquet
from vla_stack.data.layout import read_json, write_json
from vla_stack.data.video import decode
from vla_stack.errors import UserError
from vla_stack.images import fit_image

_THREADS = min(8, os.cpu_count() or 1)


def cache_folder(root: Path) -> Path:
    """Where the decoded frames of a dataset are kept: beside it, or in the user's cache where that is not possible."""
    real = root.resolve()
    beside = (real if root.name in ("", "..") else root).with_name(f"{real.name}.frames")
    if os.access(beside if beside.exists() else beside.parent, os.W_OK | os.X_OK):
        return beside
    digest = hashlib.sha256(os.fsencode(real)).hexdigest()[:16]
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "vla_stack" / f"{real.name}-{digest}.frames"


def open_frames(
    dataset: Dataset,
    cameras: Sequence[str],
    folder: Path | None = None,
    progress: bool = True,
    sizes: Mapping[str, tuple[int, int]] | None = None,
) -> dict[str, NDArray[np.uint8]]:
    """Memory-map the decoded frames of some cameras, building what is missing or stale first.

    Args:
        dataset: An open dataset of N frames.
        cameras: Camera names.
        folder: Where the cache lies; :func:`cache_folder` if not given.
        progress: Show a progress bar while building.
        sizes: Height and width to which a camera's pictures are brought (:func:`vla_stack.images.fit_image`), once,
            when they are decoded; as recorded where a camera is not named.

    Returns:
        Camera -> uint8 [N, H, W, 3], read-only.

    Raises:
        UserError: There is no such camera, its source files are damaged, or the disk is too small.
    """
    unknown = [c for c in cameras if c not in dataset.cameras]
    if unknown:
        raise UserError(f"{dataset.root} has no camera '{unknown[0]}'", f"it has {', '.join(dataset.cameras)}")
    folder = folder or cache_folder(dataset.root)
    sizes = sizes or {}
    return {c: CameraFrames(dataset, c, folder, sizes.get(c)).open(progress) for c in cameras}


@dataclass(frozen=True)
class CameraFrames:
    """Where the frames of a camera come from, and the decoded ones lie.

    Attributes:
        dataset: An open dataset.
        camera: Name of one of its cameras.
        folder: Where decoded frames are kept.
        size: Height and width that they are brought to; as recorded if None.
    """

    dataset: Dataset
    camera: str
    folder: Path = Path()
    size: tuple[int, int] | None = None

    @property
    def key(self) -> str:
        return self.dataset.cameras[self.camera]

    @property
    def recorded(self) -> tuple[int, ...]:
        """Height, width, 3 of the source."""
        return (*self.dataset.image_size(self.camera), 3)

    @property
    def shape(self) -> tuple[int, ...]:
        """Height, width, 3 of what is kept."""
        return self.recorded if self.size is None else (*self.size, 3)

    @property
    def name(self) -> str:
        """Name of the files; pictures of another size lie beside the recorded ones."""
        height, width, _ = self.shape
        return self.camera if self.shape == self.recorded else f"{self.camera}.{height}x{width}"

    def source(self, episode: int) -> Path:
        if self.dataset.features[self.key]["dtype"] == "video":
            return self.dataset.video_file(episode, self.key)
        return self.dataset.data_file(episode)

    def open(self, progress: bool) -> NDArray[np.uint8]:
        frames_file, index_file = self.folder / f"{self.name}.u8", self.folder / f"{self.name}.json"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            remedy = "make its place writable, or set XDG_CACHE_HOME to a folder that is"
            raise UserError(f"{self.folder} cannot be created ({e.strerror})", remedy) from None
        size = int(np.prod(self.shape))
        want = self.fingerprints()
        with (self.folder / f"{self.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be building the same
            have = _stored(index_file, self.shape) if frames_file.exists() else []
            same = len(os.path.commonprefix([have, want]))
            done = int(self.dataset.episode_to[same - 1]) if same else 0
            if frames_file.exists() and frames_file.stat().st_size < done * size:
                same, done = 0, 0
            if same < len(want):
                # Only whole new episodes are appended in place: a reader may have the older frames mapped.
                target = frames_file if same == len(have) and same else self.folder / f".{self.name}.u8.tmp"
                if target != frames_file:
                    same = 0
                self._build(target, same, progress)
                if target != frames_file:
                    os.replace(target, frames_file)
                write_json(index_file, {"shape": list(self.shape), "episodes": want})
        return np.memmap(frames_file, np.uint8, "r", shape=(self.dataset.num_frames, *self.shape))

    def fingerprints(self) -> list[str]:
        """One hash an episode of where its frames come from."""
        stat: dict[Path, str] = {}
        out = []
        for episode, row in enumerate(self.dataset.episodes):
            path = self.source(episode)
            if path not in stat:
                try:
                    s = path.stat()
                except FileNotFoundError:
                    raise UserError(f"{path} is missing", f"run `vla data repair {self.dataset.root}`") from None
                stat[path] = f"{path.relative_to(self.dataset.root)} {s.st_size} {s.st_mtime_ns}"
            start = row.get(f"videos/{self.key}/from_timestamp", row["dataset_from_index"])
            text = f"{stat[path]} {start} {row['length']}"
            out.append(hashlib.sha256(text.encode()).hexdigest()[:16])
        return out

    def _build(self, target: Path, first: int, progress: bool) -> None:
        """Decode the episodes from ``first`` on into their place in ``target``."""
        dataset, size = self.dataset, int(np.prod(self.shape))
        offset = int(dataset.episode_from[first])
        need = (dataset.num_frames - offset) * size
        free = shutil.disk_usage(self.folder).free
        if need > free:
            raise UserError(
                f"decoding '{self.camera}' needs {need / 1e9:.1f} GB in {self.folder}, {free / 1e9:.1f} are free",
                "free disk space, record at a smaller size, or train with data.cache_gb=0 (videos only)",
            )
        groups: dict[Path, list[int]] = {}
        for episode in range(first, dataset.num_episodes):
            groups.setdefault(self.source(episode), []).append(episode)
        fill = self._fill_from_video if dataset.features[self.key]["dtype"] == "video" else self._fill_from_parquet
        fd = os.open(target, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            os.ftruncate(fd, offset * size)
            bar = tqdm(
                total=dataset.num_frames - offset, unit=" frames", desc=f"decoding {self.camera}", disable=not progress
            )
            with bar, ThreadPoolExecutor(_THREADS) as pool:
                jobs = [pool.submit(fill, fd, path, episodes, bar.update) for path, episodes in groups.items()]
                try:
                    for job in jobs:
                        job.result()
                except BaseException:
                    pool.shutdown(cancel_futures=True)
                    raise
            os.fsync(fd)
        finally:
            os.close(fd)

    def _fill_from_video(self, fd: int, path: Path, episodes: list[int], done: Callable[[int], Any]) -> None:
        """Decode one video from its beginning; a frame belongs to the row whose timestamp it carries."""
        dataset, fps = self.dataset, self.dataset.fps
        row_of: dict[int, int] = {}  # number of a frame in the video -> row of the dataset
        for e in episodes:
            start = round(dataset.episodes[e][f"videos/{self.key}/from_timestamp"] * fps)
            for i in range(int(dataset.episode_to[e] - dataset.episode_from[e])):
                row_of[start + i] = int(dataset.episode_from[e]) + i
        last, total = max(row_of), len(row_of)
        for seconds, frame in decode(path):
            number = round(seconds * fps)
            row = row_of.pop(number, None)
            if row is not None:
                self._write(fd, row, frame, path)
            if number >= last:
                break
        if row_of:
            episode = int(np.searchsorted(dataset.episode_to, min(row_of.values()), side="right"))
            raise UserError(
                f"{path} lacks {len(row_of)} of its {total} frames, the first one in episode {episode}",
                f"run `vla data repair {dataset.root}`",
            )
        done(total)

    def _fill_from_parquet(self, fd: int, path: Path, episodes: list[int], done: Callable[[int], Any]) -> None:
        rows = range(int(self.dataset.episode_from[episodes[0]]), int(self.dataset.episode_to[episodes[-1]]))
        count = 0
        for row, data in zip(rows, _encoded_images(self.dataset.root, path, self.key), strict=False):
            self._write(fd, row, self._picture(data, row, path), path)
            count += 1
        if count != len(rows):
            raise UserError(f"{path} holds {count} pictures for {len(rows)} rows", "run `vla data repair`")
        done(count)

    def from_parquet(self, episode: int, rows: range) -> Iterator[NDArray[np.uint8]]:
        """The pictures of some rows of an episode whose data file holds them."""
        path, first = self.source(episode), episode
        while first and self.source(first - 1) == path:
            first -= 1
        images = _encoded_images(self.dataset.root, path, self.key, rows.start - int(self.dataset.episode_from[first]))
        for row, data in zip(range(rows.start, rows.stop), images, strict=False):
            if row in rows:
                yield self.fitted(self._picture(data, row, path), path)

    def _picture(self, data: bytes, row: int, path: Path) -> NDArray[np.uint8]:
        image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
        if image is None:
            raise UserError(f"{path}: the '{self.camera}' picture of row {row} is damaged", "copy the file again")
        return cv2.cvtColor(image, cv2.COLOR_BGR2RGB).astype(np.uint8, copy=False)

    def fitted(self, frame: NDArray[np.uint8], path: Path) -> NDArray[np.uint8]:
        """A frame in the size that is kept.

        Raises:
            UserError: It does not have the size that the dataset promises.
        """
        if frame.shape != self.recorded:
            raise UserError(f"{path} is {list(frame.shape)}, meta/info.json says {list(self.recorded)}", "they differ")
        return fit_image(frame, *self.shape[:2])

    def _write(self, fd: int, row: int, frame: NDArray[np.uint8], path: Path) -> None:
        frame = self.fitted(frame, path)
        try:
            os.pwrite(fd, np.ascontiguousarray(frame).data, row * frame.nbytes)
        except OSError as e:
            raise UserError(f"writing {self.folder} failed ({e.strerror})", "free disk space") from e


def _encoded_images(root: Path, path: Path, key: str, skip: int = 0) -> Iterator[bytes]:
    column = read_parquet(path, key.__eq__)[key].slice(skip)
    for chunk in column.chunks:
        for value in chunk:
            image = value.as_py()
            yield image["bytes"] if image["bytes"] is not None else (root / image["path"]).read_bytes()


def _stored(index_file: Path, shape: tuple[int, ...]) -> list[str]:
    """Fingerprints of the episodes that a cache holds; none if it is not usable."""
    try:
        index = read_json(index_file)
    except (UserError, json.JSONDecodeError):
        return []
    return index["episodes"] if index.get("shape") == list(shape) else []

"""Frames decoded when they are sampled: for videos whose raw frames would not fit the disk.

The order of samples is the loader's own, as random as from decoded frames, and batches are the same to the bit. What
makes that affordable is that LeRobot's writer and ours set a key frame at every second picture: a frame anywhere costs
a seek and at most two decodings, 0.14 ms at 64 px and 0.6 ms at 224 px, and a millisecond more where its file has to
be opened. The next batches are decoded by threads while one is trained on.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import av
import numpy as np
from av.container import InputContainer
from av.video.frame import VideoFrame
from numpy.typing import NDArray

from vla_stack.data.dataset import Dataset
from vla_stack.data.frame_cache import CameraFrames
from vla_stack.data.video import unreadable
from vla_stack.errors import UserError

_THREADS = min(8, os.cpu_count() or 1)
_OPEN = 32  # files that are kept open, each with its decoder: a few MB
_NEAR = 4  # frames: what follows so soon is decoded on to, not sought
_TOGETHER = 32  # frames of an episode that are decoded while those before them are looked at
SPARSE = 16  # frames between key frames, from where on a frame anywhere is too far from one


class _Film:
    """An open video; ``read`` seeks, ``at`` is the frame that was read last."""

    def __init__(self, path: Path, fps: float) -> None:
        self.path, self._fps, self._at = path, fps, -1
        self._container: InputContainer = av.open(str(path))
        self._stream = self._container.streams.video[0]
        self._stream.thread_count = 1  # several files are decoded at once
        self._frames: Iterator[VideoFrame] = iter(())
        assert self._stream.time_base is not None
        self._time_base = self._stream.time_base

    def read(self, number: int) -> NDArray[np.uint8]:
        """The frame whose time is nearest to ``number`` / fps, [H, W, 3] RGB.

        Raises:
            UserError: There is none.
        """
        for begin in (number, 0):  # a second time from the beginning, where the index leads past the frame
            if not (begin and 0 < number - self._at <= _NEAR):
                self._container.seek(int(begin / self._fps / self._time_base), stream=self._stream)
                self._frames = self._container.decode(self._stream)
            for frame in self._frames:
                assert frame.pts is not None
                self._at = round(float(frame.pts * self._time_base) * self._fps)
                if self._at == number:
                    return np.asarray(frame.to_ndarray(format="rgb24"), np.uint8)
                if self._at > number:
                    break
            self._at = -1
        raise UserError(f"{self.path} lacks the frame at {number / self._fps:.3f} s", "run `vla data repair`")

    def close(self) -> None:
        self._container.close()


class FramesOnDemand:
    """The frames of one camera of a dataset of N frames; ``take`` is that of an array [N, H, W, 3].

    Args:
        dataset: An open dataset.
        camera: Name of a camera whose frames are videos.
        size: Height and width to bring pictures to; as recorded by default.
    """

    def __init__(self, dataset: Dataset, camera: str, size: tuple[int, int] | None = None) -> None:
        self._source = CameraFrames(dataset, camera, size=size)
        self.shape = (dataset.num_frames, *self._source.shape)
        key, fps = self._source.key, dataset.fps
        starts = [round(row[f"videos/{key}/from_timestamp"] * fps) for row in dataset.episodes]
        self._first = np.array(starts, np.int64) - dataset.episode_from  # of a video's frames, less that of the rows
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix=f"decode {camera}")
        self._idle: OrderedDict[Path, _Film] = OrderedDict()
        self._lock = threading.Lock()
        self._ahead: OrderedDict[bytes, tuple[NDArray[np.uint8], list[Future[None]]]] = OrderedDict()

    def take(self, frames: NDArray[np.int64], axis: int = 0) -> NDArray[np.uint8]:
        """Pictures of some frames, uint8 [B, H, W, 3].

        Raises:
            UserError: A file is missing, damaged, or lacks a frame.
        """
        self.ahead(frames)
        out, jobs = self._ahead.pop(frames.tobytes())
        for job in jobs:
            job.result()
        return out

    def ahead(self, frames: NDArray[np.int64]) -> None:
        """Begin to decode frames that ``take`` will be asked for."""
        if (name := frames.tobytes()) in self._ahead:
            return
        dataset = self._source.dataset
        out = np.empty((len(frames), *self.shape[1:]), np.uint8)
        groups: dict[Path, list[tuple[int, int]]] = {}
        episodes = np.searchsorted(dataset.episode_to, frames, side="right")
        for i, (frame, episode) in enumerate(zip(frames.tolist(), episodes.tolist(), strict=True)):
            number = frame + int(self._first[episode])
            groups.setdefault(self._source.source(episode), []).append((number, i))
        self._ahead[name] = out, [self._pool.submit(self._fill, out, *group) for group in groups.items()]

    def forget(self) -> None:
        """Drop what was decoded ahead and not taken."""
        for _, jobs in self._ahead.values():
            for job in jobs:
                job.cancel()
        self._ahead.clear()

    def _fill(self, out: NDArray[np.uint8], path: Path, wanted: list[tuple[int, int]]) -> None:
        with unreadable(path), self._film(path) as film:
            have = -1
            picture: NDArray[np.uint8] = np.empty(0, np.uint8)
            for number, i in sorted(wanted):
                if number != have:
                    have, picture = number, self._source.fitted(film.read(number), path)
                out[i] = picture

    @contextmanager
    def _film(self, path: Path) -> Iterator[_Film]:
        """An open file for one thread alone; the ones used last stay open."""
        with self._lock:
            film = self._idle.pop(path, None)
        film = film or _Film(path, self._source.dataset.fps)
        try:
            yield film
        except BaseException:
            film.close()
            raise
        with self._lock:
            old = self._idle.pop(path, None)
            self._idle[path] = film
            oldest = self._idle.popitem(last=False)[1] if len(self._idle) > _OPEN else None
        for spare in (old, oldest):
            if spare is not None:
                spare.close()


def in_passing(dataset: Dataset, camera: str, episode: int, rows: range) -> Iterator[NDArray[np.uint8]]:
    """Pictures of an episode one after the other, for whoever looks at each once: nothing is written to the disk.

    Args:
        dataset: An open dataset.
        camera: One of its cameras.
        episode: Index of the episode.
        rows: Some of its rows, ascending; the nearer to each other, the faster.

    Yields:
        uint8 [H, W, 3], as recorded.

    Raises:
        UserError: A file is missing, damaged, or lacks a frame.
    """
    source = CameraFrames(dataset, camera)
    if dataset.features[source.key]["dtype"] != "video":
        yield from source.from_parquet(episode, rows)
        return
    film = FramesOnDemand(dataset, camera)
    for start in range(0, len(rows), _TOGETHER):
        pictures = film.take(np.array(rows[start : start + _TOGETHER]))
        if len(following := rows[start + _TOGETHER : start + 2 * _TOGETHER]):
            film.ahead(np.array(following))
        yield from pictures


def raw_bytes(dataset: Dataset, cameras: Sequence[str], sizes: Mapping[str, tuple[int, int]]) -> int:
    """Bytes that the decoded frames of some cameras take."""
    shapes = [CameraFrames(dataset, camera, size=sizes.get(camera)).shape for camera in cameras]
    return sum(dataset.num_frames * int(np.prod(shape)) for shape in shapes)


def seekable(dataset: Dataset, camera: str) -> bool:
    """Whether a camera's frames can be decoded one by one: videos whose key frames are dense, looked up in the first.

    Raises:
        UserError: It is missing or damaged.
    """
    source = CameraFrames(dataset, camera)
    if dataset.features[source.key]["dtype"] != "video":
        return False
    path = source.source(0)
    with unreadable(path), av.open(str(path)) as container:
        since = 0
        for packet in container.demux(container.streams.video[0]):
            since = 0 if packet.is_keyframe else since + 1
            if since > SPARSE:
                return False
            if packet.pts is None or packet.pts * packet.time_base > 60.0:
                break
    return True

"""Video files: an encoder that cannot lose a frame, and a sequential decoder.

Encoding is H.264 in 4:4:4 at a constant quality of 12 with a key frame at every second picture. Measured on simulated
pictures: 48 dB at 64 px, where the usual 4:2:0 stays at 36 dB however low the quantiser, because halving the colour
resolution of a 64 px picture is what hurts; encoding takes 0.13 ms a frame at 64 px and 3 ms at 640x480. Key frames
are dense because LeRobot's loader seeks to every frame it reads.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

from vla_stack.errors import UserError

PIXEL_FORMAT = "yuv444p"
KEYFRAME_INTERVAL = 2
QUALITY = 12
PRESET = "ultrafast"
_QUEUE = 64  # frames; a full queue makes the recording process wait, it never drops


def video_info(height: int, width: int, fps: float) -> dict[str, Any]:
    """The ``info`` entry of a video feature, as LeRobot writes it."""
    return {
        "video.height": height,
        "video.width": width,
        "video.codec": "h264",
        "video.pix_fmt": PIXEL_FORMAT,
        "video.is_depth_map": False,
        "video.fps": fps,
        "video.channels": 3,
        "video.g": KEYFRAME_INTERVAL,
        "video.crf": QUALITY,
        "video.preset": PRESET,
        "has_audio": False,
    }


class VideoWriter:
    """Encodes one camera's frames of one episode in a thread of its own.

    Args:
        path: File to write.
        height: Frame height, pixels.
        width: Frame width, pixels.
        fps: Frames per second; frame i is shown at i / fps.
    """

    def __init__(self, path: Path, height: int, width: int, fps: float) -> None:
        self.path = path
        self._shape = (height, width, 3)
        self._fps = Fraction(fps).limit_denominator(1001)
        self._queue: queue.Queue[NDArray[np.uint8] | None] = queue.Queue(_QUEUE)
        self._error: BaseException | None = None
        self._put = 0
        self._encoded = 0
        self._thread = threading.Thread(target=self._run, name=f"encode {path.name}", daemon=True)
        self._thread.start()

    def put(self, frame: NDArray[np.uint8]) -> None:
        """Queue a copy of a uint8 [H, W, 3] frame; waits while the queue is full.

        Raises:
            OSError: The encoder failed, for example on a full disk.
        """
        if self._error is not None:
            raise self._error
        self._queue.put(np.array(frame, order="C"))
        self._put += 1

    def close(self) -> None:
        """Encode what is queued and finish the file.

        Raises:
            OSError: The encoder failed.
            RuntimeError: The file does not hold every frame that was put.
        """
        self._stop()
        if self._error is not None:
            raise self._error
        if self._encoded != self._put:
            raise RuntimeError(f"{self.path}: {self._put} frames were recorded and {self._encoded} encoded")

    def abort(self) -> None:
        """Stop and delete the file."""
        self._stop()
        self.path.unlink(missing_ok=True)

    def _stop(self) -> None:
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _frames(self) -> Iterator[NDArray[np.uint8]]:
        while (frame := self._queue.get()) is not None:
            yield frame

    def _run(self) -> None:
        frames = self._frames()
        try:
            with av.open(str(self.path), "w", format="mp4") as container:
                stream = container.add_stream("libx264", rate=self._fps)
                stream.height, stream.width, _ = self._shape
                stream.pix_fmt = PIXEL_FORMAT
                stream.thread_count = 1
                stream.options = {"preset": PRESET, "crf": str(QUALITY), "g": str(KEYFRAME_INTERVAL), "bf": "0"}
                for frame in frames:
                    picture = av.VideoFrame.from_ndarray(frame, format="rgb24")
                    picture.pts = self._encoded
                    picture.time_base = 1 / self._fps
                    container.mux(stream.encode(picture))
                    self._encoded += 1
                container.mux(stream.encode(None))
        except BaseException as e:  # handed to the recording thread, which would otherwise wait for ever
            self._error = e
            for _ in frames:
                pass


def decode(path: Path) -> Iterator[tuple[float, NDArray[np.uint8]]]:
    """Every frame of a video in order, as (seconds, uint8 [H, W, 3] RGB), by the conversion that LeRobot uses.

    Raises:
        UserError: The file is missing or is not a video.
    """
    with unreadable(path), av.open(str(path)) as container:
        stream = container.streams.video[0]
        stream.thread_count = 1  # the cache decodes several files at once
        time_base = stream.time_base
        assert time_base is not None
        for frame in container.decode(stream):
            assert frame.pts is not None
            yield float(frame.pts * time_base), frame.to_ndarray(format="rgb24")


@contextmanager
def unreadable(path: Path) -> Iterator[None]:
    """Say of a video that it is missing or is none.

    Raises:
        UserError: Instead of what the decoder raises.
    """
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"{path} is missing", "copy it again, or drop its episodes with `vla data repair`") from None
    except (av.error.FFmpegError, IndexError, AssertionError) as e:
        raise UserError(
            f"{path} is not a readable video ({e})", "copy it again, or drop its episodes with `vla data repair`"
        ) from None

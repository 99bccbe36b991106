"""Cameras that never make the control loop wait: each is read in a thread of its own, the newest picture is kept.

The thread opens the device, reads, converts to RGB, resizes, stamps, and opens it again after it was unplugged. A
picture is stamped by the hardware where the device says when it was taken, otherwise on arrival. A camera is at fault
when its newest picture is too old, or when it goes on delivering the same one: a sensor has noise, so bit-identical
pictures come from a driver that hangs.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import cv2
import numpy as np
from numpy.typing import NDArray

from vla_stack.errors import UserError
from vla_stack.images import fit_image

REOPEN_S = 0.5  # between attempts to open a device that is gone
MAX_AGE_S = 0.3
IDENTICAL_S = 1.0
READ_TIMEOUT_S = 1.0  # then it is opened again; that it is late is known long before
REAL_CAMERAS = ("OpenCVCamera", "RealSenseCamera")  # LeRobot's, whose pictures have a sensor's noise
Image = NDArray[np.uint8]


class Frame(NamedTuple):
    """``image`` uint8 [H, W, 3] RGB, ``t_ns`` monotonic time of capture, ``number`` counts the camera's frames."""

    image: Image
    t_ns: int
    number: int


class Source(Protocol):
    """A device, used by one thread."""

    def open(self) -> None:
        """Open it, also after it was lost; raises where it is not there."""
        ...

    def read(self) -> tuple[Image, int]:
        """The next picture, uint8 [H, W, 3] RGB, and its monotonic time of capture; waits for it, raises on loss."""
        ...

    def close(self) -> None: ...


class CameraStream:
    """The newest picture of one camera.

    Args:
        name: For messages.
        source: The device.
        size: (height, width) to resize to, aspect ratio kept and the rest black; None keeps the camera's.
        max_age_s: Oldest picture that is no fault.
        identical_s: A camera that has delivered the same picture for this long is frozen; None where a still scene is
            bit-identical, as in files and simulations.
    """

    def __init__(
        self,
        name: str,
        source: Source,
        size: tuple[int, int] | None = None,
        max_age_s: float = MAX_AGE_S,
        identical_s: float | None = None,
    ) -> None:
        self.name, self.reopened = name, 0
        self._source, self._size, self._max_age_s, self._identical_s = source, size, max_age_s, identical_s
        self._frame: Frame | None = None  # replaced as a whole: reading it needs no lock
        self._changed_ns = 0  # capture time of the first of the pictures that are alike
        self._checksum = -1
        self._error = ""
        self._ended = threading.Event()
        self._arrived = threading.Event()
        self._thread = threading.Thread(target=self._capture, daemon=True, name=f"camera {name}")

    def start(self, timeout_s: float = 10.0) -> Frame:
        """Begin, and wait for the first picture.

        Raises:
            UserError: None came in time.
        """
        self._thread.start()
        if not self._arrived.wait(timeout_s) or self._frame is None:
            self.close()
            raise UserError(
                f"camera '{self.name}': {self._error or f'no picture within {timeout_s:g} s'}",
                "check cable and index; lerobot-find-cameras lists what is there",
            )
        return self._frame

    def newest(self) -> Frame:
        """The newest picture, however old; does not wait."""
        if self._frame is None:
            raise RuntimeError(f"camera '{self.name}' was not started")
        return self._frame

    def trouble(self) -> str:
        """What is wrong with it now, in one line; empty where all is well."""
        age_s = (time.monotonic_ns() - self.newest().t_ns) * 1e-9
        if age_s > self._max_age_s:
            return f"camera '{self.name}' has sent no picture for {age_s:.1f} s" + f": {self._error}" * bool(
                self._error
            )
        same_s = (self.newest().t_ns - self._changed_ns) * 1e-9
        if self._identical_s is not None and same_s > self._identical_s:
            return f"camera '{self.name}' is frozen: the same picture for {same_s:.1f} s"
        return ""

    def close(self) -> None:
        """End the thread and let go of the device; may be called twice."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(5.0)

    def _capture(self) -> None:
        is_open = False
        while not self._ended.is_set():
            try:
                if not is_open:
                    self._source.open()
                    is_open = True
                    self.reopened += self._frame is not None
                self._keep(*self._source.read())
                self._error = ""
            except Exception as e:  # whatever a camera library raises: the robot holds and the next attempt decides
                self._error = " ".join(str(e).split()) or type(e).__name__
                is_open = False
                _quietly(self._source.close)
                if self._frame is None:
                    self._arrived.set()  # at the start whoever waits for it is told at once
                self._ended.wait(REOPEN_S)
        _quietly(self._source.close)

    def _keep(self, image: Image, t_ns: int) -> None:
        if self._identical_s is not None:
            checksum = zlib.crc32(np.ascontiguousarray(image[::4, ::4]))
            if checksum != self._checksum:
                self._checksum, self._changed_ns = checksum, t_ns
        if self._size is not None:
            image = fit_image(image, *self._size)
        number = 0 if self._frame is None else self._frame.number + 1
        self._frame = Frame(np.ascontiguousarray(image), t_ns, number)
        self._arrived.set()


@dataclass
class OpenCVSource:
    """A V4L2 (or other OpenCV) device.

    Args:
        device: Index or path, e.g. ``/dev/video0``.
        width, height, fps: To ask the device for; None leaves its default.
        fourcc: Pixel format, e.g. ``MJPG``, which two cameras on one USB hub need.
    """

    device: int | str
    width: int | None = None
    height: int | None = None
    fps: float | None = None
    fourcc: str | None = None

    def open(self) -> None:
        self._capture = cv2.VideoCapture(self.device, cv2.CAP_V4L2 if _is_v4l2(self.device) else cv2.CAP_ANY)
        if not self._capture.isOpened():
            raise ConnectionError(f"{self.device} cannot be opened")
        if self.fourcc:
            self._capture.set(cv2.CAP_PROP_FOURCC, cv2.VideoWriter.fourcc(*self.fourcc))
        for key, value in (
            (cv2.CAP_PROP_FRAME_WIDTH, self.width),
            (cv2.CAP_PROP_FRAME_HEIGHT, self.height),
            (cv2.CAP_PROP_FPS, self.fps),
        ):
            if value is not None:
                self._capture.set(key, value)
        self._capture.set(cv2.CAP_PROP_BUFFERSIZE, 1)

    def read(self) -> tuple[Image, int]:
        good, image = self._capture.read()
        arrived = time.monotonic_ns()
        if not good:
            raise ConnectionError(f"{self.device} delivers no picture")
        # V4L2 reports when the first byte of the picture was captured, on the monotonic clock.
        taken = int(self._capture.get(cv2.CAP_PROP_POS_MSEC) * 1e6)
        stamp = taken if 0 <= arrived - taken < 1_000_000_000 else arrived
        return cv2.cvtColor(image, cv2.COLOR_BGR2RGB).astype(np.uint8, copy=False), stamp

    def close(self) -> None:
        self._capture.release()


@dataclass
class VideoFileSource:
    """A film that plays in real time, again and again; a camera for tests and demonstrations.

    Args:
        path: Anything that OpenCV decodes.
        fps: Pictures per second; None is the file's own.
    """

    path: str
    fps: float | None = None

    def open(self) -> None:
        self._capture = cv2.VideoCapture(str(self.path))
        if not self._capture.isOpened():
            raise ConnectionError(f"{self.path} cannot be played")
        self._period_ns = round(1e9 / (self.fps or self._capture.get(cv2.CAP_PROP_FPS) or 30.0))
        self._due_ns = time.monotonic_ns()

    def read(self) -> tuple[Image, int]:
        good, image = self._capture.read()
        if not good:
            self._capture.set(cv2.CAP_PROP_POS_FRAMES, 0)
            good, image = self._capture.read()
        if not good:
            raise ConnectionError(f"{self.path} has no pictures")
        self._due_ns = max(self._due_ns + self._period_ns, time.monotonic_ns() - self._period_ns)
        time.sleep(max(0, self._due_ns - time.monotonic_ns()) * 1e-9)
        return cv2.cvtColor(image, cv2.COLOR_BGR2RGB).astype(np.uint8, copy=False), time.monotonic_ns()

    def close(self) -> None:
        self._capture.release()


@dataclass
class LeRobotSource:
    """Any LeRobot camera.

    Args:
        camera: Not connected yet.
    """

    camera: Any

    def __post_init__(self) -> None:
        if type(self.camera).__name__ == "ZMQCamera":
            _close_after_reading(self.camera)

    def open(self) -> None:
        self.camera.connect()
        self._period_s = 0.5 / (self.camera.fps or 60.0)  # some cameras answer at once with the picture of before
        self._read_s = 0.0

    def read(self) -> tuple[Image, int]:
        time.sleep(max(0.0, self._read_s + self._period_s - time.monotonic()))
        self._read_s = time.monotonic()
        image = self.camera.async_read(timeout_ms=READ_TIMEOUT_S * 1000)
        stamp = getattr(self.camera, "latest_timestamp", None)  # time.perf_counter(), which is the monotonic clock
        return image, time.monotonic_ns() if stamp is None else int(stamp * 1e9)

    def close(self) -> None:
        self.camera.disconnect()


SOURCES: dict[str, Callable[..., Source]] = {"v4l2": OpenCVSource, "video": VideoFileSource}


def open_cameras(
    ours: Mapping[str, Mapping[str, Any]], lerobot: Mapping[str, Any], size: tuple[int, int] | None
) -> dict[str, CameraStream]:
    """Start all cameras of a robot, or none.

    Args:
        ours: Camera -> ``{type: v4l2, device: /dev/video0, width: 640, ...}`` or ``{type: video, path: film.mp4}``.
        lerobot: Camera -> a LeRobot camera, not connected.
        size: (height, width) to resize to.

    Raises:
        UserError: A camera is not there, or its options are unknown.
    """
    streams: dict[str, CameraStream] = {}
    for name, options in ours.items():
        kind = SOURCES[options["type"]]
        try:
            source = kind(**{k: v for k, v in options.items() if k != "type"})
        except TypeError as e:
            raise UserError(f"camera '{name}': {e}", "its options are in robot_drivers/cameras.py") from e
        streams[name] = CameraStream(name, source, size, identical_s=IDENTICAL_S if kind is OpenCVSource else None)
    for name, camera in lerobot.items():
        real = type(camera).__name__ in REAL_CAMERAS
        streams[name] = CameraStream(name, LeRobotSource(camera), size, identical_s=IDENTICAL_S if real else None)
    try:
        for stream in streams.values():
            stream.start()
    except UserError:
        for stream in streams.values():
            stream.close()
        raise
    return streams


def _close_after_reading(camera: Any) -> None:
    """Let LeRobot's ZMQ camera close its socket only when its own thread is not receiving on it.

    libzmq aborts the process otherwise, and with it a robot's control loop: a silent camera is disconnected after two
    seconds, while its thread waits for as long as ``timeout_ms``.
    """
    reading, read, cleanup = threading.Lock(), camera._read_from_hardware, camera._cleanup

    def read_alone() -> Any:
        with reading:
            return read()

    def cleanup_alone() -> None:
        if camera.stop_event is not None:
            camera.stop_event.set()
        with reading:
            cleanup()

    camera._read_from_hardware, camera._cleanup = read_alone, cleanup_alone


def _is_v4l2(device: int | str) -> bool:
    return isinstance(device, int) or str(device).startswith("/dev/")


def _quietly(call: Callable[[], None]) -> None:
    try:
        call()
    except Exception:  # a device that is gone cannot be closed properly either
        pass

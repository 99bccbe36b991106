"""What happens while a robot runs, as an MCAP file that Foxglove opens, written beside the run and never in its way.

Belongs to the node: the control process hands out observations and rows without waiting, and counts what finds no room;
here they wait in a bounded queue for a thread that encodes and writes. Chunks of the file are handed to the operating
system as they fill, so a process that is killed leaves them whole.

Topics, all of ROS types: ``/state`` and ``/action`` (JointState), ``/camera/NAME`` (CompressedImage, JPEG), ``/chunk``
(JointTrajectory, stamped with the capture of the observation that it answers, so that log time minus stamp is its age),
``/instruction`` (String), ``/log`` (Log). Times are the robot's monotonic ones, moved to the epoch once.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from mcap.writer import CompressionType
from mcap_ros2.writer import Writer
from numpy.typing import NDArray

from vla_stack import ros_messages as ros
from vla_stack.errors import UserError
from vla_stack.runtime.frames import Frame
from vla_stack.schema import ActionChunk, Dim, Observation, RobotSpec

MAX_BYTES, MAX_ITEMS = 64 << 20, 10_000  # that may wait: pictures by their size, everything else by number
CHUNK_BYTES = 32 << 10  # of the file: what a killed process can lose
JPEG = [cv2.IMWRITE_JPEG_QUALITY, 90]
CAPTURES = 256  # observations whose time is remembered for the chunk that answers them


class RunLog:
    """Writes one file; a context manager. All methods may be called from any thread and none waits, except ``close``.

    Args:
        path: The file; must not be there yet.
        robot: What is logged; names of the messages' dimensions.

    Attributes:
        lost: Observations, actions, chunks and events for which there was no room, or no disk.
        error: Why nothing more is written; None while all is well.

    Raises:
        UserError: The file is there.
    """

    def __init__(self, path: Path, robot: RobotSpec) -> None:
        self.path, self.lost, self.written = path, 0, 0
        self.error: BaseException | None = None
        self._robot = robot
        self._epoch_ns = time.time_ns() - time.monotonic_ns()
        self._captured: dict[int, int] = {}  # step -> ns
        self._task: str | None = None
        self._items: deque[tuple[int, Callable[[], None]]] = deque()
        self._bytes = 0
        self._closing = False
        self._wake = threading.Condition()
        check_new(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("xb")
        self._writer = Writer(self._file, CHUNK_BYTES, CompressionType.ZSTD)
        self._schemas = {kind: self._writer.register_msgdef(kind, ros.DEFINITIONS[kind]) for kind in ros.DEFINITIONS}
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def observation(self, obs: Observation) -> None:
        """Log what the robot measured and saw, and its instruction where it is a new one."""
        if len(self._captured) >= CAPTURES:
            self._captured.pop(next(iter(self._captured)))
        self._captured[obs.step] = obs.t_capture_ns
        if obs.task != self._task:
            self._task = obs.task
            self._put(0, lambda: self._write("/instruction", ros.STRING, obs.t_capture_ns, {"data": obs.task}))
        self._put(sum(image.nbytes for image in obs.images.values()), lambda: self._observed(obs))

    def frame(self, frame: Frame) -> None:
        """Log the command of a control step, as it was sent."""
        t_ns, action = round(frame.t * 1e9), frame.action
        self._put(0, lambda: self._joints("/action", t_ns, self._robot.action, action), frame.labels["gap"])

    def chunk(self, chunk: ActionChunk) -> None:
        """Log a chunk that has arrived."""
        now_ns = time.monotonic_ns()
        captured_ns = self._captured.get(chunk.k_obs, now_ns)
        self._put(chunk.actions.nbytes, lambda: self._arrived(chunk, captured_ns, now_ns))

    def event(self, text: str, warn: bool = False) -> None:
        """Log a line of text."""
        now_ns, level = time.monotonic_ns(), ros.WARNING if warn else ros.INFO
        message = {"stamp": ros.time_message(now_ns + self._epoch_ns), "level": level, "name": "vla run", "msg": text}
        self._put(len(text), lambda: self._write("/log", ros.LOG, now_ns, message))

    def begin_episode(self, text: str) -> None:
        """Log that an episode begins, and forget the steps of the one before."""
        self._captured.clear()
        self._task = None
        self.event(text)

    def close(self) -> None:
        """Write what waits and finish the file."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()
        try:
            if self.error is None:
                self._writer.finish()
            self._file.close()
        except OSError as e:
            self.error = self.error or e

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- on the thread of the caller --------------------------------------------------------------------------------

    def _put(self, size: int, write: Callable[[], None], lost_before: int = 0) -> None:
        with self._wake:
            self.lost += lost_before
            full = self._bytes + size > MAX_BYTES or len(self._items) >= MAX_ITEMS
            if full or self.error is not None or self._closing:
                self.lost += 1
                return
            self._bytes += size
            self._items.append((size, write))
            self._wake.notify()

    # -- on the log's thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._items or self._closing)
                if not self._items:
                    return
                size, write = self._items.popleft()
            try:
                write()
                self._file.flush()
            except Exception as e:  # a full disk, for one: the run goes on without its log
                with self._wake:
                    self.error = e
                    self.lost += 1 + len(self._items)
                    self._items.clear()
                return
            with self._wake:
                self._bytes -= size

    def _observed(self, obs: Observation) -> None:
        self._joints("/state", obs.t_capture_ns, self._robot.state, obs.state)
        for camera, image in obs.images.items():
            ok, data = cv2.imencode(".jpg", cv2.cvtColor(image, cv2.COLOR_RGB2BGR), JPEG)
            assert ok
            t_ns = obs.image_t_ns.get(camera, obs.t_capture_ns)
            message = {"header": self._header(t_ns, camera), "format": "jpeg", "data": data.tobytes()}
            self._write(f"/camera/{camera}", ros.COMPRESSED_IMAGE, t_ns, message)

    def _joints(self, topic: str, t_ns: int, dims: tuple[Dim, ...], values: NDArray[np.float32]) -> None:
        names = [d.name for d in dims]
        self._write(
            topic, ros.JOINT_STATE, t_ns, {"header": self._header(t_ns), "name": names, "position": values.tolist()}
        )

    def _arrived(self, chunk: ActionChunk, captured_ns: int, now_ns: int) -> None:
        dt_ns, first = self._robot.dt * 1e9, chunk.origin - chunk.k_obs
        points = [
            {"positions": action, "time_from_start": ros.time_message(round((first + i) * dt_ns))}
            for i, action in enumerate(chunk.actions.tolist())
        ]
        names = [d.name for d in self._robot.action]
        message = {"header": self._header(captured_ns), "joint_names": names, "points": points}
        self._write("/chunk", ros.TRAJECTORY, now_ns, message)

    def _header(self, t_ns: int, frame_id: str = "") -> dict[str, Any]:
        return {"stamp": ros.time_message(t_ns + self._epoch_ns), "frame_id": frame_id}

    def _write(self, topic: str, kind: str, t_ns: int, message: dict[str, Any]) -> None:
        self._writer.write_message(topic, self._schemas[kind], message, t_ns + self._epoch_ns)
        self.written += 1


def check_new(path: Path) -> None:
    """Refuse a log whose file is there.

    Raises:
        UserError: It is.
    """
    if path.exists():
        raise UserError(f"{path} is there already", "name another file, or move it away")

"""Frames on their way from the control loop to a recording: in order, on a thread of their own, none lost silently."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vla_stack.schema import Observation

MAX_BYTES, MIN_FRAMES = 256 << 20, 64


@dataclass(frozen=True, slots=True)
class Frame:
    """A recorded control step.

    Attributes:
        obs: As measured at its start.
        action: float32 [A] as the driver sent it, bit for bit.
        joint_command: float32 [J], joint targets that realised it, radians; None where the driver does not say.
        labels: Values by column name; ``gap`` counts the frames lost since the one before.
        t: When the action was sent, seconds of the robot's monotonic clock.
    """

    obs: Observation
    action: NDArray[np.float32]
    joint_command: NDArray[np.float32] | None
    labels: dict[str, Any]
    t: float


def most_waiting(obs: Observation) -> int:
    """How many frames like this one may wait in memory for a slow disk."""
    size = sum(image.nbytes for image in obs.images.values())
    return max(MIN_FRAMES, MAX_BYTES // max(1, size))


class FrameQueue:
    """Hands frames to a function that may be slow, as a full disk's is, without making anybody wait.

    Args:
        write: Called with each frame, in order, on a thread of this queue's. What it raises ends the recording.
    """

    def __init__(self, write: Callable[[Frame], None]) -> None:
        self.error: BaseException | None = None
        self.lost = 0
        self._write = write
        self._frames: deque[Frame] = deque()
        self._gap = 0
        self._closing = False
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="frames", daemon=True)
        self._thread.start()

    def put(self, frame: Frame) -> None:
        """Queue a frame; where there is no room it is lost, and counted in the next one's ``gap``."""
        room = most_waiting(frame.obs)
        with self._wake:
            if len(self._frames) >= room or self.error is not None:
                self._gap += 1 + frame.labels["gap"]
                self.lost += 1 + frame.labels["gap"]
                return
            self.lost += frame.labels["gap"]
            self._frames.append(replace(frame, labels={**frame.labels, "gap": frame.labels["gap"] + self._gap}))
            self._gap = 0
            self._wake.notify()

    def close(self) -> None:
        """Wait until all frames are written.

        Raises:
            BaseException: What writing raised.
        """
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._frames or self._closing)
                if not self._frames:
                    return
                frame = self._frames.popleft()
            try:
                self._write(frame)
            except BaseException as e:
                with self._wake:
                    self.error = e
                    self._frames.clear()
                return


def version_number(model_version: str) -> int:
    """Column ``policy_version``: the first 60 bits of the hash of the weights; 0 where it is no hash."""
    try:
        return int(model_version[:15], 16)
    except ValueError:
        return 0

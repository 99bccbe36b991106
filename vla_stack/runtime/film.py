"""What the robot saw, as small mp4 files. Runs in the node, never in the control process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vla_stack.schema import Observation

HEIGHT = 240  # pixels, of a film


class Film:
    """Collects the frames of one episode; pass :meth:`add` to ``RobotNode.run_episode``."""

    def __init__(self) -> None:
        import cv2  # here, as importing it while an episode runs would hold chunks up

        self._cv2 = cv2
        self._frames: list[NDArray[np.uint8]] = []

    def add(self, obs: Observation) -> None:
        """Keep the cameras of one observation side by side, scaled to one height."""
        cv2 = self._cv2

        def scaled(image: NDArray[np.uint8]) -> NDArray[Any]:
            height, width = image.shape[:2]
            kind = cv2.INTER_NEAREST if height < HEIGHT else cv2.INTER_AREA
            return cv2.resize(image, (2 * round(width * HEIGHT / height / 2), HEIGHT), interpolation=kind)

        if obs.images:
            self._frames.append(np.hstack([scaled(image) for image in obs.images.values()]))

    def write(self, path: Path, rate_hz: float) -> bool:
        """Write an mp4; returns whether there was anything to write.

        H.264, which browsers play, where PyAV is installed; MPEG-4 part 2, which players play, with OpenCV alone.
        """
        if not self._frames:
            return False
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            _write_h264(self._frames, path, rate_hz)
        except ImportError:
            _write_mpeg4(self._frames, path, rate_hz)
        return True


def _write_h264(frames: list[NDArray[np.uint8]], path: Path, rate_hz: float) -> None:
    import av

    height, width = frames[0].shape[:2]
    with av.open(str(path), "w", options={"movflags": "faststart"}) as out:
        stream: Any = out.add_stream("libx264", rate=round(rate_hz))
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.options = {"crf": "26", "preset": "veryfast"}
        for frame in frames:
            out.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        out.mux(stream.encode())


def _write_mpeg4(frames: list[NDArray[np.uint8]], path: Path, rate_hz: float) -> None:
    import cv2

    height, width = frames[0].shape[:2]
    fourcc = cv2.VideoWriter.fourcc(*"mp4v")
    out = cv2.VideoWriter(str(path), fourcc, rate_hz, (width, height))
    for frame in frames:
        out.write(frame[..., ::-1])
    out.release()

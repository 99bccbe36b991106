"""How a robot sends pictures: as its cameras give them, as the policy reads them, or that compressed.

On this machine nothing is gained by less, so pictures go as they are. Over a network the robot makes of each picture
what the policy reads, exactly as the server would, and compresses it where the link, measured once at HELLO, takes
longer for the bytes that this saves than both ends for JPEG.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from vla_stack.errors import UserError
from vla_stack.schema import PolicySpec, Reading, picture_shapes
from vla_stack.serving import jpeg
from vla_stack.serving.wire import Jpeg

QUALITY = 95  # of JPEG; success with it is measured, see docs/execution.md
PART = 0.25  # of raw bytes that JPEG of this quality takes at most, of a scene with noise
TRIES = 5  # of which the least counts
type Images = Mapping[str, NDArray[np.uint8]]


class How(StrEnum):
    """In what form pictures travel."""

    AUTO = "auto"  # CAMERA on this machine, else RAW or JPEG by measurement
    CAMERA = "camera"  # as cameras give them
    RAW = "raw"  # as the policy reads them
    JPEG = "jpeg"  # that, compressed


@dataclass(frozen=True, slots=True)
class Pictures:
    """In what form to send pictures; ``quality`` is that of JPEG, 1 to 100."""

    how: How = How.AUTO
    quality: int = QUALITY

    @classmethod
    def parse(cls, text: str) -> Pictures:
        """``auto``, ``camera``, ``raw``, ``jpeg`` or ``jpeg:QUALITY``.

        Raises:
            UserError: It is none of them.
        """
        name, _, quality = text.partition(":")
        number = int(quality) if quality.isascii() and quality.isdigit() else 0
        if name not in tuple(How) or (quality and (name != How.JPEG or not 0 < number <= 100)):
            raise UserError(
                f"--pictures {text} cannot be read", "write auto, camera, raw, jpeg or jpeg:QUALITY (1 to 100)"
            )
        return cls(How(name), number or QUALITY)

    def __str__(self) -> str:
        return f"{self.how}:{self.quality}" if self.how is How.JPEG else str(self.how)


def sendable(
    images: Images, reads: Mapping[str, Reading], choice: Pictures
) -> tuple[dict[str, NDArray[np.uint8]], dict[str, Jpeg]]:
    """What is sent of a robot's pictures: pixels by camera, and those of them that are compressed.

    Args:
        images: As the cameras gave them.
        reads: What the policy reads of them.
        choice: Form; not AUTO.
    """
    if choice.how is How.CAMERA:
        return dict(images), {}
    made = dict(images)
    for camera, reading in reads.items():
        if camera in made:
            from vla_stack.images import as_read

            made[camera] = as_read(made[camera], reading)
    if choice.how is How.RAW:
        return made, {}
    compressed = {camera: jpeg.compress(image, choice.quality) for camera, image in made.items()}
    return made, {camera: picture for camera, picture in compressed.items() if picture}


def read_shapes(policy: PolicySpec) -> list[tuple[int, int, int]]:
    """Shapes of the pictures of one request, as the policy reads them."""
    return [picture_shapes(camera, policy.reads)[-1] for camera in policy.robot.cameras]


def choose(transfer_s: float, codec_s: float, quality: int = QUALITY) -> Pictures:
    """The form that gets pictures across sooner.

    Args:
        transfer_s: What their raw bytes take beyond an empty message, encryption included.
        codec_s: What compressing and decoding them takes.
        quality: Of JPEG.
    """
    return Pictures(How.JPEG if (1 - PART) * transfer_s > codec_s else How.RAW, quality)


def codec_seconds(shapes: list[tuple[int, int, int]], quality: int) -> float:
    """What compressing and decoding pictures of these shapes takes, the server's half taken to be alike.

    Seconds of CPU: what else this computer does for the moment is not to decide.
    """
    rng = np.random.default_rng(0)
    blank = [np.repeat(rng.integers(0, 256, (h, -(-w // 8), 3), np.uint8), 8, axis=1)[:, :w] for h, w, _ in shapes]
    seconds = []
    for _ in range(TRIES):
        begun = time.thread_time()
        for image in blank:
            if picture := jpeg.compress(np.ascontiguousarray(image), quality):
                jpeg.expand(picture)
        seconds.append(time.thread_time() - begun)
    return min(seconds)

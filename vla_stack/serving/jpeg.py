"""Pictures as JPEG, for links that are slower than compressing: baseline, interleaved, colour at full resolution.

What comes in is hostile. Its markers are read before any of it is decoded, and only what :func:`compress` writes is let
through: one frame header, of the size that was declared and whose memory is granted, one scan. So there is no picture
that is larger than it says, none of a thousand scans, and no metadata that the decoder would act on (an orientation
would turn the picture).
"""

from __future__ import annotations

import importlib.util

import numpy as np
from numpy.typing import NDArray

from vla_stack.serving.wire import Code, Jpeg, WireError

AVAILABLE = importlib.util.find_spec("cv2") is not None
CODEC = "jpeg"  # in a WELCOME
SOI, EOI, SOF0, SOS = 0xD8, 0xD9, 0xC0, 0xDA
OTHERS = (0xC4, 0xDB, 0xDD, 0xE0)  # tables, restart interval, JFIF: segments that may stand before the scan


def compress(image: NDArray[np.uint8], quality: int) -> Jpeg | None:
    """A picture as JPEG; None where that is no shorter.

    Args:
        image: uint8 [H, W, 3] RGB.
        quality: 1 to 100.
    """
    import cv2

    full = cv2.IMWRITE_JPEG_SAMPLING_FACTOR_444  # colour tells a policy what to pick
    how = (cv2.IMWRITE_JPEG_QUALITY, quality, cv2.IMWRITE_JPEG_SAMPLING_FACTOR, full)
    done, data = cv2.imencode(".jpg", cv2.cvtColor(image, cv2.COLOR_RGB2BGR), how)
    return Jpeg(image.shape, data.tobytes()) if done and len(data) < image.nbytes else None


def expand(picture: Jpeg) -> NDArray[np.uint8]:
    """The pixels of a picture whose shape has been granted, uint8 [H, W, 3] RGB.

    Raises:
        WireError: It is not what :func:`compress` makes, has another shape than it declares, or is damaged.
    """
    import cv2

    if reason := _objection(bytes(picture.data), picture.shape):
        raise WireError(Code.BAD_SCHEMA, f"a JPEG {reason}")
    try:
        image = cv2.imdecode(np.frombuffer(picture.data, np.uint8), cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)
    except cv2.error:
        image = None
    if image is None or image.shape != picture.shape or image.dtype != np.uint8:
        raise WireError(Code.BAD_SCHEMA, "a JPEG cannot be decoded")
    pixels = cv2.cvtColor(image, cv2.COLOR_BGR2RGB)
    pixels.setflags(write=False)
    return pixels  # type: ignore[return-value]


def _objection(data: bytes, shape: tuple[int, ...]) -> str:
    """Why a file is not let through to the decoder; empty where it is."""
    if data[:2] != bytes((0xFF, SOI)) or data[-2:] != bytes((0xFF, EOI)):
        return "does not begin and end as one"
    at, framed = 2, False
    while at + 4 <= len(data):
        if data[at] != 0xFF:
            return "has bytes between its segments"
        marker, size = data[at + 1], int.from_bytes(data[at + 2 : at + 4], "big")
        body = data[at + 4 : at + 2 + size]
        if size < 2 or len(body) != size - 2:
            return "has a segment that is cut off"
        if marker == SOS:
            if not framed or body[:1] != b"\x03":
                return "is not one scan of three colours"
            return _objection_to_scan(data[at + 2 + size : -2])
        if marker == SOF0:
            if framed or len(body) != 15 or body[0] != 8 or body[5] != 3:
                return "is not 8 bits of three colours"
            if (int.from_bytes(body[1:3], "big"), int.from_bytes(body[3:5], "big"), 3) != shape:
                return f"is not {shape[0]}x{shape[1]}, as it was declared"
            framed = True
        elif marker not in OTHERS:
            return f"has a segment {marker:#x}, only baseline files without metadata are taken"
        at += 2 + size
    return "has no picture"


def _objection_to_scan(scan: bytes) -> str:
    """Why coded pixels are not let through: a marker among them, other than a restart, begins something else."""
    at = scan.find(0xFF)
    while at != -1:
        following = scan[at + 1] if at + 1 < len(scan) else 0xFF
        if following != 0 and not 0xD0 <= following <= 0xD7:
            return "has more than one scan"
        at = scan.find(0xFF, at + 2)
    return ""

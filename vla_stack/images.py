"""Pictures brought to the size that a policy reads. OpenCV and numpy only: loaders and inference both use it."""

from __future__ import annotations

import cv2
import numpy as np
from numpy.typing import NDArray

from vla_stack.schema import Reading


def fit_image(image: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    """An image resized to touch a frame from within, centred, the rest black; aspect ratio kept.

    Shrinking averages areas, so nothing aliases; enlarging is bilinear.

    Args:
        image: uint8 [H, W, 3].
        height: Height of the frame, pixels.
        width: Width of the frame, pixels.

    Returns:
        uint8 [height, width, 3]; the image itself where it has that size.
    """
    h, w = image.shape[:2]
    if (h, w) == (height, width):
        return image
    scale = min(height / h, width / w)
    rows, cols = max(1, round(h * scale)), max(1, round(w * scale))
    small = cv2.resize(image, (cols, rows), interpolation=cv2.INTER_AREA if scale < 1 else cv2.INTER_LINEAR)
    out = np.zeros((height, width, 3), np.uint8)
    top, left = (height - rows) // 2, (width - cols) // 2
    out[top : top + rows, left : left + cols] = small
    return out


def touching(size: tuple[int, int], frame: tuple[int, int]) -> Reading | None:
    """What a network reads that shrinks pictures bilinearly to touch a frame from within and then pads them.

    The padding is left to it, so that no black bars travel.

    Args:
        size: Height and width of the camera's pictures.
        frame: Height and width of the frame.

    Returns:
        None where there is nothing to shrink, or where a picture of that size would be changed again.
    """
    ratio = max(size[0] / frame[0], size[1] / frame[1])
    height, width = max(1, int(size[0] / ratio)), max(1, int(size[1] / ratio))
    if ratio <= 1 or max(height / frame[0], width / frame[1]) != 1:  # rounded: it would be resized once more
        return None
    return Reading(height, width, "linear")


def as_read(image: NDArray[np.uint8], reading: Reading) -> NDArray[np.uint8]:
    """A camera's picture made what a policy reads of it; the image itself where it has that size.

    Robot and server both call this, so it makes no difference where it is done. ``linear`` is OpenCV's bit-exact kind;
    averages may differ in the last bit between processors.

    Args:
        image: uint8 [H, W, 3].
        reading: Size and filter.

    Returns:
        uint8 [height, width, 3].
    """
    if image.shape[:2] == (reading.height, reading.width):
        return image
    if reading.filter == "linear":
        return cv2.resize(image, (reading.width, reading.height), interpolation=cv2.INTER_LINEAR_EXACT)  # type: ignore[return-value]
    return fit_image(image, reading.height, reading.width)

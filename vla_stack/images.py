"""Pictures brought to the size that a policy reads. OpenCV and numpy only: loaders and inference both use it."""

from __future__ import annotations

import cv2
import numpy as np
from numpy.typing import NDArray


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

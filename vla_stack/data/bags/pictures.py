"""Pictures of ROS messages as RGB arrays; what a header claims is compared with its bytes before it is decoded."""

from __future__ import annotations

import struct
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

MAX_PIXELS = 1 << 25  # of one picture; 8K video has as many
_RAW = {  # sensor_msgs' name of an encoding -> bytes a pixel, and how it becomes RGB
    "rgb8": (3, None),
    "bgr8": (3, cv2.COLOR_BGR2RGB),
    "rgba8": (4, cv2.COLOR_RGBA2RGB),
    "bgra8": (4, cv2.COLOR_BGRA2RGB),
    "mono8": (1, cv2.COLOR_GRAY2RGB),
    "yuv422_yuy2": (2, cv2.COLOR_YUV2RGB_YUYV),
    "yuv422": (2, cv2.COLOR_YUV2RGB_UYVY),
}


def decode_image(message: Any) -> NDArray[np.uint8]:
    """A ``sensor_msgs/Image`` as uint8 [H, W, 3] RGB.

    Raises:
        ValueError: It is of another encoding, or its sizes and its bytes do not agree.
    """
    if message.encoding not in _RAW:
        raise ValueError(f"encoding '{message.encoding}' is not read; {', '.join(_RAW)} are")
    size, conversion = _RAW[message.encoding]
    height, width, step = message.height, message.width, message.step
    _check_size(height, width)
    if step < width * size or len(message.data) < (height - 1) * step + width * size:
        raise ValueError(f"{height} rows of {step} bytes are no {width}x{height} {message.encoding}")
    flat = np.frombuffer(message.data, np.uint8)
    rows = np.lib.stride_tricks.as_strided(flat, (height, width * size), (step, 1), writeable=False)
    pixels = rows.reshape(height, width, size)
    if conversion is not None:
        return cv2.cvtColor(pixels if size > 1 else pixels[..., 0], conversion).astype(np.uint8, copy=False)
    return np.ascontiguousarray(pixels)


def decode_compressed(message: Any) -> NDArray[np.uint8]:
    """A ``sensor_msgs/CompressedImage``, JPEG or PNG, as uint8 [H, W, 3] RGB.

    Raises:
        ValueError: It is something else, damaged, or too large.
    """
    _check_size(*_size(message.data, message.format))
    image = cv2.imdecode(np.frombuffer(message.data, np.uint8), cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)
    if image is None:
        raise ValueError(f"a picture ({message.format}) cannot be decoded")
    return cv2.cvtColor(image, cv2.COLOR_BGR2RGB).astype(np.uint8, copy=False)


def _check_size(height: int, width: int) -> None:
    if not 0 < height * width <= MAX_PIXELS:
        raise ValueError(f"a picture of {width}x{height} is empty or too large")


def _size(data: bytes, form: str) -> tuple[int, int]:
    """Height and width that a JPEG's or PNG's header claims: a decoder would allocate them."""
    if data[:8] == b"\x89PNG\r\n\x1a\n" and len(data) >= 24:
        width, height = struct.unpack(">II", data[16:24])
        return height, width
    at = 2
    while data[:2] == b"\xff\xd8" and at + 9 <= len(data) and data[at] == 0xFF:
        marker, (length,) = data[at + 1], struct.unpack(">H", data[at + 2 : at + 4])
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):  # the start of a frame; those are tables
            height, width = struct.unpack(">HH", data[at + 5 : at + 9])
            return height, width
        at += 1 if marker == 0xFF else 2 + length  # filling bytes may stand before a marker
    raise ValueError(f"a picture ({form}) is neither JPEG nor PNG")

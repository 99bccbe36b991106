"""Recordings of which every sample is known, written by `rosbags`: joints tell their own time, and so do pictures."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
from rosbags.rosbag2 import StoragePlugin, Writer
from rosbags.typesys import Stores, get_typestore

STORE = get_typestore(Stores.ROS2_HUMBLE)
T = STORE.types
START_NS = 1_700_000_000_000_000_000
STATE, ACTION, FRONT, WRIST, TASK = "/joint_states", "/command", "/front/image_raw", "/wrist/compressed", "/instruction"
JOINTS = ("lift", "elbow", "finger")
HEIGHT, WIDTH = 16, 24


def header(ns: int | None) -> object:
    sec, nanosec = divmod(ns or 0, 1_000_000_000)
    return T["std_msgs/msg/Header"](T["builtin_interfaces/msg/Time"](sec, nanosec), "base")


def joint_state(ns: int | None, names, position) -> object:
    none = np.zeros(0)
    return T["sensor_msgs/msg/JointState"](header(ns), list(names), np.array(position, float), none, none)


def told_time(ns: int) -> float:
    """Position of a joint that tells when it was measured: seconds since the start."""
    return (ns - START_NS) * 1e-9


def picture(number: int) -> np.ndarray:
    """RGB; its number can be read from it even after lossy coding: its bits are bright or dark columns."""
    out = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    for bit in range(12):
        out[:, 2 * bit : 2 * bit + 2] = 230 * (number >> bit & 1)
    out[:4, :, 0] = 200  # red on top: channels that are swapped show
    return out


def number_of(image: np.ndarray) -> int:
    bright = image[6:, :, 1].astype(float).mean(0).reshape(12, 2).mean(1) > 115
    return int((bright << np.arange(12)).sum())


def image(ns: int | None, rgb: np.ndarray, encoding: str = "bgr8") -> object:
    data = {"rgb8": rgb, "bgr8": rgb[..., ::-1]}[encoding]
    rows = np.zeros((HEIGHT, 3 * WIDTH + 8), np.uint8)  # rows may be longer than their pixels
    rows[:, : 3 * WIDTH] = data.reshape(HEIGHT, -1)
    return T["sensor_msgs/msg/Image"](header(ns), HEIGHT, WIDTH, encoding, 0, rows.shape[1], rows.reshape(-1))


def compressed(ns: int | None, rgb: np.ndarray, form: str = "jpeg") -> object:
    ok, data = cv2.imencode(f".{form}", rgb[..., ::-1])
    assert ok
    return T["sensor_msgs/msg/CompressedImage"](header(ns), f"rgb8; {form} compressed bgr8", data.reshape(-1))


def string(text: str) -> object:
    return T["std_msgs/msg/String"](text)


def write(path: Path, messages, storage: str = "mcap", compression: str | None = None) -> Path:
    """A rosbag2 folder of (topic, log time, message), in this order."""
    with Writer(path, version=9, storage_plugin=StoragePlugin[storage.upper()]) as writer:
        topics: dict = {}
        for topic, log_ns, message in messages:
            kind = message.__msgtype__
            if topic not in topics:
                topics[topic] = writer.add_connection(topic, kind, typestore=STORE)
            writer.write(topics[topic], log_ns, STORE.serialize_cdr(message, kind))
    return path


def session(seconds: float, seed: int = 0, start: int = START_NS, delay_ns: int = 3_000_000) -> list:
    """A robot's topics, each with its rate, phase and jitter: state 1.25 kHz, command 50 Hz, cameras 30 and 15 Hz.

    What is logged comes some time after its stamp, so that log times would be wrong by milliseconds.
    """
    rng = np.random.default_rng(seed)
    out: list = [(TASK, start, string("pick the cube"))]

    def stamps(rate: float) -> np.ndarray:
        ideal = np.arange(0, seconds, 1 / rate) + rng.uniform(0, 0.3 / rate)
        return start + ((ideal + rng.uniform(0, 0.2 / rate, len(ideal))) * 1e9).astype(np.int64)

    for topic, rate, make in (
        (STATE, 1250, lambda ns, i: joint_state(ns, JOINTS[::-1], [0.02, told_time(ns), -told_time(ns)])),
        (ACTION, 50, lambda ns, i: joint_state(ns, JOINTS, [told_time(ns), told_time(ns) + 1, 0.04])),
        (FRONT, 30, lambda ns, i: image(ns, picture(i))),
        (WRIST, 15, lambda ns, i: compressed(ns, picture(i + 1000))),
    ):
        times = stamps(rate)
        logged = np.maximum.accumulate(times + delay_ns + rng.integers(0, 2_000_000, len(times)))  # a topic keeps order
        out += [
            (topic, log, make(ns, i)) for i, (ns, log) in enumerate(zip(times.tolist(), logged.tolist(), strict=True))
        ]
    return sorted(out, key=lambda item: item[1])

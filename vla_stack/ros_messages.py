"""ROS 2 messages as bytes: the types that bags are read for and logs are written in, without a ROS installation.

Only these types are decoded, by the definitions below: what a file says about its types is never parsed, so a foreign
file brings no code and no sizes of its own. Definitions: ros2/common_interfaces, the same since ROS 2 Foxy.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

from mcap.records import Schema
from mcap_ros2.decoder import DecoderFactory

JOINT_STATE = "sensor_msgs/msg/JointState"
IMAGE = "sensor_msgs/msg/Image"
COMPRESSED_IMAGE = "sensor_msgs/msg/CompressedImage"
STRING = "std_msgs/msg/String"
TRAJECTORY = "trajectory_msgs/msg/JointTrajectory"
FLOATS = "std_msgs/msg/Float64MultiArray"
LOG = "rcl_interfaces/msg/Log"
INFO, WARNING = 20, 30  # levels of a Log

_RULE = "=" * 80
_TIME = f"{_RULE}\nMSG: builtin_interfaces/Time\nint32 sec\nuint32 nanosec\n"
_HEADER = f"{_RULE}\nMSG: std_msgs/Header\nbuiltin_interfaces/Time stamp\nstring frame_id\n{_TIME}"
DEFINITIONS = {
    JOINT_STATE: "std_msgs/Header header\nstring[] name\nfloat64[] position\nfloat64[] velocity\nfloat64[] effort\n"
    + _HEADER,
    IMAGE: "std_msgs/Header header\nuint32 height\nuint32 width\nstring encoding\nuint8 is_bigendian\nuint32 step\n"
    "uint8[] data\n" + _HEADER,
    COMPRESSED_IMAGE: "std_msgs/Header header\nstring format\nuint8[] data\n" + _HEADER,
    STRING: "string data\n",
    TRAJECTORY: "std_msgs/Header header\nstring[] joint_names\ntrajectory_msgs/JointTrajectoryPoint[] points\n"
    f"{_HEADER}{_RULE}\nMSG: trajectory_msgs/JointTrajectoryPoint\nfloat64[] positions\nfloat64[] velocities\n"
    "float64[] accelerations\nfloat64[] effort\nbuiltin_interfaces/Duration time_from_start\n"
    f"{_RULE}\nMSG: builtin_interfaces/Duration\nint32 sec\nuint32 nanosec\n",
    FLOATS: "std_msgs/MultiArrayLayout layout\nfloat64[] data\n"
    f"{_RULE}\nMSG: std_msgs/MultiArrayLayout\nstd_msgs/MultiArrayDimension[] dim\nuint32 data_offset\n"
    f"{_RULE}\nMSG: std_msgs/MultiArrayDimension\nstring label\nuint32 size\nuint32 stride\n",
    LOG: "builtin_interfaces/Time stamp\nuint8 level\nstring name\nstring msg\nstring file\nstring function\n"
    f"uint32 line\n{_TIME}",
}


def decoder(kind: str) -> Callable[[bytes], Any]:
    """The function that reads a message of a type of ``DEFINITIONS`` from CDR bytes.

    It raises ``ValueError`` or ``struct.error`` where the bytes are no such message; a ``uint8[]`` that is cut short
    comes out short.
    """
    found = DecoderFactory().decoder_for(
        "cdr", Schema(id=1, data=DEFINITIONS[kind].encode(), encoding="ros2msg", name=kind)
    )
    assert found is not None
    return found


def time_message(ns: int) -> dict[str, int]:
    """A builtin_interfaces/Time or Duration of nanoseconds, as writers take it."""
    sec, nanosec = divmod(ns, 1_000_000_000)
    return {"sec": sec, "nanosec": nanosec}


def stamp_ns(message: Any) -> int | None:
    """Time in a message's header, ns; None where it has no header or nobody filled it in."""
    if (header := getattr(message, "header", None)) is None:
        return None
    return header.stamp.sec * 1_000_000_000 + header.stamp.nanosec or None


class Cdr:
    """Bytes of a message, little-endian: each value at a multiple of its size, counted from behind the first four."""

    def __init__(self) -> None:
        self._out = bytearray(b"\x00\x01\x00\x00")

    def put(self, form: str, *values: float) -> Cdr:
        """Values of one type of :mod:`struct`."""
        size = struct.calcsize(form)
        self._out += bytes(-(len(self._out) - 4) % size) if values else b""
        self._out += struct.pack(f"<{len(values)}{form}", *values)
        return self

    def text(self, text: str) -> Cdr:
        data = text.encode() + b"\0"
        self.put("I", len(data))
        self._out += data
        return self

    def texts(self, texts: Sequence[str]) -> Cdr:
        self.put("I", len(texts))
        for text in texts:
            self.text(text)
        return self

    def floats(self, values: Sequence[float]) -> Cdr:
        """A ``float64[]``."""
        return self.put("I", len(values)).put("d", *values)

    def header(self, stamp_ns: int) -> Cdr:
        """A std_msgs/Header without a frame."""
        sec, nanosec = divmod(stamp_ns, 1_000_000_000)
        return self.put("i", sec).put("I", nanosec).text("")

    def bytes(self) -> bytes:
        return bytes(self._out)


def joint_state(stamp_ns: int, names: Sequence[str], positions: Sequence[float]) -> bytes:
    """A sensor_msgs/JointState without velocities and efforts."""
    return Cdr().header(stamp_ns).texts(names).floats(positions).floats(()).floats(()).bytes()


def trajectory(stamp_ns: int, names: Sequence[str], positions: Sequence[float], after_ns: int) -> bytes:
    """A trajectory_msgs/JointTrajectory of one point, to be reached ``after_ns`` after it came.

    A stamp of 0 has it begin at once, whatever the clock of the other end says.
    """
    out = Cdr().header(stamp_ns).texts(names).put("I", 1)
    sec, nanosec = divmod(after_ns, 1_000_000_000)
    return out.floats(positions).floats(()).floats(()).floats(()).put("i", sec).put("I", nanosec).bytes()


def floats(values: Sequence[float]) -> bytes:
    """A std_msgs/Float64MultiArray without a layout."""
    return Cdr().put("I", 0).put("I", 0).floats(values).bytes()

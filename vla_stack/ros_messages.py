"""ROS 2 messages as bytes: the types that bags are read for and logs are written in, without a ROS installation.

Only these types are decoded, by the definitions below: what a file says about its types is never parsed, so a foreign
file brings no code and no sizes of its own. Definitions: ros2/common_interfaces, the same since ROS 2 Foxy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mcap.records import Schema
from mcap_ros2.decoder import DecoderFactory

JOINT_STATE = "sensor_msgs/msg/JointState"
IMAGE = "sensor_msgs/msg/Image"
COMPRESSED_IMAGE = "sensor_msgs/msg/CompressedImage"
STRING = "std_msgs/msg/String"
TRAJECTORY = "trajectory_msgs/msg/JointTrajectory"
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

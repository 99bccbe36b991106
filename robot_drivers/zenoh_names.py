"""How ROS 2 speaks over Zenoh (``rmw_zenoh``): names of topics, tokens of who is there, and what goes with a message.

https://github.com/ros2/rmw_zenoh, docs/design.md. A topic is the key ``DOMAIN/TOPIC/TYPE/HASH``. Whoever publishes or
subscribes keeps a liveliness token,
``@ros2_lv/DOMAIN/SESSION/NODE/ENTITY/KIND/ENCLAVE/NAMESPACE/NAME/TOPIC/TYPE/HASH/QOS``, slashes written as ``%``. With
a message go its number, its time and its sender; Jazzy says their names as well, later releases do not, so we send what
the others send.
"""

from __future__ import annotations

import secrets
import struct
from typing import NamedTuple

TOKEN = "@ros2_lv"
SUBSCRIBER, PUBLISHER, NODE = "MS", "MP", "NN"
QOS = "::,1:,:,:,,"  # the newest message alone, otherwise the defaults
NODE_NAME = "vla_stack"
LABELS = ("sequence_number", "source_timestamp", "source_gid")
GID = 16  # bytes
LABELLED, PLAIN = 77, 33  # bytes of what goes with a message


class Topic(NamedTuple):
    """A topic as somebody there has it.

    Attributes:
        name: With its slashes, without the first.
        kind: ROS type, e.g. ``sensor_msgs/msg/JointState``.
        hash: Of the type's definition; messages reach only who has the same.
    """

    name: str
    kind: str
    hash: str

    def key(self, domain: int) -> str:
        return f"{domain}/{self.name}/{_mangled(self.kind)}/{self.hash}"


def topic_of_key(key: str) -> Topic | None:
    """The topic of a message's key; None where it is none of ROS's."""
    parts = key.split("/")
    if len(parts) < 4 or (kind := _kind(parts[-2])) is None:
        return None
    return Topic("/".join(parts[1:-2]), kind, parts[-1])


def any_type(domain: int, name: str) -> str:
    """The keys of a topic, of whatever type."""
    return f"{domain}/{name}/*/*"


def subscribers(domain: int, name: str) -> str:
    """The tokens of who subscribes to a topic."""
    return f"{TOKEN}/{domain}/*/*/*/{SUBSCRIBER}/*/*/*/{_flat(name)}/*/*/*"


def topic_of_token(token: str) -> Topic | None:
    """The topic of a publisher's or subscriber's token; None where it is none."""
    parts = token.split("/")
    if len(parts) != 13 or parts[0] != TOKEN or (kind := _kind(parts[10])) is None:
        return None
    return Topic(parts[9].replace("%", "/").lstrip("/"), kind, parts[11])


def node_token(domain: int, session: str) -> str:
    """That there is a node of this name."""
    return f"{TOKEN}/{domain}/{session}/0/0/{NODE}/%/%/{NODE_NAME}"


def publisher_token(domain: int, session: str, topic: Topic) -> str:
    """That the node publishes a topic."""
    about = f"{_flat(topic.name)}/{_mangled(topic.kind)}/{topic.hash}"
    return f"{TOKEN}/{domain}/{session}/0/1/{PUBLISHER}/%/%/{NODE_NAME}/{about}/{QOS}"


class Attachments:
    """What goes with our messages, one after the other.

    Attributes:
        labelled: Say the names of the numbers.
    """

    def __init__(self) -> None:
        self.labelled, self._number, self._gid = True, 0, secrets.token_bytes(GID)

    def like(self, attachment: bytes) -> None:
        """Write as another publisher does."""
        if len(attachment) in (LABELLED, PLAIN):
            self.labelled = len(attachment) == LABELLED

    def next(self, now_ns: int) -> bytes:
        self._number += 1
        values = struct.pack("<q", self._number), struct.pack("<q", now_ns), bytes([GID]) + self._gid
        names = [bytes([len(name)]) + name.encode() if self.labelled else b"" for name in LABELS]
        return b"".join(name + value for name, value in zip(names, values, strict=True))


def _flat(name: str) -> str:
    return "%" + name.replace("/", "%")


def _mangled(kind: str) -> str:
    package, _, name = kind.split("/")
    return f"{package}::msg::dds_::{name}_"


def _kind(mangled: str) -> str | None:
    parts = mangled.split("::")
    if len(parts) != 4 or parts[1:3] != ["msg", "dds_"] or not parts[3].endswith("_"):
        return None
    return f"{parts[0]}/msg/{parts[3][:-1]}"

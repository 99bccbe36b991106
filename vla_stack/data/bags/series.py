"""What the topics of a recording hold over time, without the pictures: small enough to be held whole."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vla_stack.data.bags.files import DAMAGE, Bag
from vla_stack.data.bags.mapping import BagMap
from vla_stack.errors import UserError, first_line
from vla_stack.ros_messages import COMPRESSED_IMAGE, IMAGE, JOINT_STATE, STRING, decoder, stamp_ns

MAX_VALUES = 50_000_000  # joint positions of one recording: two hours of 7 joints at 1 kHz, 400 MB
MAX_NAMES, MAX_SOURCES = 1000, 100  # joints of a message, and different sets of joints on a topic
MAX_BYTES = 1 << 20  # of a message that is no picture


@dataclass
class Series:
    """Samples of one source, in order of their time.

    A message whose time is before that of an earlier one came too late to be told apart from the past; it is left out.

    Attributes:
        stamps: Times, ns.
        rows: Places of the samples among the messages of their topic.
        values: Texts of instructions; positions of joints, ``len(names)`` a sample; empty for pictures.
        names: Joints.
        late: Messages left out.
    """

    stamps: array[int] = field(default_factory=lambda: array("q"))
    rows: array[int] = field(default_factory=lambda: array("q"))
    values: Any = field(default_factory=list)
    names: tuple[str, ...] = ()
    late: int = 0

    def add(self, stamp: int, row: int) -> bool:
        """Note a sample; whether it is kept."""
        if self.stamps and stamp < self.stamps[-1]:
            self.late += 1
            return False
        self.stamps.append(stamp)
        self.rows.append(row)
        return True

    def newest(self, ticks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Index of the newest sample at or before each tick; -1: there is none yet."""
        return np.searchsorted(np.frombuffer(self.stamps, np.int64), ticks, side="right") - 1

    def at(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """Times of samples, ns."""
        return np.frombuffer(self.stamps, np.int64)[index]


@dataclass
class Recording:
    """All topics that a dataset is made of.

    Attributes:
        state: Joints as measured; several series where several nodes publish on the topic.
        action: Joints as commanded.
        cameras: Camera -> times of its pictures.
        tasks: Instructions, where they come by a topic.
        splits: Times at which episodes begin, ns.
    """

    state: list[Series]
    action: list[Series]
    cameras: dict[str, Series]
    tasks: Series | None
    splits: list[int]


def read_recording(bag: Bag, how: BagMap, kinds: Mapping[str, str]) -> Recording:
    """Read everything but the pictures, in one pass.

    Args:
        bag: The recording.
        how: Which topic is what.
        kinds: Type by topic, as :func:`check_topics` gives it.

    Raises:
        UserError: A message is damaged, or there is nothing on a topic; names file and topic.
    """
    wanted = {t for t in (how.state, how.action, how.task_topic, how.split_topic, *how.cameras.values()) if t}
    decode = {topic: decoder(kinds[topic]) for topic in wanted if topic != how.split_topic or topic == how.task_topic}
    joints: dict[str, dict[tuple[str, ...], Series]] = {how.state: {}, how.action: {}}
    plain = {topic: Series() for topic in (how.task_topic, *how.cameras.values()) if topic}
    counts, splits, size = dict.fromkeys(wanted, 0), [], 0
    for topic, log_ns, data in bag.messages(wanted):
        row = counts[topic]
        counts[topic] += 1
        if topic == how.split_topic:
            splits.append(log_ns)
        if topic not in decode:
            continue
        if len(data) > MAX_BYTES and topic not in how.cameras.values():
            raise UserError(f"{bag.path}: a message on '{topic}' has {len(data)} bytes", "leave it out")
        message = decode_one(bag, topic, decode[topic], data)
        stamp = (not how.log_time and stamp_ns(message)) or log_ns
        if topic in plain:
            size += 2
            if plain[topic].add(stamp, row) and topic == how.task_topic:
                plain[topic].values.append(message.data)
                size += len(message.data)
        else:
            size += _add_joints(bag, topic, joints[topic], message, stamp, row)
        if size > MAX_VALUES:
            raise UserError(f"{bag.path}: '{topic}' holds more than {MAX_VALUES} values", "split the recording")
    for topic, count in counts.items():
        if not count:
            raise UserError(f"{bag.path}: there is no message on '{topic}'", "take another topic")
    return Recording(
        list(joints[how.state].values()),
        list(joints[how.action].values()),
        {camera: plain[topic] for camera, topic in how.cameras.items()},
        plain[how.task_topic] if how.task_topic else None,
        splits,
    )


def decode_one(bag: Bag, topic: str, decode: Callable[[bytes], Any], data: bytes) -> Any:
    """What a function makes of a message.

    Raises:
        UserError: It makes nothing of it; names file and topic.
    """
    try:
        return decode(data)
    except DAMAGE as e:
        raise UserError(
            f"{bag.path}: a message on '{topic}' cannot be read ({first_line(e)})", "leave it out"
        ) from None


def check_topics(bag: Bag, how: BagMap) -> dict[str, str]:
    """Types by topic, once all that ``how`` names are there and can be read.

    Raises:
        UserError: Names the first that is not, and what there is.
    """
    kinds = bag.topics()
    wants: list[tuple[str, tuple[str, ...]]] = [
        (how.state, (JOINT_STATE,)),
        (how.action, (JOINT_STATE,)),
        (how.task_topic, (STRING,)),
    ]
    wants += [(topic, (IMAGE, COMPRESSED_IMAGE)) for topic in how.cameras.values()] + [(how.split_topic, ())]
    for topic, able in wants:
        if topic and topic not in kinds:
            there = ", ".join(f"{name} ({kind})" for name, kind in sorted(kinds.items())[:20]) or "none"
            raise UserError(f"{bag.path} has no topic '{topic}'", f"its topics are {there}")
        if able and topic and kinds[topic] not in able:
            raise UserError(f"{bag.path}: '{topic}' is {kinds[topic]}", f"it has to be {' or '.join(able)}, in CDR")
    return kinds


def _add_joints(bag: Bag, topic: str, found: dict[tuple[str, ...], Series], message: Any, stamp: int, row: int) -> int:
    """Note a JointState in the series of its names; returns how many values were kept."""
    names = tuple(message.name)
    if len(names) != len(message.position) or len(names) > MAX_NAMES:
        raise UserError(f"{bag.path}: a message on '{topic}' has {len(names)} names, {len(message.position)} positions")
    if names not in found:
        if len(found) == MAX_SOURCES:
            raise UserError(f"{bag.path}: '{topic}' has more than {MAX_SOURCES} sets of joints", "filter the topic")
        twice = [name for i, name in enumerate(names) if name in names[:i] or any(name in other for other in found)]
        if twice:
            raise UserError(f"{bag.path}: joint '{twice[0]}' of '{topic}' comes from two sources", "filter the topic")
        found[names] = Series(values=array("d"), names=names)
    if not found[names].add(stamp, row):
        return 0
    found[names].values.extend(message.position)
    return len(names) + 2

"""Messages of a rosbag2 or MCAP recording, one topic or several at a time, in the order in which they were recorded.

Files come from others: every size is bounded before anything of that size is allocated, nothing in them is executed,
and what cannot be read is one line that names the file.
"""

from __future__ import annotations

import contextlib
import sqlite3
import struct
import urllib.parse
from collections.abc import Collection, Generator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any, BinaryIO, NamedTuple

import lz4.frame
import yaml
import zstandard
from mcap.exceptions import McapError
from mcap.reader import SeekingReader
from mcap.records import Channel, Chunk, McapRecord, Message, Schema
from mcap.stream_reader import StreamReader, breakup_chunk

from vla_stack.errors import UserError, first_line

MAX_RECORD = 256 << 20  # bytes of one chunk or message, packed or not; a raw 4K picture has 25 million
MAX_METADATA = 16 << 20  # bytes of metadata.yaml
MCAP_MAGIC, SQLITE_MAGIC = b"\x89MCAP0\r\n", b"SQLite format 3\0"
FOREIGN = {  # how other files begin, and what to do about them
    b"\x28\xb5\x2f\xfd": "unpack it: zstd -d FILE",
    b"#ROSBAG V": "it is of ROS 1; convert it: rosbags-convert --src FILE --dst FOLDER",
}
DAMAGE: tuple[type[Exception], ...] = (
    McapError,
    ValueError,
    KeyError,
    struct.error,
    OverflowError,
    MemoryError,
    EOFError,
)
DAMAGE += (zstandard.ZstdError, RuntimeError, sqlite3.Error)  # RuntimeError: lz4's


class Raw(NamedTuple):
    """A message as it stands in the file."""

    topic: str
    log_ns: int
    data: bytes


@dataclass(frozen=True)
class Bag:
    """A recording.

    Attributes:
        path: What was named: a file, or a folder of rosbag2.
        files: Its storage files, in order.
        packed: Each message is compressed by itself (zstd).
    """

    path: Path
    files: tuple[Path, ...]
    packed: bool = False

    def topics(self) -> dict[str, str]:
        """Types by topic, as ``sensor_msgs/msg/Image``; an encoding other than CDR stands behind in brackets.

        Raises:
            UserError: A file is damaged.
        """
        found: dict[str, str] = {}
        for file in self.files:
            with _damage(file):
                found |= _mcap_topics(file) if _is_mcap(file) else _sqlite_topics(file)
        return found

    def messages(self, topics: Collection[str]) -> Generator[Raw]:
        """Messages of some topics in the order of recording; one chunk is held at a time.

        Raises:
            UserError: A file is damaged.
        """
        for file in self.files:
            with _damage(file):
                for raw in (_mcap_messages if _is_mcap(file) else _sqlite_messages)(file, topics):
                    yield raw._replace(data=_unpacked("zstd", raw.data, MAX_RECORD)) if self.packed else raw


def open_bag(path: Path) -> Bag:
    """A recording by its file (.mcap, .db3) or its rosbag2 folder.

    Raises:
        UserError: It is missing or is none.
    """
    if not path.is_dir():
        _is_mcap(path)
        return Bag(path, (path,))
    metadata = path / "metadata.yaml"
    if not metadata.is_file():
        raise UserError(f"{path} has no metadata.yaml", "name its .mcap or .db3 files one by one")
    if metadata.stat().st_size > MAX_METADATA:
        raise UserError(f"{metadata} is larger than {MAX_METADATA >> 20} MB", "name the bag's files one by one")
    try:
        about = yaml.safe_load(metadata.read_text())["rosbag2_bagfile_information"]
        files = tuple(path / PurePath(name).name for name in about["relative_file_paths"])
        packed = str(about.get("compression_mode", "")).lower() == "message"
    except (yaml.YAMLError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise UserError(f"{metadata} is not rosbag2's ({first_line(e)})", "name the bag's files one by one") from None
    if not files:
        raise UserError(f"{metadata} names no file", "name the bag's files one by one")
    for file in files:
        _is_mcap(file)
    return Bag(path, files, packed)


def _is_mcap(file: Path) -> bool:
    """Whether a file is MCAP; it is a SQLite database otherwise."""
    try:
        with file.open("rb") as stream:
            start = stream.read(16)
    except OSError as e:
        raise UserError(f"{file}: {e.strerror}", "check the file's name") from None
    if start.startswith((MCAP_MAGIC, SQLITE_MAGIC)):
        return start.startswith(MCAP_MAGIC)
    remedy = next((text for magic, text in FOREIGN.items() if start.startswith(magic)), "")
    raise UserError(f"{file} is neither MCAP nor a rosbag2 database", remedy.replace("FILE", str(file)))


@contextlib.contextmanager
def _damage(file: Path) -> Iterator[None]:
    try:
        yield
    except DAMAGE as e:
        remedy = (
            "`mcap recover` keeps what is whole" if _is_mcap(file) else "`sqlite3 FILE .recover` keeps what is whole"
        )
        raise UserError(f"{file} is damaged ({first_line(e)})", remedy) from None


def _unpacked(method: str, data: bytes, limit: int) -> bytes:
    """Decompressed bytes, at most ``limit`` of them."""
    if method == "zstd":
        out = zstandard.ZstdDecompressor(max_window_size=MAX_RECORD).stream_reader(data).read(limit + 1)
    elif method == "lz4":
        out = lz4.frame.LZ4FrameDecompressor().decompress(data, max_length=limit + 1)
    elif method == "":
        out = data
    else:
        raise ValueError(f"unknown compression {method!r}")
    if len(out) > limit:
        raise ValueError(f"{method or 'a chunk'} unpacks to more than {limit} bytes")
    return bytes(out)


class _Bounded:
    """A file of which nobody can ask for more than a record at once, whatever a length field says."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self.seek, self.tell = stream, stream.seek, stream.tell

    def read(self, size: int) -> bytes:
        if not 0 <= size <= MAX_RECORD:
            raise ValueError(f"a record claims {size} bytes")
        return self._stream.read(size)


def _mcap_records(file: Path) -> Iterator[McapRecord]:
    """Schemas, channels, messages and what else there is, in the order of the file."""
    with file.open("rb") as stream:
        bounded: Any = _Bounded(stream)
        for record in StreamReader(bounded, emit_chunks=True, record_size_limit=MAX_RECORD).records:
            if isinstance(record, Chunk):
                if record.uncompressed_size > MAX_RECORD:
                    raise ValueError(f"a chunk claims {record.uncompressed_size} bytes")
                data = _unpacked(record.compression, record.data, record.uncompressed_size)
                if len(data) != record.uncompressed_size:
                    raise ValueError(f"a chunk of {record.uncompressed_size} bytes has {len(data)}")
                yield from breakup_chunk(replace(record, compression="", data=data), validate_crc=True)
            else:
                yield record


def _mcap_topics(file: Path) -> dict[str, str]:
    schemas, channels = _mcap_summary(file) or ({}, {})
    if not channels:  # a recorder that was killed writes no summary
        for record in _mcap_records(file):
            if isinstance(record, Schema):
                schemas[record.id] = record
            elif isinstance(record, Channel):
                channels[record.id] = record

    def kind(channel: Channel) -> str:
        name = schemas[channel.schema_id].name if channel.schema_id else "without a type"
        return name if channel.message_encoding == "cdr" else f"{name} ({channel.message_encoding})"

    return {channel.topic: kind(channel) for channel in channels.values()}


def _mcap_summary(file: Path) -> tuple[dict[int, Schema], dict[int, Channel]] | None:
    """Schemas and channels as the end of the file lists them; None where it does not."""
    with file.open("rb") as stream, contextlib.suppress(*DAMAGE, OSError):
        bounded: Any = _Bounded(stream)
        summary = SeekingReader(bounded, record_size_limit=MAX_RECORD).get_summary()
        return (summary.schemas, summary.channels) if summary else None
    return None


def _mcap_messages(file: Path, topics: Collection[str]) -> Iterator[Raw]:
    names: dict[int, str] = {}
    for record in _mcap_records(file):
        if isinstance(record, Channel):
            names[record.id] = record.topic
        elif isinstance(record, Message) and names[record.channel_id] in topics:
            yield Raw(names[record.channel_id], record.log_time, record.data)


@contextlib.contextmanager
def _sqlite(file: Path) -> Iterator[sqlite3.Connection]:
    """A rosbag2 database to read from; it is not changed, and what is written in it is not run."""
    wal = file.with_name(file.name + "-wal")
    if wal.is_file() and wal.stat().st_size:
        raise UserError(f"{file} was not closed: {wal.name} holds messages", f"sqlite3 {file} 'PRAGMA wal_checkpoint'")
    with file.open("rb") as stream:
        page, pages = struct.unpack(">16xH10xI", stream.read(32))
    if file.stat().st_size < pages * (page if page > 1 else 1 << 16):
        raise ValueError("it is cut short")
    uri = f"file:{urllib.parse.quote(str(file.resolve()))}?mode=ro&immutable=1"
    with contextlib.closing(sqlite3.connect(uri, uri=True)) as database:
        database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_RECORD)
        database.execute("PRAGMA trusted_schema = OFF")
        tables = dict(database.execute("SELECT name, type FROM sqlite_master WHERE name IN ('topics', 'messages')"))
        if tables != {"topics": "table", "messages": "table"}:
            raise ValueError("it has no tables 'topics' and 'messages'")
        yield database


def _sqlite_topics(file: Path) -> dict[str, str]:
    with _sqlite(file) as database:
        rows = database.execute("SELECT name, type, serialization_format FROM topics")
        return {str(name): str(kind) if form == "cdr" else f"{kind} ({form})" for name, kind, form in rows}


def _sqlite_messages(file: Path, topics: Collection[str]) -> Iterator[Raw]:
    with _sqlite(file) as database:
        names = {i: name for i, name in database.execute("SELECT id, name FROM topics") if name in topics}
        marks = ", ".join("?" * len(names))
        rows = database.execute(  # rows stand in the order in which they came: no sort, so nothing is held
            f"SELECT topic_id, timestamp, data FROM messages WHERE topic_id IN ({marks}) ORDER BY id", tuple(names)
        )
        for i, log_ns, data in rows:
            if not (isinstance(log_ns, int) and isinstance(data, bytes)):
                raise ValueError(f"a message of {names[i]} has no time or no bytes")
            yield Raw(names[i], log_ns, data)

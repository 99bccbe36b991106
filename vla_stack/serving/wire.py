"""Wire format: a message is a small msgpack header and raw little-endian buffers, one ZeroMQ frame each.

Frame 0 is a msgpack map of at most 4 KiB::

    {v, type, sid, epoch, rid, ..., tensors: [[name, dtype, shape, enc, nbytes], ...]}

Frame 1 + i holds the bytes of ``tensors[i]``. Encoding copies no tensor and decoding yields read-only views of the
received memory. Everything that arrives is hostile until :func:`decode` has checked it: sizes before parsing, types and
shapes before any view. There is no pickle and no object dtype on any path (compare CVE-2026-25874).

Compatibility: a peer refuses another major version and ignores header keys and tensors that it does not know, so a
later minor feature is a new optional key.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

VERSION = 1
MAX_HEADER_BYTES = 4096
MAX_TENSORS = 16
MAX_RANK = 5
MAX_FRAME_BYTES = 8 << 20  # one 1920x1080 RGB image is 6.2 MB
MAX_TOTAL_BYTES = 32 << 20
MAX_NAME = 128
MAX_ERROR_TEXT = 300
NO_REQUEST = -1  # rid of a message that concerns no request

# Name on the wire -> little-endian numpy type. Anything else, objects above all, does not travel.
DTYPES: dict[str, np.dtype] = {
    "u8": np.dtype("u1"),
    "i32": np.dtype("<i4"),
    "i64": np.dtype("<i8"),
    "f16": np.dtype("<f2"),
    "f32": np.dtype("<f4"),
    "f64": np.dtype("<f8"),
    "bool": np.dtype("?"),
}
_WIRE_NAME = {dtype: name for name, dtype in DTYPES.items()}

# Optional header keys and their types. Integers fit int64; clocks are ``time.monotonic_ns`` of the named side.
FIELDS: dict[str, type] = {
    "k_obs": int,  # tick at whose start the observation was captured
    "t_obs": int,  # robot's clock at capture, echoed by the server and never compared with its own
    "origin": int,  # tick of actions[0]
    "d_cond": int,  # delay in ticks that the policy was conditioned on
    "execute": int,  # actions of the chunk to execute before the next request, 0 if the policy leaves that open
    "seed": int,  # noise seed of this request, >= 0
    "continue": str,  # how to continue the plan in tensor "plan"
    "slack_ms": int,  # how long the robot can wait for the answer
    "delay": int,  # steps of the plan that will be over before the new chunk takes over
    "task": str,  # language instruction
    "model_version": str,
    "code": str,  # of an ERR, see Code
    "text": str,  # of an ERR, one short line
    "t0": int,  # PING: client's clock when sent
    "t1": int,  # PONG: server's clock when received
    "t2": int,  # PONG: server's clock when answered
}


class Kind(StrEnum):
    """Message types. The client sends HELLO, INFER, RESET, PING, BYE; the server answers with the others."""

    HELLO = "HELLO"
    WELCOME = "WELCOME"
    INFER = "INFER"
    CHUNK = "CHUNK"
    RESET = "RESET"
    PING = "PING"
    PONG = "PONG"
    BYE = "BYE"
    ERR = "ERR"


_KINDS = frozenset(str(kind) for kind in Kind)


class Code(StrEnum):
    """Reasons of an ERR."""

    NOT_READY = "NOT_READY"  # the policy is loading or warming up: ask again
    NO_SESSION = "NO_SESSION"  # the server restarted or the session expired: say HELLO again
    BUSY = "BUSY"  # session limit reached, or the server is shutting down
    EXPIRED = "EXPIRED"  # a newer request or a reset overtook this one
    BAD_SCHEMA = "BAD_SCHEMA"  # malformed message, or an observation that the policy was not trained for
    VERSION = "VERSION"  # another major version of this format
    AUTH = "AUTH"  # not allowed
    INTERNAL = "INTERNAL"  # inference failed; the reason is in the server's log


class WireError(Exception):
    """A message that must not be used. ``code`` and ``text`` are fit to be sent to the peer."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code
        self.text = text


@dataclass(frozen=True, slots=True)
class Message:
    """One message, either way.

    Attributes:
        kind: Message type.
        sid: Session id, given by the server in WELCOME.
        epoch: Counts resets of the robot.
        rid: Request id, >= 0; a reply carries that of its request.
        fields: Optional header entries, keys and types as in ``FIELDS``.
        tensors: Arrays by name; read-only after :func:`decode`.
    """

    kind: Kind
    sid: str = ""
    epoch: int = 0
    rid: int = NO_REQUEST
    fields: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, NDArray[Any]] = field(default_factory=dict)


def encode(message: Message) -> list[bytes | memoryview]:
    """Frames of ``message``; frames 1.. alias its arrays, which must stay unchanged until they are sent.

    Raises:
        WireError: A limit of the format is exceeded, an array has a dtype that does not travel, or a key is unknown.
    """
    for key in message.fields:
        if key not in FIELDS:
            raise WireError(Code.BAD_SCHEMA, f"header key '{key}' is not part of the format")
    entries, buffers = [], []
    for name, array in message.tensors.items():
        dtype = _WIRE_NAME.get(array.dtype)
        if dtype is None:
            raise WireError(Code.BAD_SCHEMA, f"tensor '{name}': dtype {array.dtype} does not travel")
        entry = [name, dtype, list(array.shape), "raw", array.nbytes]
        _check_entry(entry)
        entries.append(entry)
        dense = array if array.flags.c_contiguous else array.copy(order="C")
        buffers.append(dense.reshape(-1).view(np.uint8).data)
    _check_totals(entries)
    header = msgpack.packb(
        {
            "v": VERSION,
            "type": str(message.kind),
            "sid": message.sid,
            "epoch": message.epoch,
            "rid": message.rid,
            **message.fields,
            "tensors": entries,
        }
    )
    if len(header) > MAX_HEADER_BYTES:
        raise WireError(
            Code.BAD_SCHEMA, f"header of {len(header)} bytes exceeds {MAX_HEADER_BYTES}: shorten the instruction"
        )
    return [header, *buffers]


def decode(frames: Sequence[bytes | memoryview]) -> Message:
    """The message in ``frames``, which may hold anything at all.

    Arrays are read-only views of ``frames``; only where the transport handed over memory that is not aligned for the
    dtype (ZeroMQ inlines small frames) is that array copied.

    Raises:
        WireError: Whatever is wrong, in one short line. No other exception leaves this function.
    """
    if not 1 <= len(frames) <= 1 + MAX_TENSORS:
        raise WireError(Code.BAD_SCHEMA, f"message has {len(frames)} frames, expected 1 to {1 + MAX_TENSORS}")
    header = _decode_header(frames[0])
    entries = header["tensors"]
    if len(entries) != len(frames) - 1:
        raise WireError(Code.BAD_SCHEMA, f"header names {len(entries)} tensors, {len(frames) - 1} frames follow")
    _check_totals(entries)
    tensors: dict[str, NDArray[Any]] = {}
    for entry, frame in zip(entries, frames[1:], strict=True):
        _check_entry(entry)
        if entry[0] in tensors:
            raise WireError(Code.BAD_SCHEMA, f"tensor '{entry[0]}' appears twice")
        tensors[entry[0]] = _view(entry, frame)
    return Message(
        kind=Kind(header["type"]),
        sid=header["sid"],
        epoch=header["epoch"],
        rid=header["rid"],
        fields={key: header[key] for key in FIELDS if key in header},
        tensors=tensors,
    )


def error(code: Code, text: str, sid: str = "", epoch: int = 0, rid: int = NO_REQUEST) -> Message:
    """An ERR message; ``text``, which may quote a peer, is cut to one short line that any peer can decode."""
    line = " ".join(text.split())[:MAX_ERROR_TEXT].encode("utf-8", "replace").decode()
    return Message(Kind.ERR, sid, epoch, rid, {"code": str(code), "text": line})


def _decode_header(frame: bytes | memoryview) -> dict[str, Any]:
    if len(frame) > MAX_HEADER_BYTES:
        raise WireError(Code.BAD_SCHEMA, f"header of {len(frame)} bytes exceeds {MAX_HEADER_BYTES}")
    try:
        header = msgpack.unpackb(frame)
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException):
        raise WireError(Code.BAD_SCHEMA, "header is not msgpack") from None
    if not isinstance(header, dict) or "v" not in header:
        raise WireError(Code.BAD_SCHEMA, "header is not a map with a version 'v'")
    version = header["v"]
    if type(version) is not int or version != VERSION:
        raise WireError(Code.VERSION, f"wire version {str(version)[:20]} is not {VERSION}: install the same vla-stack")
    kind = header.get("type")
    if type(kind) is not str or kind not in _KINDS:
        raise WireError(Code.BAD_SCHEMA, f"unknown message type {str(kind)[:20]!r}")
    for key, default in (("sid", ""), ("epoch", 0), ("rid", NO_REQUEST), ("tensors", [])):
        _check_type(key, header.setdefault(key, default), type(default))
    for key, expected in FIELDS.items():
        if key in header:
            _check_type(key, header[key], expected)
    return header


def _check_type(key: str, value: Any, kind: type[Any]) -> None:
    # type(), not isinstance(): a bool is an int to isinstance, and an int64 cast of 2**64 - 1 would wrap.
    if type(value) is not kind or (kind is int and not -(2**63) <= value < 2**63):
        raise WireError(Code.BAD_SCHEMA, f"header key '{key}' is not {kind.__name__}")


def _check_totals(entries: list[Any]) -> None:
    if len(entries) > MAX_TENSORS:
        raise WireError(Code.BAD_SCHEMA, f"{len(entries)} tensors exceed {MAX_TENSORS}")
    total = sum(e[4] for e in entries if type(e) is list and len(e) == 5 and type(e[4]) is int)
    if total > MAX_TOTAL_BYTES:
        raise WireError(Code.BAD_SCHEMA, f"{total} bytes of tensors exceed {MAX_TOTAL_BYTES}")


def _check_entry(entry: Any) -> None:
    """Everything about a tensor that can be known before its buffer is touched."""
    if type(entry) is not list or len(entry) != 5:
        raise WireError(Code.BAD_SCHEMA, "a tensor entry is not [name, dtype, shape, enc, nbytes]")
    name, dtype, shape, enc, nbytes = entry
    if type(name) is not str or not 0 < len(name) <= MAX_NAME:
        raise WireError(Code.BAD_SCHEMA, f"a tensor name is not a string of 1 to {MAX_NAME} characters")
    if type(dtype) is not str or dtype not in DTYPES:
        known = ", ".join(DTYPES)
        raise WireError(Code.BAD_SCHEMA, f"tensor '{name}': dtype {str(dtype)[:20]!r} is not one of {known}")
    if type(shape) is not list or len(shape) > MAX_RANK:
        raise WireError(Code.BAD_SCHEMA, f"tensor '{name}': shape is not a list of at most {MAX_RANK} sizes")
    if any(type(n) is not int or not 1 <= n <= MAX_FRAME_BYTES for n in shape):
        raise WireError(Code.BAD_SCHEMA, f"tensor '{name}': a size is not in 1..{MAX_FRAME_BYTES}")
    if enc != "raw":
        raise WireError(Code.BAD_SCHEMA, f"tensor '{name}': encoding {str(enc)[:20]!r} is not known")
    if type(nbytes) is not int or not 0 < nbytes <= MAX_FRAME_BYTES:
        raise WireError(Code.BAD_SCHEMA, f"tensor '{name}': not 1..{MAX_FRAME_BYTES} bytes")
    if math.prod(shape) * DTYPES[dtype].itemsize != nbytes:
        raise WireError(Code.BAD_SCHEMA, f"tensor '{name}': {dtype}{shape} is not {nbytes} bytes")


def _view(entry: list[Any], frame: bytes | memoryview) -> NDArray[Any]:
    name, dtype, shape, _, nbytes = entry
    if len(frame) != nbytes:
        raise WireError(Code.BAD_SCHEMA, f"tensor '{name}': frame has {len(frame)} bytes, header says {nbytes}")
    array: NDArray[Any] = np.ndarray(shape, DTYPES[dtype], buffer=frame)
    if dtype == "bool" and array.view(np.uint8).max() > 1:  # numpy's behaviour on other bytes is undefined
        raise WireError(Code.BAD_SCHEMA, f"tensor '{name}': bool bytes other than 0 and 1")
    if not array.flags.aligned:
        array = array.copy()
    array.flags.writeable = False
    return array

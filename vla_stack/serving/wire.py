"""Wire format: a message is a small msgpack header and raw little-endian buffers, one ZeroMQ frame each.

Frame 0 is a msgpack map of at most 4 KiB::

    {v, type, sid, epoch, rid, ..., tensors: <msgpack of [[name, dtype, shape, enc, nbytes], ...]>}

Frame 1 + i holds the bytes of ``tensors[i]``: ``nbytes`` of them where ``enc`` is ``raw``, at most that many where it
is ``jpeg``; ``shape`` and ``nbytes`` are then those of the pixels, so that all limits hold of what the picture
becomes, and it is not decoded here (``jpeg.py``). Encoding copies no tensor and decoding yields read-only views of
the received memory. What tensors a robot sends does not change from request to request, so their description is one
string of bytes, which is written and checked once and then recognised. Everything that arrives is hostile until
:func:`decode` has checked it: sizes before parsing, types and shapes before any view. There is no pickle and no
object dtype on any path (compare CVE-2026-25874).

Compatibility: a peer refuses another major version and ignores header keys and tensors that it does not know, so a
later minor feature is a new optional key.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import msgpack
import numpy as np
from numpy.typing import NDArray

VERSION = 2
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
_BOOL, _U1 = DTYPES["bool"], DTYPES["u8"]
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
    "ring": str,  # HELLO: shared memory that is offered for pictures; WELCOME: that it is used
    "slot": int,  # of that memory, in place of the pictures
    "sequence": int,  # what the slot's number must be before and after it is read
    "codecs": str,  # WELCOME: how pictures may be compressed, names with blanks between them
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


# By what stands in a header, which is unpacked as bytes: msgpack interns the strings of a map's keys, Python 3.12 keeps
# interned strings for ever, and a peer that thinks up new keys would fill the memory.
_KINDS = {str(kind).encode(): kind for kind in Kind}
_KEYS: dict[bytes, tuple[str, type]] = {
    key.encode(): (key, kind)
    for key, kind in {"sid": str, "epoch": int, "rid": int, "tensors": bytes, **FIELDS}.items()
}
_NOTHING: Mapping[str, Any] = MappingProxyType({})


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


class Jpeg(NamedTuple):
    """A compressed picture: its shape, uint8 [H, W, 3], and the file. Nothing has looked into it."""

    shape: tuple[int, ...]
    data: bytes | memoryview


class Message(NamedTuple):
    """One message, either way.

    Attributes:
        kind: Message type.
        sid: Session id, given by the server in WELCOME.
        epoch: Counts resets of the robot.
        rid: Request id, >= 0; a reply carries that of its request.
        fields: Optional header entries, keys and types as in ``FIELDS``.
        tensors: Arrays by name; read-only after :func:`decode`.
        pictures: Compressed pictures by name.
    """

    kind: Kind
    sid: str = ""
    epoch: int = 0
    rid: int = NO_REQUEST
    fields: Mapping[str, Any] = _NOTHING
    tensors: Mapping[str, NDArray[Any]] = _NOTHING
    pictures: Mapping[str, Jpeg] = _NOTHING


class _Tensor(NamedTuple):
    """A checked entry of ``tensors``."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    enc: str
    nbytes: int


def encode(message: Message) -> list[bytes | memoryview]:
    """Frames of ``message``; frames 1.. alias its arrays, which must stay unchanged until they are sent.

    Raises:
        WireError: A limit of the format is exceeded, an array has a dtype that does not travel, or a key is unknown.
    """
    kind, sid, epoch, rid, fields, tensors, pictures = message
    if not fields.keys() <= FIELDS.keys():
        unknown = min(fields.keys() - FIELDS.keys())
        raise WireError(Code.BAD_SCHEMA, f"header key '{unknown}' is not part of the format")
    content = {"v": VERSION, "type": kind, "sid": sid, "epoch": epoch, "rid": rid, **fields}
    if tensors or pictures:
        described = [(name, a.dtype, a.shape, "raw") for name, a in tensors.items()]
        described += [(name, _U1, picture.shape, "jpeg") for name, picture in pictures.items()]
        content["tensors"] = _describe(tuple(described))
    header = msgpack.packb(content)
    if len(header) > MAX_HEADER_BYTES:
        raise WireError(
            Code.BAD_SCHEMA, f"header of {len(header)} bytes exceeds {MAX_HEADER_BYTES}: shorten the instruction"
        )
    frames: list[bytes | memoryview] = [header]
    for array in tensors.values():
        data = array.data
        frames.append((data if data.c_contiguous else array.copy(order="C").data).cast("B"))
    frames += [picture.data for picture in pictures.values()]
    return frames


def decode(frames: Sequence[bytes | memoryview]) -> Message:
    """The message in ``frames``, which may hold anything at all.

    Arrays are read-only views of ``frames``; only where the transport handed over memory that is not aligned for the
    dtype (ZeroMQ inlines small frames) is that array copied.

    Raises:
        WireError: Whatever is wrong, in one short line. No other exception leaves this function.
    """
    if not 1 <= len(frames) <= 1 + MAX_TENSORS:
        raise WireError(Code.BAD_SCHEMA, f"message has {len(frames)} frames, expected 1 to {1 + MAX_TENSORS}")
    kind, header = _decode_header(frames[0])
    described = header.pop("tensors", None)
    entries = _read_description(described) if described is not None else ()
    if len(entries) != len(frames) - 1:
        raise WireError(Code.BAD_SCHEMA, f"header names {len(entries)} tensors, {len(frames) - 1} frames follow")
    tensors: dict[str, NDArray[Any]] = {}
    pictures: dict[str, Jpeg] = {}
    for entry, frame in zip(entries, frames[1:], strict=True):
        if entry.enc == "raw":
            tensors[entry.name] = _view(entry, frame)
        else:
            pictures[entry.name] = _compressed(entry, frame)
    sid, epoch, rid = header.pop("sid", ""), header.pop("epoch", 0), header.pop("rid", NO_REQUEST)
    return Message(kind, sid, epoch, rid, header, tensors, pictures)


def error(code: Code, text: str, sid: str = "", epoch: int = 0, rid: int = NO_REQUEST) -> Message:
    """An ERR message; ``text``, which may quote a peer, is cut to one short line that any peer can decode."""
    line = " ".join(text.split())[:MAX_ERROR_TEXT].encode("utf-8", "replace").decode()
    return Message(Kind.ERR, sid, epoch, rid, {"code": str(code), "text": line})


def _decode_header(frame: bytes | memoryview) -> tuple[Kind, dict[str, Any]]:
    """Kind of a message and its other keys as far as they are known, their types checked."""
    if len(frame) > MAX_HEADER_BYTES:
        raise WireError(Code.BAD_SCHEMA, f"header of {len(frame)} bytes exceeds {MAX_HEADER_BYTES}")
    header = _unpack(frame, "header")
    if not isinstance(header, dict) or b"v" not in header:
        raise WireError(Code.BAD_SCHEMA, "header is not a map with a version 'v'")
    version = header[b"v"]
    if type(version) is not int or version != VERSION:
        raise WireError(Code.VERSION, f"wire version {str(version)[:20]} is not {VERSION}: install the same vla-stack")
    named = header.get(b"type")
    kind = _KINDS.get(named) if type(named) is bytes else None
    if kind is None:
        raise WireError(Code.BAD_SCHEMA, f"unknown message type {str(_text(named))[:20]!r}")
    known = {}
    for key, value in header.items():
        if key not in _KEYS:
            continue
        name, expected = _KEYS[key]
        if expected is str:
            value = _text(value)
        found: type = type(value)  # not isinstance(): a bool is an int to it, and an int64 cast of 2**64 - 1 would wrap
        if found is not expected or (expected is int and not -(2**63) <= value < 2**63):
            raise WireError(Code.BAD_SCHEMA, f"header key '{name}' is not {expected.__name__}")
        known[name] = value
    return kind, known


def _text(value: Any) -> Any:
    """A string that was unpacked as bytes; anything else as it is."""
    try:
        return value.decode() if type(value) is bytes else value
    except UnicodeDecodeError:
        raise WireError(Code.BAD_SCHEMA, "a string is not UTF-8") from None


def _unpack(data: bytes | memoryview, what: str) -> Any:
    try:
        return msgpack.unpackb(data, raw=True)
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException):
        raise WireError(Code.BAD_SCHEMA, f"{what} is not msgpack") from None


@lru_cache(maxsize=256)
def _describe(arrays: tuple[tuple[str, np.dtype, tuple[int, ...], str], ...]) -> bytes:
    """What the header says of arrays of these names, dtypes, shapes and encodings."""
    entries = []
    for name, dtype, shape, enc in arrays:
        if dtype not in _WIRE_NAME:
            raise WireError(Code.BAD_SCHEMA, f"tensor '{name}': dtype {dtype} does not travel")
        entries.append([name, _WIRE_NAME[dtype], list(shape), enc, math.prod(shape) * dtype.itemsize])
    _check_entries(entries)
    return bytes(msgpack.packb(entries))


@lru_cache(maxsize=256)
def _read_description(described: bytes) -> tuple[_Tensor, ...]:
    """The checked entries of a header's ``tensors``; exactly these bytes are checked only once."""
    entries = _unpack(described, "'tensors'")
    if type(entries) is not list:
        raise WireError(Code.BAD_SCHEMA, "header key 'tensors' is not a list")
    entries = [[_text(value) for value in entry] if type(entry) is list else entry for entry in entries]
    _check_entries(entries)
    return tuple(_Tensor(name, DTYPES[dtype], tuple(shape), enc, n) for name, dtype, shape, enc, n in entries)


def _check_entries(entries: list[Any]) -> None:
    """Everything about tensors that can be known before a buffer is touched."""
    if len(entries) > MAX_TENSORS:
        raise WireError(Code.BAD_SCHEMA, f"{len(entries)} tensors exceed {MAX_TENSORS}")
    for entry in entries:
        _check_entry(entry)
    if len({entry[0] for entry in entries}) < len(entries):
        raise WireError(Code.BAD_SCHEMA, "a tensor appears twice")
    total = sum(entry[4] for entry in entries)
    if total > MAX_TOTAL_BYTES:
        raise WireError(Code.BAD_SCHEMA, f"{total} bytes of tensors exceed {MAX_TOTAL_BYTES}")


def _check_entry(entry: Any) -> None:
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
    if enc not in ("raw", "jpeg"):
        raise WireError(Code.BAD_SCHEMA, f"tensor '{name}': encoding {str(enc)[:20]!r} is not known")
    if enc == "jpeg" and (dtype != "u8" or len(shape) != 3 or shape[2] != 3):
        raise WireError(Code.BAD_SCHEMA, f"tensor '{name}': {dtype}{shape} is no picture, u8 of [H, W, 3]")
    if type(nbytes) is not int or not 0 < nbytes <= MAX_FRAME_BYTES:
        raise WireError(Code.BAD_SCHEMA, f"tensor '{name}': not 1..{MAX_FRAME_BYTES} bytes")
    if math.prod(shape) * DTYPES[dtype].itemsize != nbytes:
        raise WireError(Code.BAD_SCHEMA, f"tensor '{name}': {dtype}{shape} is not {nbytes} bytes")


def _compressed(entry: _Tensor, frame: bytes | memoryview) -> Jpeg:
    if not 0 < len(frame) <= entry.nbytes:
        raise WireError(Code.BAD_SCHEMA, f"tensor '{entry.name}': {len(frame)} bytes, its pixels are {entry.nbytes}")
    return Jpeg(entry.shape, frame)


def _view(entry: _Tensor, frame: bytes | memoryview) -> NDArray[Any]:
    name, dtype, shape, _, nbytes = entry
    if len(frame) != nbytes:
        raise WireError(Code.BAD_SCHEMA, f"tensor '{name}': frame has {len(frame)} bytes, header says {nbytes}")
    array: NDArray[Any] = np.ndarray(shape, dtype, frame)
    if dtype is _BOOL and array.view(np.uint8).max() > 1:  # numpy's behaviour on other bytes is undefined
        raise WireError(Code.BAD_SCHEMA, f"tensor '{name}': bool bytes other than 0 and 1")
    if not array.flags.aligned:
        array = array.copy()
    array.setflags(write=False)
    return array

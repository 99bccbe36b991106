"""What an operator and a robot node say to each other: names, sizes and checks of the five channels.

    teleop   operator -> node: only the newest hand position matters, an older one is dropped, not queued
    event    operator <-> node, acknowledged: each is applied once, however often it is sent
    state    node -> operators: the newest map, one a control step
    video    node -> operators: [camera, header, JPEG]..., the newest pictures, when those before were acknowledged
    estop    operator -> node: any message at all stops the robot

Everything is msgpack of plain values, but for a word that says once a second that somebody is there, and another one
that acknowledges pictures. What does not fit its description is dropped (teleop) or refused by name (event);
for the e-stop there is nothing that does not fit.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import msgpack

from vla_stack.errors import UserError
from vla_stack.schema import SchemaError

CHANNELS = ("teleop", "event", "state", "video", "estop")
ENDPOINT = "tcp://127.0.0.1:5560"  # of the first channel; the others follow it
PRESENT, TAKEN = b"present", b"taken"  # an operator is there (any channel); has the pictures (video)
MAX_BYTES = 8192  # of a message to the node; the widest robot's teleop message has a tenth of it
LEASE_EVENTS = ("acquire", "release")
OWNER_EVENTS = ("keep", "undo", "instruct", "reset")  # for whoever runs the node: recording, instructions, scenes
STALE_S, LEASE_S = 0.2, 1.0  # age of the newest teleop message beyond which the robot holds; the lease is lost
MAX_FRAME_AGE_S = 0.3  # age of the newest camera frame beyond which the robot holds


def channel(endpoint: str, name: str) -> str:
    """Address of a channel: ports that follow the endpoint's, or files beside it; ``*`` stays ``*``.

    Raises:
        UserError: The endpoint is neither ``tcp://HOST:PORT`` nor ``ipc://PATH``.
    """
    scheme, _, rest = endpoint.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme in ("ipc", "inproc") and rest:
        return f"{endpoint}.{name}"
    if scheme != "tcp" or not host or not port.isdigit():
        raise UserError(f"operator endpoint '{endpoint}' is not tcp://HOST:PORT or ipc://PATH", f"e.g. {ENDPOINT}")
    return f"tcp://{host}:{int(port) + CHANNELS.index(name)}"


@dataclass(frozen=True, slots=True)
class Teleop:
    """Where the operator's hand is now.

    Attributes:
        lease: Of the operator who drives.
        seq: Counts the messages of a lease; older ones than the newest are dropped.
        t_ns: Monotonic time of the operator's computer; only differences are used.
        engaged: Whether the dead-man is held.
        velocity: [A] wanted velocity of the command, SI units/s, grippers ratio/s.
        target: [A] wanted command, SI units; goes before ``velocity``.
        rewind: Whether the rewind key is held.
    """

    lease: str
    seq: int
    t_ns: int
    engaged: bool = False
    velocity: tuple[float, ...] | None = None
    target: tuple[float, ...] | None = None
    rewind: bool = False

    def pack(self) -> bytes:
        return bytes(msgpack.packb(asdict(self)))


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happens once.

    Attributes:
        id: Unique; a second event with the same one gets the first one's answer and does nothing.
        lease: Of the operator.
        name: One of ``vla_stack.intervention.EVENTS``, :data:`LEASE_EVENTS` or :data:`OWNER_EVENTS`.
        args: Plain values: ``text`` of ``instruct``; ``stops`` of ``rearm``, of the newest state that its sender saw.
    """

    id: str
    lease: str
    name: str
    args: dict[str, Any] = field(default_factory=dict)

    def pack(self) -> bytes:
        return bytes(msgpack.packb(asdict(self)))


@dataclass(frozen=True, slots=True)
class Reply:
    """What became of an event; ``tick`` is the control step at which it was applied, -1 where no episode runs."""

    id: str
    ok: bool
    error: str = ""
    phase: str = ""
    tick: int = -1

    def pack(self) -> bytes:
        return bytes(msgpack.packb(asdict(self)))


def unpack(data: bytes | memoryview) -> dict[str, Any]:
    """A msgpack map of bounded size.

    Raises:
        SchemaError: It is none.
    """
    if len(data) > MAX_BYTES:
        raise SchemaError(f"message of {len(data)} bytes, at most {MAX_BYTES} are read")
    try:
        # As bytes first: msgpack interns keys, and Python 3.12 keeps interned strings for ever, whoever thinks them up.
        body = _texts(msgpack.unpackb(data, raw=True))
    except (ValueError, msgpack.UnpackException, RecursionError) as e:
        raise SchemaError(f"not msgpack: {e}") from None
    if not isinstance(body, dict):
        raise SchemaError("not a map")
    return body


def _texts(value: Any) -> Any:
    if type(value) is bytes:
        return value.decode()
    if type(value) is list:
        return [_texts(entry) for entry in value]
    return {_texts(k): _texts(v) for k, v in value.items()} if type(value) is dict else value


def read_teleop(data: bytes | memoryview, dims: int) -> Teleop:
    """Inverse of :meth:`Teleop.pack` for a robot with ``dims`` action dimensions.

    Raises:
        SchemaError: A key is missing, unknown, of the wrong type, not finite or too large.
    """
    body = unpack(data)
    _keys(body, Teleop)
    for name in ("velocity", "target"):
        body[name] = _vector(name, body[name], dims)
    _typed(body, {"lease": str, "seq": int, "t_ns": int, "engaged": bool, "rewind": bool})
    if not -(1 << 63) <= body["t_ns"] < 1 << 63:  # msgpack reads twice as much
        raise SchemaError(f"'t_ns' is {body['t_ns']}, which is no int64")
    return Teleop(**body)


def read_event(data: bytes | memoryview) -> Event:
    """Inverse of :meth:`Event.pack`.

    Raises:
        SchemaError: A key is missing, unknown or of the wrong type.
    """
    body = unpack(data)
    _keys(body, Event)
    _typed(body, {"id": str, "lease": str, "name": str, "args": dict})
    return Event(**body)


def read_reply(data: bytes | memoryview) -> Reply:
    """Inverse of :meth:`Reply.pack`; raises :class:`SchemaError` as the others do."""
    body = unpack(data)
    _keys(body, Reply)
    _typed(body, {"id": str, "ok": bool, "error": str, "phase": str, "tick": int})
    return Reply(**body)


def _keys(body: dict[str, Any], kind: Any) -> None:
    if odd := sorted(set(body) ^ set(kind.__dataclass_fields__), key=str):
        raise SchemaError(f"{kind.__name__}: key '{odd[0]}' is {'unknown' if odd[0] in body else 'missing'}")


def _typed(body: dict[str, Any], types: dict[str, type]) -> None:
    for name, kind in types.items():
        if type(body[name]) is not kind:  # a bool is no int here
            raise SchemaError(f"'{name}' is {type(body[name]).__name__}, not {kind.__name__}")
        if kind is str and len(body[name]) > 200:
            raise SchemaError(f"'{name}' has {len(body[name])} characters, at most 200 are read")


def _vector(name: str, value: Any, dims: int) -> tuple[float, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != dims:
        raise SchemaError(f"'{name}' is not a list of {dims} numbers")
    for x in value:
        if type(x) not in (int, float) or not math.isfinite(x):
            raise SchemaError(f"'{name}' has an entry that is no finite number")
    return tuple(float(x) for x in value)

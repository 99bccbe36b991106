"""What a page may say to the gateway, and the check of it. JSON text, at most :data:`MAX_BYTES`."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from vla_stack.intervention import EVENTS
from vla_stack.runtime.operator_messages import OWNER_EVENTS
from vla_stack.schema import SchemaError

MAX_BYTES = 4096
MAX_TEXT = 200  # characters of an instruction
COMMANDS = frozenset((*EVENTS, *OWNER_EVENTS)) - {"engage", "rewind", "lost", "estop"}  # those four follow from others
ARGUMENTS = {"instruct": ("text",), "rearm": ("stops",)}  # of commands that take any


@dataclass(frozen=True, slots=True)
class Hand:
    """Where the operator's hand is. ``t_ms`` is the page's own clock; ``velocity`` [A] in SI units per second."""

    seq: int
    t_ms: float
    engaged: bool
    rewind: bool
    velocity: tuple[float, ...] | None


@dataclass(frozen=True, slots=True)
class Command:
    """Something that happens once and is acknowledged under ``id``."""

    id: int
    name: str
    args: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ping:
    """Asks for its own ``t`` back."""

    t: float


@dataclass(frozen=True, slots=True)
class LeaseWish:
    """``acquire`` (or ask for), ``release`` or ``hand_over`` control."""

    want: str


@dataclass(frozen=True, slots=True)
class Seen:
    """What was sent under ``number`` has been drawn: the next one of its kind may come."""

    number: int


@dataclass(frozen=True, slots=True)
class Stop:
    """The e-stop."""


Message = Hand | Command | Ping | LeaseWish | Seen | Stop


def as_text(message: dict[str, Any]) -> str:
    """A message to a page as JSON, which has no number for a reading that is not finite: null, that is missing."""
    try:
        return json.dumps(message, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(message), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read(text: str, dims: int) -> Message:
    """Parse a page's message, for a robot with ``dims`` action dimensions.

    Raises:
        SchemaError: It is none; says what is wrong with it.
    """
    if len(text) > MAX_BYTES:
        raise SchemaError(f"message of {len(text)} characters, at most {MAX_BYTES} are read")
    try:
        body = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as e:
        raise SchemaError(f"not JSON: {e}") from None
    if not isinstance(body, dict):
        raise SchemaError("not a JSON object")
    kind = body.pop("type", None)
    if kind == "teleop":
        _keys(body, "seq", "t", "engaged", "rewind", "velocity")
        return Hand(
            _integer(body, "seq"),
            _number(body, "t"),
            _flag(body, "engaged"),
            _flag(body, "rewind"),
            _velocity(body, dims),
        )
    if kind == "event":
        _keys(body, "id", "name", "args")
        if not isinstance(body["name"], str) or body["name"] not in COMMANDS:
            raise SchemaError(f"there is no command {str(body['name'])[:40]!r}")
        return Command(_integer(body, "id"), body["name"], _arguments(body["name"], body["args"]))
    if kind == "ping":
        _keys(body, "t")
        return Ping(_number(body, "t"))
    if kind == "lease":
        _keys(body, "want")
        if body["want"] not in ("acquire", "release", "hand_over"):
            raise SchemaError("'want' is none of acquire, release, hand_over")
        return LeaseWish(body["want"])
    if kind == "seen":
        _keys(body, "n")
        return Seen(_integer(body, "n"))
    if kind == "estop":
        _keys(body)
        return Stop()
    raise SchemaError(f"there is no message type {str(kind)[:40]!r}")


def _keys(body: dict[str, Any], *names: str) -> None:
    if odd := sorted(set(body) ^ set(names)):
        raise SchemaError(f"key '{odd[0][:40]}' is {'unknown' if odd[0] in body else 'missing'}")


def _integer(body: dict[str, Any], name: str) -> int:
    value = body[name]
    if type(value) is not int or not 0 <= value < 2**53:
        raise SchemaError(f"'{name}' is no whole number")
    return value


def _number(body: dict[str, Any], name: str) -> float:
    value = body[name]
    try:
        if type(value) in (int, float) and math.isfinite(value):
            return float(value)
    except OverflowError:  # a whole number that no float can hold
        pass
    raise SchemaError(f"'{name}' is no finite number")


def _flag(body: dict[str, Any], name: str) -> bool:
    value = body[name]
    if type(value) is not bool:
        raise SchemaError(f"'{name}' is neither true nor false")
    return value


def _velocity(body: dict[str, Any], dims: int) -> tuple[float, ...] | None:
    value = body["velocity"]
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != dims:
        raise SchemaError(f"'velocity' is not a list of {dims} numbers")
    return tuple(_number({"velocity": x}, "velocity") for x in value)


def _arguments(name: str, args: Any) -> dict[str, Any]:
    if not isinstance(args, dict):
        raise SchemaError("'args' is not an object")
    _keys(args, *ARGUMENTS.get(name, ()))
    if name == "rearm":
        _integer(args, "stops")
    if name == "instruct" and not (isinstance(args["text"], str) and 0 < len(args["text"]) <= MAX_TEXT):
        raise SchemaError(f"an instruction is a text of 1 to {MAX_TEXT} characters")
    return args


def _no_number(text: str) -> float:
    raise SchemaError(f"{text} is no finite number")

"""Maps of msgpack with arrays in them, as other projects' websocket protocols send them, read with limits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from vla_stack.serving.wire import Code, WireError

MAX_BYTES = 16 << 20  # of a message: two 1920x1080 RGB pictures and more
MAX_ENTRIES = 256  # of a map or a list
MAX_TEXT = 4096  # bytes of a string
MAX_RANK = 5
TYPES = frozenset({"|u1", "|i1", "|b1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8"})


def unpack_tree(message: bytes, hook: Callable[[dict[Any, Any]], Any], protocol: str) -> dict[Any, Any]:
    """A message that came from outside.

    Args:
        message: Its bytes.
        hook: Makes an array of a map that describes one; raises WireError where it cannot.
        protocol: Whose messages, for what is said of others.

    Raises:
        WireError: It is malformed or too large.
    """
    if len(message) > MAX_BYTES:
        raise WireError(Code.BAD_SCHEMA, f"a message of {len(message)} bytes, at most {MAX_BYTES} are taken")
    try:
        tree = msgpack.unpackb(
            message,
            object_hook=hook,
            max_map_len=MAX_ENTRIES,
            max_array_len=MAX_ENTRIES,
            max_str_len=MAX_TEXT,
            max_ext_len=0,
        )
    except WireError:
        raise
    except Exception as e:  # of msgpack's many, whatever bytes make it raise
        raise WireError(Code.BAD_SCHEMA, f"no msgpack map of {protocol}'s protocol: {e}"[:300]) from None
    if not isinstance(tree, dict):
        raise WireError(Code.BAD_SCHEMA, f"a message is a map, not {type(tree).__name__}")
    return tree


def read_array(data: Any, dtype: Any, shape: Any) -> NDArray[Any]:
    """An array of what a message says of it, as a read-only view.

    Raises:
        WireError: It is none.
    """
    if not isinstance(data, bytes) or dtype not in TYPES or not isinstance(shape, list) or len(shape) > MAX_RANK:
        raise WireError(Code.BAD_SCHEMA, f"an array needs bytes, one of {sorted(TYPES)} and at most {MAX_RANK} axes")
    if any(type(n) is not int or not 0 <= n <= MAX_BYTES for n in shape):
        raise WireError(Code.BAD_SCHEMA, f"an array of shape {shape}"[:200])
    kind = np.dtype(dtype)
    if math.prod(shape) * kind.itemsize != len(data):
        raise WireError(Code.BAD_SCHEMA, f"{dtype}{shape} is not {len(data)} bytes")
    return np.frombuffer(data, kind).reshape(shape)

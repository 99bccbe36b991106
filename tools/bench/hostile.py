"""Messages that no honest peer sends: edits of valid ones, and noise. For the fuzz run and the fault matrix."""

from __future__ import annotations

import math
from contextlib import suppress

import msgpack
import numpy as np

HOSTILE = [None, -1, 2**63, 2**64 - 1, 1e308, math.nan, b"\xff", "O", [2**31] * 5, [[]], {}, "x" * 200, True]


def mutate(rng: np.random.Generator, frames: list[bytes], header_only: bool = False) -> list[bytes]:
    """One to three random edits of a message: bytes, length, order and number of its frames, or a hostile header value.

    Args:
        rng: Of the edits.
        frames: The message.
        header_only: Leave the bytes of tensors as they are, and edit only what says how to read them.
    """
    frames = list(frames)
    for _ in range(rng.integers(1, 4)):
        i = 0 if header_only else int(rng.integers(len(frames)))
        match rng.integers(6):
            case 0 if frames[i]:
                at = int(rng.integers(len(frames[i])))
                frames[i] = frames[i][:at] + rng.bytes(1) + frames[i][at + 1 :]
            case 1:
                frames[i] = frames[i][: rng.integers(len(frames[i]) + 1)]
            case 2:
                frames.insert(i, frames[rng.integers(len(frames))])
            case 3 if len(frames) > 1:
                del frames[i]
            case 4:
                frames[i] = rng.bytes(int(rng.integers(64)))
            case _:
                with suppress(Exception):  # an earlier edit may have broken the header
                    frames[0] = _hostile_value(rng, frames[0])
    return frames


def noise(rng: np.random.Generator) -> list[bytes]:
    """Up to three frames of random bytes."""
    return [rng.bytes(int(rng.integers(200))) for _ in range(rng.integers(4))]


def _hostile_value(rng: np.random.Generator, header: bytes) -> bytes:
    fields = msgpack.unpackb(header, raw=True)  # no strings, which Python would keep for ever where they are keys
    keys = [*fields, b"tensors", b"seed"]
    key, value = keys[rng.integers(len(keys))], HOSTILE[rng.integers(len(HOSTILE))]
    if key == b"tensors" and fields.get(b"tensors"):
        entries = msgpack.unpackb(fields[b"tensors"], raw=True)
        entries[rng.integers(len(entries))][rng.integers(5)] = value
        value = msgpack.packb(entries, use_bin_type=False)
    return bytes(msgpack.packb(fields | {key: value}, use_bin_type=False))

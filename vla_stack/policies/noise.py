"""The noise of a chunk by its seed, without torch: bit for bit torch's Mersenne Twister, and its normal numbers.

``torch.randn(shape, generator=torch.Generator().manual_seed(seed))`` on a CPU, up to the rounding of a logarithm and a
cosine: a policy that is served without torch then gives the chunks that it was evaluated with.
"""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

BLOCK = 16  # numbers that torch makes at a time; of fewer it makes pairs, in float64


class _Twister(threading.local):
    """A thread's own; to make one takes ten times as long as to seed it."""

    def __init__(self) -> None:
        self.state = np.random.RandomState()


_OWN = _Twister()


def randn(seed: int, *shape: int) -> NDArray[np.float32]:
    """Standard normal numbers, float32 of a shape."""
    size = int(np.prod(shape))
    twister = _OWN.state
    twister.seed(seed & 0xFFFFFFFF)
    return (_pairs(twister, size) if size < BLOCK else _blocks(twister, size)).astype(np.float32).reshape(shape)


def _bits(twister: np.random.RandomState, size: int) -> NDArray[np.uint64]:
    return twister.randint(0, 1 << 32, size, np.uint64)


def _blocks(twister: np.random.RandomState, size: int) -> NDArray[np.float32]:
    """Box-Muller over blocks; the last one ends with the last number, and is drawn anew where it is no whole block."""
    uniform = _uniform32(twister, size)
    out = np.empty(size, np.float32)
    whole = size // BLOCK * BLOCK
    out[:whole] = _box_muller(uniform[:whole].reshape(-1, BLOCK)).ravel()
    if whole < size:
        out[-BLOCK:] = _box_muller(_uniform32(twister, BLOCK)[None])[0]
    return out


def _uniform32(twister: np.random.RandomState, size: int) -> NDArray[np.float32]:
    return (_bits(twister, size) & 0xFFFFFF).astype(np.float32) * np.float32(2.0**-24)


def _box_muller(u: NDArray[np.float32]) -> NDArray[np.float32]:
    """Of uniform numbers [n, 16]: eight radii, then eight angles."""
    radius = np.sqrt(-2.0 * np.log(1.0 - u[:, : BLOCK // 2]))
    angle = np.float32(2.0 * np.pi) * u[:, BLOCK // 2 :]
    return np.concatenate((radius * np.cos(angle), radius * np.sin(angle)), axis=1)


def _pairs(twister: np.random.RandomState, size: int) -> NDArray[np.float64]:
    even = size + size % 2
    words = _bits(twister, 2 * even).reshape(-1, 2)
    u = ((words[:, 0] << np.uint64(32) | words[:, 1]) & np.uint64((1 << 53) - 1)) * 2.0**-53
    angle, radius = 2.0 * np.pi * u[::2], np.sqrt(-2.0 * np.log1p(-u[1::2]))
    return np.stack((radius * np.cos(angle), radius * np.sin(angle)), axis=1).ravel()[:size]

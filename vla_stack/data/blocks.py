"""Exact statistics of more values than memory holds: blocks of rows, several at a time, each read once.

Mean and deviation are merged block by block (Chan, Golub & LeVeque 1979). A quantile is selected as by Floyd and Rivest
(CACM 18, 1975): a random sample says between which two values it lies, the pass counts what lies outside and keeps what
lies inside, a thousandth of all. The result is the order statistic itself, not an estimate of it, and depends neither
on the sample nor on the number of threads.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

QUANTILES = (0.01, 0.99)
BLOCK = 1 << 20  # values looked at together: a few MB, in all their forms
SAMPLE = 1 << 20  # pairs that say where a quantile lies; where there are no more, all are kept
RELEASED = 64  # blocks, after which their memory is let go of
WORTH_A_BAR = 1 << 24  # values; fewer take no second
_WIDTH = 5.0  # standard deviations of a sample's rank
_THREADS = min(4, os.cpu_count() or 1)


@dataclass(frozen=True)
class Rows:
    """Values of which statistics are asked, read in blocks: several rows [D] a frame.

    Attributes:
        take: int64 [B] frames -> float [P, D], the rows of these frames, one frame after the other.
        frames: int64 [F], frames that count; None for 0 … F-1.
        steps: int64 [F], rows of each, at most ``horizon``.
        horizon: The most rows that a frame can have.
        size: D.
        release: Called now and then, when blocks have been read.
    """

    take: Callable[[NDArray[np.int64]], NDArray[Any]]
    frames: NDArray[np.int64] | None
    steps: NDArray[np.int64]
    horizon: int
    size: int
    release: Callable[[], None] = lambda: None

    def block(self, start: int, stop: int) -> NDArray[Any]:
        """Rows of the frames ``start`` … ``stop - 1``, [D, P]."""
        frames = np.arange(start, stop) if self.frames is None else self.frames[start:stop]
        return np.ascontiguousarray(self.take(frames).T)

    def sample(self, count: int) -> NDArray[Any]:
        """About ``count`` rows at random, each equally likely, [D, P]; the same at each call."""
        rng, per, parts = np.random.default_rng(0), max(1, BLOCK // (self.horizon * self.size)), []
        tries = round(count * self.horizon / float(self.steps.mean()))
        at, step = rng.integers(len(self.steps), size=tries), rng.integers(self.horizon, size=tries)
        counts = step < self.steps[at]
        order = np.argsort(at[counts], kind="stable")  # read from front to back, or all of the file comes to memory
        at, step = at[counts][order], step[counts][order]
        for first in range(0, len(at), per):
            some = at[first : first + per]
            before = np.cumsum(self.steps[some]) - self.steps[some]
            frames = some if self.frames is None else self.frames[some]
            parts.append(self.take(frames)[before + step[first : first + per]].T)
            self.release()
        return np.concatenate(parts, 1)


@dataclass
class _Column:
    """What is known of one column so far: moments, extremes, and for each quantile what lies around it."""

    count: int
    mean: float
    squares: float  # sum of squared differences from the mean
    low: float
    high: float
    around: list[tuple[NDArray[np.int64], list[NDArray[Any]]]]  # counts (< a, <= a, < b, <= b), values in (a, b)

    def add(self, other: _Column) -> None:
        """Join what is known of further values."""
        count, apart = self.count + other.count, other.mean - self.mean
        self.squares += other.squares + apart**2 * self.count * other.count / count
        self.mean += apart * other.count / count
        self.count, self.low, self.high = count, min(self.low, other.low), max(self.high, other.high)
        for (mine, values), (theirs, more) in zip(self.around, other.around, strict=True):
            mine += theirs
            values += more


def exact(rows: Rows, title: str, progress: bool = True) -> dict[str, NDArray[np.float32]]:
    """Mean, std, min, max, q01, q99 of each column over all rows that count, float32 [D].

    Mean and std are computed in float64. Quantiles are those of ``np.quantile``, between two values linear; where both
    coincide they are the extremes, for a range of 0 would be divided by: a gripper that closes once in a hundred pairs.

    Args:
        rows: The values; finite, at least one.
        title: What the progress bar says.
        progress: Show one where there is much to do.
    """
    total = int(rows.steps.sum())
    width = 1.0 if total <= SAMPLE else _WIDTH / np.sqrt(SAMPLE)
    sample = None if total <= SAMPLE else np.sort(rows.sample(SAMPLE), axis=1)
    while True:
        brackets = [_brackets(None if sample is None else sample[d], width) for d in range(rows.size)]
        columns = _one_pass(rows, brackets, title, progress and total * rows.size >= WORTH_A_BAR)
        quantiles = [
            [_quantile(c, q, *bracket) for q, bracket in enumerate(of)] for c, of in zip(columns, brackets, strict=True)
        ]
        if not any(q is None for of in quantiles for q in of):
            break
        width *= 8  # one sample in a million lies so far off
    out: dict[str, NDArray[np.float32]] = {}
    out |= {name: np.empty(rows.size, np.float32) for name in ("mean", "std", "min", "max", "q01", "q99")}
    for d, (column, (q01, q99)) in enumerate(zip(columns, quantiles, strict=True)):
        if q01 == q99:
            q01, q99 = column.low, column.high
        std = np.sqrt(column.squares / column.count)
        for name, value in zip(out, (column.mean, std, column.low, column.high, q01, q99), strict=True):
            out[name][d] = value
    return out


def _brackets(sample: NDArray[Any] | None, width: float) -> list[tuple[Any, Any]]:
    """For each quantile two values that it most likely lies between; of sorted samples, or infinite without."""
    out = []
    for q in QUANTILES:
        if sample is None or width >= 1.0:
            out.append((-np.inf, np.inf))
            continue
        n, room = len(sample), width * np.sqrt(q * (1 - q)) + 2 / len(sample)
        first, last = int(np.floor((q - room) * n)), int(np.ceil((q + room) * n))
        out.append((sample[first] if first >= 0 else -np.inf, sample[last] if last < n else np.inf))
    return out


def _one_pass(rows: Rows, brackets: list[list[tuple[Any, Any]]], title: str, bar: bool) -> list[_Column]:
    """Every block, in threads; joined in the blocks' order, so that the sums are the same at each run."""
    per = max(1, BLOCK // (rows.horizon * rows.size))
    starts = range(0, len(rows.steps), per)

    def look(start: int) -> list[_Column]:
        block = rows.block(start, min(start + per, len(rows.steps)))
        return [_column(x, of) for x, of in zip(block, brackets, strict=True)] if block.shape[1] else []

    columns: list[_Column] = []
    with (
        tqdm(total=len(rows.steps), desc=title, unit=" frames", unit_scale=True, disable=not bar) as shown,
        ThreadPoolExecutor(_THREADS) as pool,
    ):
        for number, found in enumerate(_ahead(pool, look, starts)):
            if number % RELEASED == 0:
                rows.release()
            if not columns:
                columns = found
            else:
                for column, more in zip(columns, found, strict=False):  # nothing, where no frame of a block counts
                    column.add(more)
            shown.update(min(per, len(rows.steps) - shown.n))
    return columns


def _ahead(pool: ThreadPoolExecutor, call: Callable[[int], Any], starts: range) -> Iterator[Any]:
    """Results in order; no more than a few are waiting at a time."""
    jobs = [pool.submit(call, start) for start in starts[: 4 * _THREADS]]
    for start in starts[4 * _THREADS :]:
        yield jobs.pop(0).result()
        jobs.append(pool.submit(call, start))
    for job in jobs:
        yield job.result()


def _column(x: NDArray[Any], brackets: list[tuple[Any, Any]]) -> _Column:
    wide = x.astype(np.float64)
    mean = float(wide.mean())
    wide -= mean
    around = []
    for q, (a, b) in zip(QUANTILES, brackets, strict=True):
        tail = x[x <= b] if q < 0.5 else x[x >= a]  # a hundredth, where a sample has said what a and b are
        before = 0 if q < 0.5 else len(x) - len(tail)
        counts = [before + np.count_nonzero(c) for c in (tail < a, tail <= a, tail < b, tail <= b)]
        around.append((np.array(counts), [tail[(tail > a) & (tail < b)]]))
    return _Column(len(x), mean, float(wide @ wide), float(x.min()), float(x.max()), around)


def _quantile(column: _Column, which: int, a: Any, b: Any) -> float | None:
    """``np.quantile`` of all values; None where it lies outside the bracket (a, b)."""
    (below, upto, under, all_), parts = column.around[which]
    at = (column.count - 1) * QUANTILES[which]
    first = int(at)
    second = min(first + 1, column.count - 1)
    if first < below or second >= all_:
        return None
    inside = np.sort(np.concatenate(parts)) if parts else np.empty(0)

    def ranked(k: int) -> float:
        return float(a if k < upto else inside[k - upto] if k < under else b)

    low, high, part = ranked(first), ranked(second), at - first
    return high - (high - low) * (1 - part) if part >= 0.5 else low + (high - low) * part

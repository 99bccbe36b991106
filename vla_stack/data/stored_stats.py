"""Normalisation statistics kept beside a dataset: ``meta/chunk_stats/<fingerprint>.json``.

The fingerprint is of all that the numbers follow from: states, actions and labels themselves, not the files that hold
them, so that a copy keeps them and no changed dataset is taken for the old one. Several processes that ask at once wait
for the first. A file that is damaged, or somebody else's, is made anew.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vla_stack.data.dataset import CHUNK, CHUNK_STEPS, Dataset
from vla_stack.data.layout import encode_json
from vla_stack.schema import ACTION, OBS_STATE

FOLDER = "meta/chunk_stats"
KEPT = 16  # files; those of earlier states of a dataset that grows are of no use
WORTH_A_LINE = 1 << 20  # frames
_METHOD = 1  # a number that changes with what is computed
Stats = dict[str, NDArray[Any]]


def stored_stats(
    dataset: Dataset, question: tuple[Any, ...], compute: Callable[[], dict[str, Stats]], report: bool = True
) -> dict[str, Stats]:
    """The statistics that ``compute`` gives, from the file that an earlier call has left, or computed and kept.

    Args:
        dataset: An open dataset.
        question: What else they follow from: numbers, arrays, None.
        compute: Computes them: key -> name -> float32 array.
        report: Say on stderr what was done, of a dataset of many frames.
    """
    begin = time.monotonic()
    name = fingerprint(dataset, question)
    path = dataset.root / FOLDER / f"{name}.json"
    with _alone(path.parent):
        stats = _read(path, name, dataset)
        kept, known = path.exists(), stats is not None
        if stats is None:
            stats = compute()
            with suppress(OSError):  # on a disk that cannot be written they are computed at each start
                _write(path, {"fingerprint": name, "sha256": _digest(stats), "stats": _plain(stats)})
    if report and dataset.num_frames >= WORTH_A_LINE:
        what = f"read from {path}" if known else f"computed anew, {path} was damaged" if kept else "computed"
        what += "" if known else f", kept in {path}" if path.exists() else ", not kept: the folder is read-only"
        text = f"statistics of {dataset.num_frames / 1e6:.1f} M frames {what} ({time.monotonic() - begin:.1f} s)"
        print(text, file=sys.stderr, flush=True)
    return stats


def fingerprint(dataset: Dataset, question: tuple[Any, ...]) -> str:
    """Hexadecimal digest of a dataset's states, actions and chunk labels, and of what is asked of them."""
    digest = hashlib.sha256(f"chunk_stats {_METHOD}".encode())
    columns = [dataset.columns[key] for key in (OBS_STATE, ACTION, CHUNK, CHUNK_STEPS) if key in dataset.columns]
    for part in (*columns, *question):
        if isinstance(part, np.ndarray):
            digest.update(f"{part.dtype}{part.shape}".encode())
            for block in range(0, len(part), WORTH_A_LINE):
                digest.update(np.ascontiguousarray(part[block : block + WORTH_A_LINE]).data)
                dataset.columns.release()
        else:
            digest.update(repr(part).encode())
    return digest.hexdigest()[:32]


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process at a time, where the disk allows to say so."""
    lock = None
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if lock is not None:
            lock.close()


def _read(path: Path, name: str, dataset: Dataset) -> dict[str, Stats] | None:
    """What is kept; None where there is nothing, or not what was written."""
    try:
        found = json.loads(path.read_bytes())
        stats = {key: {n: np.array(v, np.float32) for n, v in of.items()} for key, of in found["stats"].items()}
        for key, of in stats.items():
            size = dataset.columns[OBS_STATE if key == OBS_STATE else ACTION].shape[1]
            if not all(x.shape == (size,) and np.isfinite(x).all() for x in of.values()):
                return None
        return stats if found["fingerprint"] == name and found["sha256"] == _digest(stats) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def _plain(stats: dict[str, Stats]) -> dict[str, dict[str, Any]]:
    return {key: {name: value.tolist() for name, value in of.items()} for key, of in stats.items()}


def _digest(stats: dict[str, Stats]) -> str:
    return hashlib.sha256(json.dumps(_plain(stats), sort_keys=True).encode()).hexdigest()


def _write(path: Path, value: Any) -> None:
    """Replace a file, and drop the oldest; not flushed, for one that a power cut has damaged is made anew."""
    tmp = path.with_name(f".{path.name}.tmp")
    tmp.write_bytes(encode_json(value))
    os.replace(tmp, path)
    for old in sorted(path.parent.glob("*.json"), key=lambda p: (p.stat().st_mtime_ns, p.name))[:-KEPT]:
        old.unlink()

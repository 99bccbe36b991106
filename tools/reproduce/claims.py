"""Cells of an experiment that several processes work on: one of them at a time."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import freshness
from results import RESULTS
from vla_stack.data.layout import write_json

COPY = "REPRODUCE_COPY"  # set in the environment of the other processes


def together(jobs: int, work: Callable[[], None]) -> None:
    """Run ``work`` here and, at once, in ``jobs - 1`` copies of this command; all is done when this returns.

    A copy comes as far as this call and ends in it: it neither reports nor starts others.

    Raises:
        SystemExit: A copy failed.
    """
    if os.environ.get(COPY):
        work()
        sys.exit(0)
    copies = [subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, COPY: "1"}) for _ in range(jobs - 1)]
    work()
    if any([copy.wait() for copy in copies]):
        sys.exit(1)
    if copies:
        work()  # what a copy held while this one passed by


def same_settings(out: Path, settings: Mapping[str, Any]) -> None:
    """Note what the cells of a folder are of, or end where it holds cells of something else."""
    path, now = out / "settings.json", json.loads(json.dumps(settings))
    before = json.loads(path.read_text()) if path.exists() else {}
    if before == now and before:
        return
    if extends(now, before):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".tmp{os.getpid()}")
        partial.write_text(json.dumps(now, indent=1))
        partial.replace(path)
    else:
        sys.exit(f"{out} holds cells of other settings: give another --out, or remove it")


def extends(now: Any, before: Any) -> bool:
    """Whether settings are those of before, as JSON has them, or more: another task changes nothing of the others."""
    if isinstance(now, dict) and isinstance(before, dict):
        return all(key in now and extends(now[key], value) for key, value in before.items())
    return now == before


def published(settings: Mapping[str, Any], cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a result file keeps for :func:`adopt`."""
    return {"settings": json.loads(json.dumps(settings)), "cells": list(cells)}


def adopt(name: str, out: Path, settings: Mapping[str, Any]) -> None:
    """Lay the cells of a result file among those of a folder, where they are of these settings.

    What one machine has run, another reports again or goes on from; not where all is to be measured again. Cells that
    are there already stay.
    """
    if os.environ.get(freshness.ANEW):
        return
    path = RESULTS / f"{name}.json"
    data = json.loads(path.read_text())["data"] if path.exists() else {}
    if not extends(json.loads(json.dumps(settings)), data.get("settings", [])):
        return
    with claimed(out / "locks" / "adopt", wait=True):  # of several processes, the others find them there
        for record in data["cells"]:
            cell = cell_file(Cell(record["task"], record["arm"], record["seed"]), out)
            if not cell.exists():
                write_json(cell, record)


def published_before(name: str) -> tuple[Any, list[dict[str, Any]]]:
    """Settings and cells of a result file, for a report of them as they were measured; none without cells, nor where
    all is to be measured again."""
    path = RESULTS / f"{name}.json"
    known = path.exists() and not os.environ.get(freshness.ANEW)
    data = json.loads(path.read_text())["data"] if known else {}
    return data.get("settings"), data.get("cells", [])


@dataclass(frozen=True)
class Cell:
    """One arm of one task and seed."""

    task: str
    arm: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.task}-{self.arm}-seed{self.seed}"


def run_cells[C: Cell](cells: Iterable[C], run: Callable[[C], Mapping[str, Any]], out: Path) -> list[dict[str, Any]]:
    """Run the cells that are not done and that no other process runs: the records of all that are done."""
    for cell in cells:
        file = cell_file(cell, out)
        with claimed(file.with_suffix(".lock")) as mine:
            if mine and not file.exists():
                write_json(file, run(cell))
    return [json.loads(path.read_text()) for path in sorted((out / "cells").glob("*.json"))]


def cell_file(cell: Cell, out: Path) -> Path:
    """Where the record of a cell lies once it is done."""
    return out / "cells" / f"{cell.name}.json"


@contextmanager
def claimed(path: Path, wait: bool = False) -> Iterator[bool]:
    """Whether this process holds the lock; the kernel lets go of it when the process dies. ``wait`` for it: always."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True

"""What every loop of iterations keeps: a folder an iteration, whose record, once written, says that it is done.

A loop asks for the next iteration, does its steps into its folder, each of which finds what an earlier run of it left,
and finishes with the record. So a loop that is stopped anywhere continues when it is called again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vla_stack.data.layout import read_json, write_json

RECORD = "record.json"


class IterationFolder:
    """The iterations of one run.

    Args:
        run_dir: Run directory; made if it is missing.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        run_dir.mkdir(parents=True, exist_ok=True)

    def path(self, k: int) -> Path:
        """Folder of iteration ``k``."""
        return self.run_dir / f"iteration-{k:03d}"

    def finish(self, k: int, record: Mapping[str, Any]) -> None:
        """Write an iteration's record: the iteration is done."""
        write_json(self.path(k) / RECORD, {"iteration": k, **record})

    def records(self) -> list[dict[str, Any]]:
        """Records of the iterations that are done, from iteration 0 on."""
        out: list[dict[str, Any]] = []
        while (path := self.path(len(out)) / RECORD).exists():
            out.append(read_json(path))
        return out


def table(records: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """The iterations as an aligned table.

    Args:
        records: One an iteration.
        columns: Heading -> format of a record's values, e.g. ``{"success": "{success:.0%}"}``.
    """
    rows = [list(columns), *([cell.format(**record) for cell in columns.values()] for record in records)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows)

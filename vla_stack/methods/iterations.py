"""What every loop of rounds keeps: a folder a round, whose record, once written, says that the round is done.

A loop asks for the next round, does its steps into the round's folder, each of which finds what an earlier run of it
left, and finishes with the record. So a loop that is stopped anywhere continues when it is called again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vla_stack.data.layout import read_json, write_json

RECORD = "record.json"


class RoundFolder:
    """The rounds of one run.

    Args:
        run_dir: Run directory; made if it is missing.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        run_dir.mkdir(parents=True, exist_ok=True)

    def path(self, k: int) -> Path:
        """Folder of round ``k``."""
        return self.run_dir / f"round-{k:03d}"

    def finish(self, k: int, record: Mapping[str, Any]) -> None:
        """Write a round's record: the round is done."""
        write_json(self.path(k) / RECORD, {"round": k, **record})

    def records(self) -> list[dict[str, Any]]:
        """Records of the rounds that are done, from round 0 on."""
        out: list[dict[str, Any]] = []
        while (path := self.path(len(out)) / RECORD).exists():
            out.append(read_json(path))
        return out


def table(records: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """The rounds as an aligned table.

    Args:
        records: One a round.
        columns: Heading -> format of a record's values, e.g. ``{"success": "{success:.0%}"}``.
    """
    rows = [list(columns), *([cell.format(**record) for cell in columns.values()] for record in records)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows)

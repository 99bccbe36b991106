"""The one result format: every bench and every reproduction writes ``docs/results/<name>.json`` through here.

``python tools/results.py`` prints all checks; a check that does not hold stays in its file with a sentence why.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"


@dataclass
class Check:
    """One claim: ``value`` is held against ``bound`` (``>=`` or ``<=`` by ``sense``), ``why`` explains a miss."""

    name: str
    value: float
    bound: float | None = None
    sense: str = ">="
    interval: tuple[float, float] | None = None
    why: str = ""

    @property
    def holds(self) -> bool | None:
        if self.bound is None:
            return None
        return self.value >= self.bound if self.sense == ">=" else self.value <= self.bound


def hardware() -> dict[str, Any]:
    """What the figures were measured on, in public terms."""
    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    return {"cpu": model, "cores": os.cpu_count(), "python": platform.python_version(), "system": platform.system()}


def revision() -> str:
    """Git revision of the tree, with ``+`` if it has uncommitted changes."""
    try:
        rev = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        dirty = subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=ROOT, capture_output=True, text=True)
        return rev.stdout.strip() + ("+" if dirty.stdout.strip() else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def write(name: str, checks: Sequence[Check], data: Any, seeds: Sequence[int] = ()) -> Path:
    """Write one result file and print its checks as a table.

    Args:
        name: File stem under ``docs/results``.
        checks: Claims with their bounds.
        data: Everything else that a plot or a reader needs; must be JSON.
        seeds: Seeds used.

    Returns:
        Path of the file written.
    """
    RESULTS.mkdir(parents=True, exist_ok=True)
    argv = [Path(sys.argv[0]).resolve()]
    try:
        argv = [argv[0].relative_to(ROOT)]
    except ValueError:
        pass
    record = {
        "name": name,
        "command": " ".join(["python", str(argv[0]), *sys.argv[1:]]),
        "revision": revision(),
        "hardware": hardware(),
        "seeds": list(seeds),
        "checks": [asdict(c) | {"holds": c.holds} for c in checks],
        "data": data,
    }
    path = RESULTS / f"{name}.json"
    tmp = path.with_suffix(".json.tmp")
    tmp.write_text(json.dumps(record, indent=1) + "\n")
    os.replace(tmp, path)
    show(record)
    return path


def show(record: dict[str, Any]) -> None:
    """Print the checks of one result file."""
    print(
        f"\n{record['name']}  ({record['revision']}, {record['hardware'].get('cpu')}, {record['hardware'].get('cores')} cores)"
    )
    for c in record["checks"]:
        mark = {True: "holds", False: "FALLS SHORT", None: ""}[c["holds"]]
        bound = "" if c["bound"] is None else f"{c['sense']} {c['bound']:g}"
        interval = "" if not c["interval"] else f"[{c['interval'][0]:.3g}, {c['interval'][1]:.3g}]"
        print(f"  {c['name']:<58}{c['value']:>10.4g} {interval:<18}{bound:<10}{mark}")
        if c["holds"] is False and c["why"]:
            print(f"      {c['why']}")


def main() -> int:
    for path in sorted(RESULTS.glob("*.json")):
        show(json.loads(path.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())

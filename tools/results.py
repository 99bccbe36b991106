"""The one result format: every bench and every reproduction writes ``docs/results/<name>.json`` through here.

``python tools/results.py`` prints all checks; a check that does not hold stays in its file with a sentence why.
"""

from __future__ import annotations

import argparse
import json
import math
import operator
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import freshness
from vla_stack.statistics import Estimate

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
SENSES = {">=": operator.ge, ">": operator.gt, "<=": operator.le}
SIGNS = {">=": "≥", ">": ">", "<=": "≤"}


@dataclass
class Check:
    """One claim: ``value`` is held against ``bound`` (by ``sense``: ``>=``, ``>``, ``<=``), ``why`` explains a miss.

    An interval is an :class:`Estimate`; ``over`` is what that was sampled over, of a policy its starts, of a recipe its
    training seeds.
    """

    name: str
    value: float
    bound: float | None = None
    sense: str = ">="
    interval: Estimate | tuple[float, float] | None = None
    why: str = ""
    over: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.interval, Estimate):
            self.over, self.interval = self.interval.over, self.interval.interval
        if self.interval is not None and not all(map(math.isfinite, self.interval)):
            self.interval = None  # of one repeat alone, which leaves everything open

    @property
    def holds(self) -> bool | None:
        if self.bound is None:
            return None
        return SENSES[self.sense](self.value, self.bound)


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
    found = {"cpu": model, "cores": os.cpu_count(), "python": platform.python_version(), "system": platform.system()}
    torch = sys.modules.get("torch")  # a bench that computed on a GPU has imported it
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def machine(hw: dict[str, Any]) -> str:
    """:func:`hardware` in a few words."""
    gpu = [hw["gpu"]] if "gpu" in hw else []
    return ", ".join([*gpu, str(hw.get("cpu")), f"{hw.get('cores')} cores"])


def write(
    name: str,
    checks: Sequence[Check],
    data: Any,
    seeds: Sequence[int] = (),
    path: Path | None = None,
    inputs: Sequence[Path] = (),
) -> Path:
    """Write one result file and print its checks as a table.

    Args:
        name: File stem under ``docs/results``.
        checks: Claims with their bounds.
        data: Everything else that a plot or a reader needs; must be JSON.
        seeds: Seeds used; an empty list, of a study that there is nothing of, is not reported.
        path: Another file than ``docs/results/<name>.json``.
        inputs: Files and folders of the repository that the figures depend on and that no source names
            (:mod:`freshness`).

    Returns:
        Path of the file written.
    """
    path = path or RESULTS / f"{name}.json"
    if seeds == [] and set(freshness.REPORTING) & set(sys.argv[1:]):
        raise SystemExit(f"{name}: there is nothing to report yet, and {path.name} stays as it is")
    path.parent.mkdir(parents=True, exist_ok=True)
    typed = command()
    record = {
        "name": name,
        "command": typed,
        **_origin(typed, path, inputs),
        "hardware": hardware(),
        "seeds": list(seeds),
        "checks": [asdict(c) | {"holds": c.holds} for c in checks],
        "data": data,
    }
    tmp = path.with_suffix(".json.tmp")
    tmp.write_text(json.dumps(record, indent=1) + "\n")
    os.replace(tmp, path)
    show(record)
    return path


def _origin(typed: str, path: Path, inputs: Sequence[Path]) -> dict[str, Any]:
    """Revision, of the measurement too where this reports an earlier one, and digests of what made the figures."""
    words = shlex.split(typed)
    # What is reported while nothing that was published is taken over, the code that is there has measured.
    reporting = any(flag in words for flag in freshness.REPORTING) and not os.environ.get(freshness.ANEW)
    given = [p.resolve().relative_to(ROOT).as_posix() for p in inputs if p.resolve().is_relative_to(ROOT)]
    try:
        of = freshness.sources(words[1], path, reporting, given)
    except (OSError, subprocess.CalledProcessError):
        return {"revision": "unknown", "sources": {}}  # a copy without git
    origin: dict[str, Any] = {"revision": freshness.revision(of)}
    if reporting and path.exists():
        origin["measured"] = freshness.measured(json.loads(path.read_text()))
    return origin | {"sources": of}


def command() -> str:
    """What was typed, but for where this machine kept its files."""
    script = Path(sys.argv[0]).resolve()
    words = ["python", str(script.relative_to(ROOT) if script.is_relative_to(ROOT) else script.name)]
    rest = iter(sys.argv[1:])
    for word in rest:
        if word == "--out":
            next(rest, None)
        elif not word.startswith("--out="):
            words.append(f"…/{Path(word).name}" if Path(word).is_absolute() else word)
    return shlex.join(words)


def show(record: dict[str, Any]) -> None:
    """Print the checks of one result file."""
    print(f"\n{record['name']}  ({record['revision']}, {machine(record['hardware'])})")
    for c in record["checks"]:
        mark = {True: "holds", False: "FALLS SHORT", None: ""}[c["holds"]]
        bound = "" if c["bound"] is None else f"{c['sense']} {c['bound']:g}"
        interval = _interval(c)
        print(f"  {c['name']:<58}{c['value']:>10.4g} {interval:<18}{bound:<10}{mark}")
        if c["holds"] is False and c["why"]:
            print(f"      {c['why']}")


def _interval(check: dict[str, Any]) -> str:
    return "" if not check["interval"] else f"[{check['interval'][0]:.3g}, {check['interval'][1]:.3g}]"


def markdown(records: Sequence[dict[str, Any]]) -> str:
    """``docs/results.md``: every check of every result file; generated, never typed."""
    lines = [
        "# Results",
        "",
        "Generated by `make results` from the files in `docs/results/`, each of which names its command, revision,",
        "hardware and seeds. A check that falls short stays, with the reason.",
    ]
    for r in records:
        seeds = ", ".join(map(str, r["seeds"]))
        lines += ["", f"## {r['name']}", "", f"`{r['command']}`" + (f", seeds {seeds}" if seeds else "") + "  "]
        lines += [f"revision {r['revision']}, {machine(r['hardware'])}", ""]
        lines += ["| check | value | interval | bound | holds |", "|---|---|---|---|---|"]
        for c in r["checks"]:
            interval = _interval(c) + (f" over {c['over']}" if c.get("over") else "")
            bound = "" if c["bound"] is None else f"{SIGNS[c['sense']]} {c['bound']:g}"
            holds = {True: "yes", False: f"**no**: {c['why']}", None: ""}[c["holds"]]
            lines.append(f"| {c['name']} | {c['value']:.4g} | {interval} | {bound} | {holds} |")
    return "\n".join(lines) + "\n"


def parser(doc: str | None) -> argparse.ArgumentParser:
    """What a script's arguments are read by; ``--help`` prints its docstring as it stands."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def main() -> int:
    parser(__doc__).parse_args()
    records = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    for record in records:
        show(record)
    (ROOT / "docs" / "results.md").write_text(markdown(records))
    from figures import documents, with_figures  # beside this file, which benches import from elsewhere

    for page in documents():
        page.write_text(with_figures(page.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())

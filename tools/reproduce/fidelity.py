"""How far our methods are from their authors' code: the table of docs/fidelity.md, of what the tests compare.

    python tools/reproduce/fidelity.py

Runs tests/oracles, whose tensors were made with the authors' code, and writes each comparison's largest difference to
docs/results/fidelity.json and to the page.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import safetensors

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from results import ROOT, Check, parser, write

TESTS, PAGE = ROOT / "tests" / "oracles", ROOT / "docs" / "fidelity.md"
BEGIN, END = "<!-- figures of fidelity -->", "<!-- end of figures -->"


def compared() -> list[dict[str, Any]]:
    """What the tests compared, in their order, each once: of several cases the one that is furthest off."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-n",
            "0",
            "-p",
            "no:randomly",
            f"--junitxml={report}",
            str(TESTS),
        ]
        if subprocess.run(command, cwd=ROOT).returncode:
            raise SystemExit("the tests of tests/oracles do not pass")
        found = [
            {"kind": p.get("name"), **json.loads(str(p.get("value")))}
            for p in ElementTree.parse(report).iter("property")
        ]
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for row in found:
        key = row["paper"], row["what"]
        if key not in rows or row["value"] > rows[key]["value"]:
            rows[key] = row
    return list(rows.values())


def sources() -> dict[str, dict[str, str]]:
    """Metadata of the oracles: repository, commit, functions, inputs and framework."""
    found = {}
    for file in sorted(TESTS.glob("*.safetensors")):
        with safetensors.safe_open(file, "pt") as f:
            found[file.name] = {k: v for k, v in f.metadata().items() if k != "layout"}
    return found


def tables(rows: Iterable[dict[str, Any]], of: dict[str, dict[str, str]]) -> Iterator[str]:
    """The page's lines between the marks."""
    rows = list(rows)
    yield from ("", "| paper | what agrees | largest difference | bound |", "|---|---|---|---|")
    for r in rows:
        if r["kind"] == "agrees":
            yield f"| {r['paper']} | {r['what']} | {r['value']:.1g} | {r['bound']:g} |"
    yield from ("", "| paper | what differs, and from what | by |", "|---|---|---|")
    for r in rows:
        if r["kind"] == "departs":
            yield f"| {r['paper']} | {r['what']} | {r['value']:.2g} |"
    yield from ("", "| oracle | made with | functions |", "|---|---|---|")
    for name, source in of.items():
        commit = f" {source['commit'][:12]}" if "commit" in source else ""
        yield f"| `{name}` | {source['repository']}{commit}; {source['framework']} | {source['functions']} |"
    yield ""


def main() -> int:
    parser(__doc__).parse_args()
    rows, of = compared(), sources()
    senses = {"agrees": "<=", "departs": ">="}
    write(
        "fidelity", [Check(f"{r['paper']}: {r['what']}", r["value"], r["bound"], senses[r["kind"]]) for r in rows], of
    )
    text = PAGE.read_text()
    before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    PAGE.write_text(before + "\n".join(tables(rows, of)) + "\n" + after)
    return 0


if __name__ == "__main__":
    sys.exit(main())

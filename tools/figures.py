"""Figures in the documents are those of ``docs/results``: each is a link to its check, and ``make results`` sets it.

    picks [99 %](results.md#embodiments "arm7_tool: success") of the cubes

The check is named by the link's title; the figure keeps the unit and the digits that stand there: ``99 %`` is a share,
``99 of 100`` a count, ``0.99`` and ``2.1 cm`` the value itself.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r'\[(?P<text>[^\]\n]+)\]\((?P<page>[\w./]*results\.md)#(?P<name>\w+) "(?P<check>[^"\n]+)"\)')
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def documents() -> list[Path]:
    """The pages whose figures are set."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def with_figures(text: str, results: Path = ROOT / "docs" / "results") -> str:
    """A page with each linked figure as its check has it.

    Raises:
        KeyError: There is no such check.
    """

    def set_figure(link: re.Match[str]) -> str:
        checks = json.loads((results / f"{link['name']}.json").read_text())["checks"]
        values = {check["name"]: float(check["value"]) for check in checks}
        return link[0].replace(link["text"], shown(values[link["check"]], link["text"]), 1)

    return LINK.sub(set_figure, text)


def shown(value: float, like: str) -> str:
    """A value in the form of another figure: its unit, and as many digits."""
    if counted := re.fullmatch(r"\d+ of (\d+)", like):
        return f"{round(value * int(counted[1]))} of {counted[1]}"
    number = NUMBER.search(like)
    assert number is not None, f"'{like}' is no figure"
    digits = len(number[0].partition(".")[2])
    scaled = value * 100 if re.search(r"\d ?%", like) else value
    return like[: number.start()] + f"{scaled:.{digits}f}" + like[number.end() :]

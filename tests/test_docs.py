"""The documents say what is true: figures, links, commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_figures_are_those_of_the_results(load_tool):
    figures = load_tool("figures.py")
    assert sum(len(figures.LINK.findall(page.read_text())) for page in figures.documents()) >= 160
    for page in figures.documents():
        assert figures.with_figures(page.read_text()) == page.read_text(), f"{page.name}: run `make results`"


@pytest.mark.parametrize(
    ("value", "like", "said"),
    [(0.823, "99 %", "82 %"), (0.823, "99 of 100", "82 of 100"), (2.06, "1.0 cm", "2.1 cm"), (-0.5, "1", "-0")],
)
def test_a_figure_keeps_its_unit_and_digits(load_tool, value, like, said):
    assert load_tool("figures.py").shown(value, like) == said


def test_the_readme_is_one_screen():
    tables = re.findall(r"(?:^\|.*\n)+", README, re.M)
    assert len(tables) == 1 and README.count("![") == 1 and len(README.splitlines()) <= 75
    for row in tables[0].splitlines():
        for cell in row.strip("|").split(" | "):
            assert len(cell.split()) <= 15, cell


def test_every_row_of_the_readme_is_run_in_its_order(load_tool):
    readme = load_tool("readme.py")
    assert readme.rows(README) == [step.command for step in readme.STEPS if step.row]


def test_a_row_that_fails_or_is_never_ready_is_named(load_tool, tmp_path):
    readme = load_tool("readme.py")
    Step = readme.Step
    steps = [Step("vla recipes"), Step("vla no-verb"), Step("vla --version", ready="READY"), Step("vla", "--list")]
    assert readme.run(steps, tmp_path) == ["vla no-verb", "vla --version"]
    emulator = [Step("vla emulate so101", "--image-size 0", ready="quit"), Step("vla --version")]
    assert readme.run(emulator, tmp_path) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name}: {target}"

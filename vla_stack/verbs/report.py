"""``vla report``: one page of a project's evaluations, comparisons, trainings and recordings."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "Join evaluations, comparisons, trainings and recordings in one page: what changed, and what improved."
EXAMPLES = (
    "vla report outputs",
    "vla report runs/a runs/b outputs/eval-a outputs/eval-b data/corrections --out outputs/report.html",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    a = parser.add_argument
    a("folders", nargs="+", type=Path, metavar="DIR", help="looked through with everything below")
    a("--title", default="Project", help="heading (default: %(default)s)")
    a("--out", type=Path, default=Path("outputs/project.html"), help="the page (default: %(default)s)")


def main(args: argparse.Namespace) -> int:
    from vla_stack.evaluation.project import changes, find
    from vla_stack.evaluation.project_page import write_project

    project = find(args.folders)
    path = write_project(project, args.out, args.title)
    for c in changes(project.evaluations):
        d = c.difference
        print(
            f"{c.after.result.name}, {c.after.result.label}: {100 * d.value:+.0f} points "
            f"[{100 * d.low:+.0f}, {100 * d.high:+.0f}] over {d.n} common starts, {c.before.path} to {c.after.path}"
        )
    for line in project.odd:
        print(f"not read: {line}")
    counts = (len(project.evaluations), len(project.comparisons), len(project.trainings), len(project.recordings))
    print("{} evaluated settings, {} comparisons, {} trainings, {} datasets".format(*counts) + f": {path}")
    return 0

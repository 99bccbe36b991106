"""What off-policy experiments share: the command line, and cells that several processes take turns at."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from claims import Cell, adopt, claimed, published, published_before, same_settings, together
from rl_cells import Arm, run_cell

from results import ROOT, parser
from vla_stack.data.layout import write_json
from vla_stack.training.recipe_tree import read_tree

Records = list[dict[str, Any]]  # of cells


@dataclass(frozen=True)
class Grid:
    """An experiment.

    Attributes:
        name: Stem of the result files.
        config: Recipe that all arms share.
        tasks: Task -> keys of the recipe.
        arms: By name.
        order: Groups of arms; each group runs on all seeds and tasks before the next.
        smoke: Keys of a toy run of everything.
    """

    name: str
    config: Path
    tasks: Mapping[str, tuple[str, ...]]
    arms: Mapping[str, Arm]
    order: Sequence[Sequence[str]]
    smoke: tuple[str, ...]

    def cells(self, seeds: Sequence[int]) -> list[Cell]:
        """All cells, the most informative first."""
        return [Cell(t, arm, seed) for group in self.order for seed in seeds for t in self.tasks for arm in group]


def main(
    grid: Grid, about: str | None, report: Callable[[Grid, str, list[dict[str, Any]], dict[str, Any]], None]
) -> int:
    p = parser(about)
    p.add_argument("overrides", nargs="*", metavar="key=value", help=f"keys of {grid.config.name}")
    p.add_argument("--jobs", type=int, default=1, help="processes of one thread each (1)")
    p.add_argument("--seeds", type=int, default=5, help="seeds (5)")
    p.add_argument("--report", action="store_true", help="report what is there, run nothing")
    p.add_argument("--smoke", action="store_true", help="the whole path at toy size; the figures mean nothing")
    p.add_argument("--out", type=Path, help=f"folder of runs and cells (outputs/reproduce/{grid.name})")
    p.add_argument("--name", help="stem of the result files")
    args = p.parse_args()
    name = args.name or grid.name + "_smoke" * args.smoke  # toy cells never lie among the others
    out = args.out or ROOT / "outputs" / "reproduce" / name
    overrides = [*(grid.smoke if args.smoke else ()), *args.overrides]
    these = settings(grid, overrides)
    adopt(name, out, these)
    if not args.report:
        same_settings(out, these)
        together(args.jobs, partial(work, grid, range(args.seeds), overrides, out))
    cells = [json.loads(p.read_text()) for p in sorted((out / "cells").glob("*.json"))]
    if args.report and not cells and not args.overrides:  # the recipe is another one now
        these, cells = published_before(name)
    if not cells:
        sys.exit(f"{out} holds no cells yet")
    report(grid, name, cells, published(these, cells))
    return 0


def settings(grid: Grid, overrides: Sequence[str]) -> dict[str, Any]:
    """What all cells of a folder share."""
    arms = {name: list(arm.overrides) for name, arm in grid.arms.items()}
    tasks = {name: list(keys) for name, keys in grid.tasks.items()}
    return {"recipe": read_tree(grid.config), "overrides": list(overrides), "tasks": tasks, "arms": arms}


def work(grid: Grid, seeds: Sequence[int], overrides: Sequence[str], out: Path) -> None:
    """Run cells until none is left."""
    for cell in grid.cells(seeds):
        path = out / "cells" / f"{cell.name}.json"
        with claimed(out / "locks" / f"{cell.task}-seed{cell.seed}") as ours:  # arms of a seed share their beginning
            if not ours or path.exists():
                continue
            record = run_cell(cell, grid.arms[cell.arm], grid.config, [*grid.tasks[cell.task], *overrides], out)
            write_json(path, record)
            told = " ".join(f"{r['eval/success']:.2f}" for r in record["curve"])
            print(f"{cell.name}: {told}  {record['cpu_s']:.0f} s", flush=True)

"""How an image encoder begins: patches of 4x4 pixels against overlapping convolutions, from pictures.

    python tools/reproduce/stems.py --out outputs/stems
    python tools/reproduce/stems.py --out outputs/stems --tasks pick --seeds 0      # the most informative cells alone

Both arms see the same demonstrations and the same starts, for equally many steps. Cells that are done are kept; what is
there is reported, however many seeds. The CPU time of a cell is that of its training, in one process of one thread.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

import labels
import numpy as np
from claims import Cell, adopt, published, run_cells, same_settings

from results import Check, parser, write
from vla_stack.statistics import seeds_interval

HORIZON = 12
ARMS = {
    "patches": {"vision_stem": "patches", "vision_channels": (64, 64)},
    "overlapping": {"vision_stem": "overlapping", "vision_channels": (32, 64, 64)},
}
TASKS = ("pick", "place", "pick_any")
MARGIN = 0.05  # success that a faster encoder may cost
SETTINGS = labels.Settings(demos=600, steps=2000, episodes=200)


def report(records: list[dict[str, Any]]) -> list[Check]:
    """Success and time of both arms, and what lies between them, over the seeds that both have."""
    by: dict[str, dict[str, dict[int, dict[str, Any]]]] = defaultdict(lambda: defaultdict(dict))
    for r in records:
        by[r["task"]][r["arm"]][r["seed"]] = r
    checks = []
    for task, arms in sorted(by.items()):
        seeds = sorted(set.intersection(*(set(arms[arm]) for arm in ARMS)))
        if not seeds:
            continue
        outcomes = {arm: np.array([arms[arm][s]["outcomes"] for s in seeds]) for arm in ARMS}
        spent = {arm: float(np.median([arms[arm][s]["cpu_s"] for s in seeds])) for arm in ARMS}
        where = f"{task}, {len(seeds)} seed{'s' * (len(seeds) > 1)}"
        for arm, found in outcomes.items():
            checks.append(Check(f"{where}: success, {arm}", float(found.mean()), interval=seeds_interval(found)))
        gain = seeds_interval(*outcomes.values())
        told = "patches cost success here" if gain.high < 0 else "seeds differ by more than the arms do"
        why = "" if gain.value >= -MARGIN else told
        checks.append(Check(f"{where}: patches minus overlapping", gain.value, -MARGIN, ">=", gain, why))
        checks.append(
            Check(f"{where}: CPU time of training, overlapping over patches", spent["overlapping"] / spent["patches"])
        )
    return checks


def main() -> int:
    p = parser(__doc__)
    p.add_argument("--out", type=Path, default=Path("outputs/stems"), help="folder of demonstrations and cells")
    p.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    p.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    p.add_argument("--report", action="store_true", help="write what is there, run nothing")
    p.add_argument("--smoke", action="store_true", help="the same code, tiny, nothing written")
    args = p.parse_args()
    settings = labels.SMOKE if args.smoke else SETTINGS
    same_settings(args.out, asdict(settings))
    adopt("stems", args.out, asdict(settings))
    todo = [Cell(task, arm, seed) for task in args.tasks for seed in args.seeds for arm in ARMS]

    def cell(todo: Cell) -> dict[str, Any]:
        return labels.run(todo, HORIZON, settings, args.out, ARMS[todo.arm])

    records = run_cells([] if args.report else todo, cell, args.out)
    if not args.smoke:
        seeds = sorted({r["seed"] for r in records})
        write("stems", report(records), published(asdict(settings), records), seeds=seeds)
    return 0


if __name__ == "__main__":
    sys.exit(main())

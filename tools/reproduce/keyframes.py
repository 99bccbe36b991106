"""Imitation with the prediction of the next keyframe beside it, against imitation alone, from pictures.

    python tools/reproduce/keyframes.py --out outputs/keyframes
    python tools/reproduce/keyframes.py --out outputs/keyframes --tasks pick_any --seeds 1  # the most informative pair

One dataset a task, chunk labels and augmented pictures as ever; the arms differ in ``method.keyframe`` alone. Equal
samples, which take equal time (the head is one small matrix), equal starts, equal noise of the policy. Neither arm has
converged: the claim is how far so many samples take a policy. Cells that are done are kept.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from claims import Cell, adopt, claimed, published, same_settings, together

from results import Check, parser, write
from vla_stack.data.layout import write_json
from vla_stack.statistics import seeds_interval

ARMS = {"keyframe": 1.0, "alone": 0.0}  # method.keyframe
TASKS = ("pick_any", "place")
START = 50_000  # seed of the first of the starts


@dataclass(frozen=True)
class Settings:
    """Size of the experiment."""

    demos: int = 600
    noise: float = 0.3
    steps: int = 1200
    episodes: int = 100


SMOKE = Settings(demos=4, steps=2, episodes=2)


def run(cell: Cell, settings: Settings, out: Path) -> dict[str, Any]:
    """Train a cell and roll it out: its outcomes, and its loss on the way."""
    from vla_stack.evaluation.evaluate import evaluate
    from vla_stack.policies.chunk_policy import load_policy
    from vla_stack.rollout.collect import CollectConfig, collect
    from vla_stack.runtime.executor import ExecutorConfig
    from vla_stack.training.recipe import make
    from vla_stack.training.recipes import find_recipe

    root, run_dir = out / "demos" / cell.task, out / "runs" / cell.name
    with claimed(out / "demos" / f"{cell.task}.lock", wait=True):
        collect(CollectConfig(cell.task, noise=settings.noise), root, settings.demos, workers=1)
    every = max(1, settings.steps // 12)
    options = (f"data.root={root}", f"seed={cell.seed}", "device=cpu", "threads=1", f"method.keyframe={ARMS[cell.arm]}")
    times = (f"method.steps={settings.steps}", f"method.log_every={every}", "method.ema=0.99")
    recipe = make(*find_recipe("multitask", [*options, *times]))
    recipe.method.run(recipe, run_dir)
    policy = load_policy(run_dir)
    result = evaluate(policy, f"sim/{cell.task}-v0", settings.episodes, START, ExecutorConfig(mode="sync"))
    log = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    curve = [[row["step"], round(row["flow_loss"], 4)] for row in log if "flow_loss" in row]
    return {**asdict(cell), "outcomes": [int(o) for o in result.outcomes], "flow_loss": curve}


def report(records: list[dict[str, Any]]) -> list[Check]:
    """Success and last loss of both arms and what lies between them, over the seeds that both have."""
    cells: dict[str, dict[str, dict[int, dict[str, Any]]]] = defaultdict(lambda: defaultdict(dict))
    for r in records:
        cells[r["task"]][r["arm"]][r["seed"]] = r
    checks = []
    for task, arms in sorted(cells.items()):
        seeds = sorted(set.intersection(*(set(arms[arm]) for arm in ARMS)))
        if not seeds:
            continue
        with_it, alone = (np.array([arms[arm][s]["outcomes"] for s in seeds]) for arm in ARMS)
        where = f"{task}, pictures, {len(seeds)} seed{'s' * (len(seeds) > 1)}"
        for arm, outcomes in zip(ARMS, (with_it, alone), strict=True):
            checks.append(Check(f"{where}: success, {arm}", float(outcomes.mean()), interval=seeds_interval(outcomes)))
        gain = seeds_interval(with_it, alone)
        why = "" if gain.low > 0 else "the interval holds 0"
        checks.append(Check(f"{where}: lower end of keyframe minus alone", gain.low, 0.0, ">", gain, why))
        last = [float(np.mean([arms[arm][s]["flow_loss"][-1][1] for s in seeds])) for arm in ARMS]
        checks.append(Check(f"{where}: last flow loss, keyframe over alone", last[0] / last[1], 1.0, "<"))
    return checks


def main() -> int:
    p = parser(__doc__)
    p.add_argument("--out", type=Path, default=Path("outputs/keyframes"), help="folder of demonstrations and cells")
    p.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    p.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    p.add_argument("--jobs", type=int, default=1, help="cells at once, a core each (1)")
    p.add_argument("--report", action="store_true", help="write what is there, run nothing")
    p.add_argument("--smoke", action="store_true", help="the same code, tiny, nothing written")
    args = p.parse_args()
    settings = SMOKE if args.smoke else Settings()
    same_settings(args.out, asdict(settings))
    adopt("keyframes", args.out, asdict(settings))
    cells = [Cell(task, arm, seed) for task in args.tasks for seed in args.seeds for arm in ARMS]

    def work() -> None:
        for cell in [] if args.report else cells:
            file = args.out / "cells" / f"{cell.name}.json"
            with claimed(file.with_suffix(".lock")) as mine:
                if mine and not file.exists():
                    write_json(file, run(cell, settings, args.out))

    together(args.jobs, work)
    records = [json.loads(path.read_text()) for path in sorted((args.out / "cells").glob("*.json"))]
    checks = report(records)
    if not args.smoke:
        write("keyframes", checks, published(asdict(settings), records), seeds=sorted({r["seed"] for r in records}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A world model on CPU cores: quality, memory, control, improvement of a policy.

    python tools/reproduce/world_model.py --part all --jobs 2     # runs what is missing, then reports
    python tools/reproduce/world_model.py --report                # reports what is there

Claims (Ctrl-World, arXiv:2510.10125): poses of every frame and remembered frames make imagined pictures follow commands
for seconds; imagined successes improve a policy. Whether success in imagination orders policies as success in the world
does is ``world_ranking.py``'s question. The world is the simulator. A cell is one arm of one seed and one small file: a
stopped run continues, and a report can be made at any time. Parts: quality, control (arms: full, without memory, with
the mean of all poses), memory (the hue of a cube out of sight), improvement (by imagined episodes, also planned ones
and ones chosen by critics, against as many of the simulator and as many real demonstrations).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]
import world_cells  # noqa: E402
import world_cost  # noqa: E402
import world_improve  # noqa: E402
import world_memory  # noqa: E402
import world_report  # noqa: E402
import world_training  # noqa: E402
from claims import COPY, claimed, same_settings, together  # noqa: E402
from world_training import SMOKE, Settings  # noqa: E402

from results import ROOT, parser  # noqa: E402
from vla_stack.evaluation.constraints.propose import Endpoint  # noqa: E402
from vla_stack.training.recipe_tree import read_tree  # noqa: E402

PARTS: dict[str, Callable[[Settings, Path, str, int], dict[str, Any]]] = {
    "quality": world_cells.quality,
    "control": world_cells.control,
    "memory": world_memory.memory,
    "improvement": world_improve.improvement,
}
ORDER = (  # most informative first; the first four rows share one world model
    ("quality", ("full",)),
    ("control", ("full",)),
    ("improvement", ("unchanged", "imagined", "relabelled", "simulated", "real")),
    ("memory", ("full", "no_memory")),
    ("quality", ("no_memory", "mean_pose")),
    ("control", ("mean_pose",)),
    ("improvement", ("planned", "critics")),
)
WAIT = 5  # seconds until a process that found nothing to do looks again
ONE_SEED = ("improvement",)  # of the world model


@dataclass(frozen=True)
class Cell:
    """One arm of one seed."""

    part: str
    arm: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.part}-{self.arm}-{self.seed}"


def grid(parts: Sequence[str], seeds: Sequence[int]) -> list[Cell]:
    """All cells, seed by seed: each part's first seed before any part's second."""
    return [
        Cell(part, arm, seed)
        for seed in seeds
        for part, arms in ORDER
        for arm in arms
        if part in parts and (seed == seeds[0] or part not in ONE_SEED)
    ]


def work(settings: Settings, cells: Sequence[Cell], out: Path) -> None:
    """Run cells until none is left; several processes may do so at once.

    Who trains a model holds its lock, so others pass its cells by and come back.
    """
    import torch

    torch.set_num_threads(1)
    while missing := [c for c in cells if not (out / "cells" / f"{c.name}.json").exists()]:
        if not pass_over(settings, missing, out):
            time.sleep(WAIT)  # others are at all of them


def pass_over(settings: Settings, cells: Sequence[Cell], out: Path) -> bool:
    """Run those cells, or trainings that they need, that no other process is at; False where there were none."""
    worked = False
    for cell in cells:
        path = out / "cells" / f"{cell.name}.json"
        while not path.exists():
            missing = world_training.unfinished(out, cell.part, cell.arm, cell.seed)
            for name in world_training.trainable(out, missing) if missing else [cell.name]:
                with claimed(out / "locks" / name) as ours:
                    if not ours:
                        continue
                    worked = True
                    if missing != world_training.unfinished(out, cell.part, cell.arm, cell.seed):
                        break  # another process has just finished one
                    if missing:
                        world_training.train(settings, out, name)
                    elif not path.exists():
                        record = PARTS[cell.part](settings, out, cell.arm, cell.seed)
                        path.parent.mkdir(parents=True, exist_ok=True)
                        partial = path.with_suffix(".tmp")
                        partial.write_text(json.dumps(vars(cell) | record))
                        partial.replace(path)
                        print(f"done {cell.name}", flush=True)
                    break
            else:
                break  # others are at all of it
    return worked


def main(argv: Sequence[str] | None = None) -> int:
    p = parser(__doc__)
    p.add_argument("--part", nargs="+", choices=("all", *PARTS), default=["all"], help="what to run (all)")
    p.add_argument("--jobs", type=int, default=1, help="processes of one thread each (1)")
    p.add_argument("--seeds", type=int, default=3, help="training seeds (3)")
    p.add_argument("--report", action="store_true", help="report what is there, run nothing")
    p.add_argument("--smoke", action="store_true", help="the whole path at toy size; the figures mean nothing")
    p.add_argument("--set", nargs="*", default=[], metavar="key=number", help="settings, e.g. dynamics=4000")
    p.add_argument("--out", type=Path, help="folder of data, runs and cells (outputs/reproduce/<name>)")
    p.add_argument("--words", nargs=2, metavar=("URL", "MODEL"), help="have a language model write paraphrases")
    p.add_argument("--name", default="world_model", help="stem of the result file")
    args = p.parse_args(argv)
    settings = SMOKE if args.smoke else Settings()
    given = {k: int(v) for k, _, v in (text.partition("=") for text in args.set)}
    settings = Settings(**world_training.plain(settings) | given)
    out = args.out or ROOT / "outputs" / "reproduce" / args.name
    parts = list(PARTS) if "all" in args.part else args.part
    if not args.report:
        same_settings(out, world_training.plain(settings) | {"recipe": read_tree(world_training.RECIPE)})
        if args.words:
            world_improve.ask_words(settings, out, Endpoint(*args.words))
        cells = grid(parts, range(args.seeds))
        if COPY not in os.environ:
            print(world_cost.plan(settings, out, cells), flush=True)
        together(args.jobs, partial(work, settings, cells, out))
        if any(not (out / "cells" / f"{c.name}.json").exists() for c in cells):
            return 0  # another command is at them, and will report
    cells_there = [json.loads(path.read_text()) for path in sorted((out / "cells").glob("*.json"))]
    if not cells_there:
        sys.exit(f"{out} holds no cells yet")
    world_report.report(args.name, settings, cells_there)
    return 0


if __name__ == "__main__":
    sys.exit(main())

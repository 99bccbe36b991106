"""Mixture of horizons against its controls, on tasks of ``sim`` with state observations.

    python tools/reproduce/mixture_of_horizons.py --jobs 2     # runs what is missing, then reports
    python tools/reproduce/mixture_of_horizons.py --report     # reports what is there
    python tools/reproduce/mixture_of_horizons.py --images     # baseline and mixture on one task, from pixels

Claim: a policy that predicts chunks of several lengths at once and mixes them (arXiv:2511.19433) succeeds more often
than the same policy with its best single length, than one with the mixture's loss weights, and than one that gets the
same compute as more (noise, time) draws an observation; and executing as many actions as the branches agree on beats
executing a fixed number.

All arms share demonstrations, network, optimiser steps, learning rate and batch; the gradient clip grows with the
number of terms in the loss. They meet the same starts with the same seeds of their noise. A cell is one arm of one
training seed rolled out in one way, and one small file: a stopped run continues, and a report can be made at any time.
Observations hold the poses of the objects (``sim.privileged``): about algorithms, not about seeing.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]
import horizons_report  # noqa: E402
from claims import claimed, same_settings, together  # noqa: E402
from horizons_arms import IMAGES, SMOKE, VALIDATION_SEED, Cell, Settings, arms  # noqa: E402

from results import ROOT, parser  # noqa: E402

OUT = ROOT / "outputs" / "reproduce"
LAST = ("draws_long", "mean", "unbalanced")
EXECUTE = (7, 10, 15, 1)
RATIOS = (1.0, 1.2, 1.4)


def grid(settings: Settings, seeds: Sequence[int]) -> list[Cell]:
    """All cells, the most informative first: what the claim compares on all seeds, then the other arms, then sweeps."""
    k, few = settings.execute, seeds[:2]
    if settings.images:
        return [Cell(seed, arm, k) for seed in seeds for arm in (settings.baseline, "full")]
    plain = [f"plain-{h}" for h in settings.singles]
    rounds = ((settings.baseline, "full", "draws", "longest", "averaged"), ("reweighted",), (plain[-1],), LAST)
    cells = [Cell(seed, arm, k) for names in rounds for seed in seeds for arm in names]
    for seed in few:
        cells += [Cell(seed, "full", 0, ratio) for ratio in RATIOS] + [Cell(seed, "full", 0, RATIOS[1], True)]
        cells += [Cell(seed, arm, fixed) for fixed in EXECUTE for arm in ("full", plain[-1])]
    cells += [Cell(seed, arm, k) for seed in seeds for arm in plain]
    cells += [Cell(VALIDATION_SEED, arm, k) for arm in plain]
    cells += [Cell(seed, "again", k) for seed in seeds]
    fits = {c.name: c for c in cells if c.execute <= arms(settings)[c.arm].horizon}
    return list(fits.values())


def work(settings: Settings, seeds: Sequence[int], out: Path) -> None:
    """Run cells until none is left; several processes may do so at once."""
    import torch
    from horizons_cells import run_cell, write_json  # here: a report does without them

    torch.set_num_threads(1)
    for cell in grid(settings, seeds):
        path = cell.path(out)
        # Arms that share weights wait for each other: whoever comes first trains.
        training = f"{arms(settings)[cell.arm].weights}-seed{cell.seed}"
        with claimed(out / "locks" / training) as ours:
            if ours and not path.exists():
                record = run_cell(settings, cell, out)
                write_json(path, record)
                rates = {task: sum(r["success"]) / len(r["success"]) for task, r in record["tasks"].items()}
                print(cell.name, *(f"{t} {r:.0%}" for t, r in rates.items()), f"{record['cpu_s']:.0f} s", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    p = parser(__doc__)
    p.add_argument("--jobs", type=int, default=1, help="processes of one thread each (1)")
    p.add_argument("--seeds", type=int, default=5, help="training seeds (5)")
    p.add_argument("--report", action="store_true", help="report what is there, run nothing")
    p.add_argument("--images", action="store_true", help="the confirmation from pixels")
    p.add_argument("--smoke", action="store_true", help="the whole path at toy size; the figures mean nothing")
    p.add_argument("--out", type=Path, help="folder of demonstrations, runs and cells (outputs/reproduce/<name>)")
    p.add_argument("--name", help="stem of the result files")
    args = p.parse_args(argv)
    settings, seeds = IMAGES if args.images else Settings(), range(args.seeds)
    if args.smoke:
        settings = dataclasses.replace(SMOKE, images=args.images)
    # Toy cells never lie among the others.
    name = args.name or "mixture_of_horizons" + "_images" * args.images + "_smoke" * args.smoke
    out = args.out or OUT / name
    if not args.report:
        prepare(settings, out)
        together(args.jobs, partial(work, settings, seeds, out))
    horizons_report.report(name, settings, seeds, load_cells(out))
    return 0


def prepare(settings: Settings, out: Path) -> None:
    """Demonstrations, and a note of the settings, which the cells of one folder share."""
    from horizons_cells import collect_demonstrations

    same_settings(out, dataclasses.asdict(settings))
    collect_demonstrations(settings, out)


def load_cells(out: Path) -> list[dict]:
    """Finished cells."""
    return [json.loads(path.read_text()) for path in sorted((out / "cells").glob("*.json"))]


if __name__ == "__main__":
    sys.exit(main())

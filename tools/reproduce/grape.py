"""GRAPE against continued imitation of successes, random pairs and TPO without anchors, under three objectives.

    python tools/reproduce/grape.py --jobs 2    # runs what is missing, the most informative first, then reports
    python tools/reproduce/grape.py --images    # from pictures and sentences
    python tools/reproduce/grape.py --report    # reports what is there
    python tools/reproduce/grape.py --smoke     # the whole path at toy size; the figures mean nothing
    python tools/reproduce/grape.py --pilot --name grape_short --set starts=24 episodes=60 updates=60
                                                # the main arms on one seed that the reported grid does not have

Claim (arXiv:2411.19309): from a half-trained policy, preferences between its own rollouts from the same start raise
success, or lower collisions, or shorten episodes, whichever the constraints weigh; more than imitating its successes.

The demonstrations are of mixed quality: some brush the wall, some are slow, and nothing that is observed says which.
All arms of a seed share the policy that they begin with and its rollouts; later iterations roll out as many; all do as
many updates of as many pairs. Training starts and evaluation starts are disjoint, and all policies are evaluated on
the same ones with the same seeds of their noise. A collision is any touch of the wall, whatever constraints say.
Observations hold the poses of the objects (``sim.privileged``): about algorithms, not about seeing. With ``--images``
they are pictures and sentences, and a seed begins with the generalist, trained further on the demonstrations.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]
import grape_table  # noqa: E402
from claims import claimed, same_settings, together  # noqa: E402

from results import ROOT, parser  # noqa: E402

OUT = ROOT / "outputs" / "reproduce"
PILOT_SEED = 100


def cells(order: Sequence[Sequence[str]], seeds: Sequence[int]) -> Iterator[tuple[str, int]]:
    """(arm, seed): the main arms of one seed, then of the others, then the controls."""
    for names in order:
        for seed in seeds:
            for name in names:
                yield name, seed


def work(settings: Any, seeds: Sequence[int], out: Path) -> None:
    """Run cells until none is left; several processes may do so at once."""
    import torch
    from grape_cells import ORDER, run_base, run_cell  # here: a report does without them

    torch.set_num_threads(1)
    for name, seed in cells(ORDER, seeds):
        last = out / f"{name}-seed{seed}" / f"iteration-{settings.iterations:03d}" / "record.json"
        with claimed(out / "locks" / f"base-{seed}") as ours:
            if not ours:
                continue
            run_base(settings, seed, out)
        with claimed(out / "locks" / f"{name}-{seed}") as ours:
            if ours and not last.exists():
                run_cell(settings, name, seed, out)
                print(grape_table.line(name, seed, json.loads(last.read_text())), flush=True)


def load_records(out: Path, pilot: bool = False) -> dict[str, dict[int, list[dict[str, Any]]]]:
    """Arm -> seed -> records of its iterations, as far as they are done; of the pilot's seed, or of all others."""
    table: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for run in sorted(out.glob("*-seed*")):
        name, _, seed = run.name.rpartition("-seed")
        iterations = [json.loads(p.read_text()) for p in sorted(run.glob("iteration-*/record.json"))]
        if iterations and seed.isdigit() and (int(seed) == PILOT_SEED) == pilot:
            table.setdefault(name, {})[int(seed)] = iterations
    return table


def main(argv: Sequence[str] | None = None) -> int:
    p = parser(__doc__)
    p.add_argument("--jobs", type=int, default=1, help="processes of one thread each (1)")
    p.add_argument("--seeds", type=int, default=3, help="training seeds (3)")
    p.add_argument("--report", action="store_true", help="report what is there, run nothing")
    p.add_argument("--images", action="store_true", help="from pictures and sentences")
    p.add_argument("--smoke", action="store_true", help="the whole path at toy size")
    p.add_argument("--pilot", action="store_true", help="a gap for beta, and the main arms, on a seed of its own")
    p.add_argument("--set", nargs="*", default=[], metavar="key=value", help="other settings, e.g. updates=40")
    p.add_argument("--out", type=Path, help="folder of the runs (outputs/reproduce/<name>)")
    p.add_argument("--name", help="stem of the result files (grape, grape_images)")
    args = p.parse_args(argv)
    name = args.name or "grape" + "_images" * args.images + "_smoke" * args.smoke
    out = args.out or OUT / name
    if not args.report:
        from grape_cells import IMAGES, TINY, Settings, demonstrate

        changes = {k: json.loads(v) for k, _, v in (text.partition("=") for text in args.set)}
        size = dataclasses.replace(IMAGES if args.images else Settings(), **(TINY if args.smoke else {}), **changes)
        same_settings(out, dataclasses.asdict(size))
        demonstrate(size, out / "demos")
        if args.pilot:
            pilot(size, out)
        else:
            together(args.jobs, partial(work, size, range(args.seeds), out))
    noted = out / "settings.json"
    settings = json.loads(noted.read_text()) if noted.is_file() else {}
    grape_table.report(name, load_records(out, args.pilot), settings)
    return 0


def pilot(settings: Any, out: Path) -> None:
    """Which beta fits? Then the main arms, on a seed of its own."""
    import torch
    from grape_cells import ORDER, recipe, run_base, run_cell

    from vla_stack.methods.grape.loop import GrapeLoop
    from vla_stack.methods.grape.pair_training import calibrate

    torch.set_num_threads(1)
    run_base(settings, PILOT_SEED, out)
    base = out / f"base-seed{PILOT_SEED}"
    plan = recipe(settings, "grape-safety", PILOT_SEED, out / f"sft-seed{PILOT_SEED}")
    loop = GrapeLoop(plan, base)
    print(grape_table.line("base", PILOT_SEED, loop.folder.records()[0]), loop.judge(1))
    print(f"beta {calibrate(plan, loop.folder.path(1), base / 'calibration', loop.start):.3g}")
    for name in ORDER[0]:
        run_cell(settings, name, PILOT_SEED, out)


if __name__ == "__main__":
    sys.exit(main())

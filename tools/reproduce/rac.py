"""RaC against HG-DAgger and full demonstrations at equal human frames, with a simulated operator.

    python tools/reproduce/rac.py --jobs 2      # runs what is missing, the most informative first, then reports
    python tools/reproduce/rac.py --task jam    # where a person cannot correct from every state; --task free: the same
                                                # without jams
    python tools/reproduce/rac.py --report      # reports what is there
    python tools/reproduce/rac.py --smoke       # the whole path at toy size; the figures mean nothing

Claim (arXiv 2509.07953): where a person who takes over first goes back to familiar states (rule 1) and the episode ends
with the intervention (rule 2), a policy becomes better for the same number of human frames than by HG-DAgger or by
more demonstrations, because it learns to recover.

All arms of a seed share the demonstrations and the policy of iteration 0, the scenes, the simulated person's luck and
the training settings; every iteration trains from scratch on all data so far. ``masked`` is RaC's own data without the
recoveries. Observations hold the poses of the objects (``sim.privileged``): about algorithms, not about seeing.

Stacking is two sub-tasks, an intervention costs most of a demonstration, and the operator can correct from every state:
there the claim has little to hold by. ``jam`` is eight: four cubes to seat, of which one in four slips and four in ten
jam, for no fault of anybody's. Out of a jam nobody gets who does not back out first, and the operator's corrections do
not; an intervention is an eighth of a demonstration. ``free`` is the same without the jams.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]
import rac_report  # noqa: E402
from claims import claimed, published, published_before, same_settings, together  # noqa: E402

import freshness  # noqa: E402
from results import ROOT, parser  # noqa: E402
from vla_stack.data.layout import read_json, write_json  # noqa: E402

RECIPE = ROOT / "vla_stack" / "configs" / "rac_stack.yaml"
OUT = ROOT / "outputs" / "reproduce" / "rac"


@dataclass(frozen=True)
class Arm:
    """What an arm changes: keys of the method, and which frames it trains on.

    ``masked`` trains on the data of arm ``rac`` and rolls nothing out.
    """

    about: str
    mode: str = "rac"
    recover: bool = True
    interventions: str = "rac"
    masked: bool = False
    rewind: bool = False


ARMS = {
    "rac": Arm("RaC"),
    "hg_dagger": Arm("HG-DAgger", "hg_dagger", False, "hg_dagger"),
    "demos": Arm("full demonstrations", "teleop"),
    "masked": Arm("RaC, recoveries not trained on", interventions="no_recovery", masked=True),
    "no_rule1": Arm("RaC without rule 1", recover=False),
    "no_rule2": Arm("RaC without rule 2", "hg_dagger"),
    "rewind": Arm("RaC with auto-rewind", rewind=True),
}
SIZE = ("method.iterations=5", "eval.episodes=100")
IMAGES = (  # an easier task, and more to learn it from: nine demonstrations of stacking teach nothing from pixels
    *("task={id: sim/place-v0}", "method.demos=60", "method.human_frames=600", "method.iterations=2"),
    *("eval.episodes=60", "method.steps=2000", "method.save_every=2000"),
)
JAM = "task={{id: sim/jam-v0, options: {{cameras: [], privileged: true, retreats: false, jams: {}}}}}".format
LONG = ("method.demos=15", "method.human_frames=600", "method.steps=1500", "method.save_every=1500", "eval.episodes=60")
TASKS = {"stack": (), "jam": (JAM(0.4), *LONG), "free": (JAM(0.0), *LONG)}
SMOKE = (
    *("method.iterations=1", "method.demos=3", "method.human_frames=20", "method.num_envs=3", "method.steps=2"),
    "eval.episodes=3",
)
ABOUT = {name: arm.about for name, arm in ARMS.items()}
ORDER = (
    ("rac", "hg_dagger", "demos"),
    ("masked",),
    ("no_rule1", "no_rule2"),
    ("rewind",),
)  # each on all seeds before the next


def cells(seeds: Sequence[int]) -> Iterator[tuple[str, int]]:
    """(arm, seed), the most informative first."""
    for names in ORDER:
        for seed in seeds:
            for name in names:
                yield name, seed


def recipe(name: str, seed: int, overrides: Sequence[str]) -> Any:
    """The recipe of an arm and seed."""
    from vla_stack.training.recipe import load

    arm, base = ARMS[name], load(RECIPE, overrides)
    data = replace(base.data, interventions=arm.interventions)
    method = replace(base.method, mode=arm.mode, recover=arm.recover, rewind=arm.rewind)
    return replace(base, name=name, seed=seed, data=data, method=method)


def settings(overrides: Sequence[str]) -> dict[str, Any]:
    """What all cells of a folder share."""
    from vla_stack.training.recipe_tree import read_tree

    return {"recipe": read_tree(RECIPE, overrides), "arms": {name: asdict(arm) for name, arm in ARMS.items()}}


def run_cell(name: str, seed: int, out: Path, overrides: Sequence[str]) -> None:
    """All iterations of an arm on a seed, from where an earlier run stopped."""
    from vla_stack.methods.rac.loop import RacLoop

    plan, base = recipe(name, seed, overrides), out / f"base-seed{seed}"
    run = out / f"{name}-seed{seed}"
    if ARMS[name].masked:
        loop = RacLoop(plan, out / f"rac-seed{seed}")
        records = loop.folder.records()
        path = run / f"iteration-{plan.method.iterations:03d}" / "record.json"  # of the last iteration alone
        if len(records) > plan.method.iterations and not path.exists():
            policy = loop.train(len(records) - 1, "no_recovery", "train_masked", records[-1]["episodes"])
            write_json(path, {**records[-1], **loop.evaluate(policy)})
        return
    if not run.exists():
        shutil.rmtree(partial := run.with_name(f"{run.name}.partial"), ignore_errors=True)
        shutil.copytree(base, partial, symlinks=True)
        partial.rename(run)
    RacLoop(plan, run).run()


def work(pairs: Sequence[tuple[str, int]], out: Path, overrides: Sequence[str]) -> None:
    """Run cells until none is left; several processes may do so at once."""
    import torch

    from vla_stack.methods.rac.loop import RacLoop

    torch.set_num_threads(1)
    for arm, seed in pairs:
        with claimed(out / "locks" / f"base-{seed}") as ours:
            if not ours:
                continue
            plan = recipe("rac", seed, overrides)
            plan = replace(plan, name="base", method=replace(plan.method, iterations=0))
            RacLoop(plan, out / f"base-seed{seed}").run()
        data = "rac" if ARMS[arm].masked else arm
        with claimed(out / "locks" / f"{data}-{seed}") as ours:
            if ours:
                run_cell(arm, seed, out, overrides)
                rac_report.log(ABOUT, load_records(out))


def load_records(out: Path) -> dict[str, dict[int, list[dict[str, Any]]]]:
    """Arm -> seed -> records of its iterations, as far as they are done."""
    table: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for name in ARMS:
        for run in sorted(out.glob(f"{name}-seed*")):
            if run.name.removeprefix(f"{name}-seed").isdigit():
                iterations = [read_json(p) for p in sorted(run.glob("iteration-*/record.json"))]
                table.setdefault(name, {})[int(run.name.removeprefix(f"{name}-seed"))] = iterations
    return table


def cells_of(records: dict[str, dict[int, list[dict[str, Any]]]]) -> list[dict[str, Any]]:
    """The same as a result file keeps them: one run each."""
    return [{"arm": arm, "seed": s, "iterations": run} for arm, runs in records.items() for s, run in runs.items()]


def adopted(name: str, these: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs of a result file that are over, where they are of these settings and not all is to be measured again."""
    before, runs = published_before(name)
    if before != these or os.environ.get(freshness.ANEW):
        return []
    last = these["recipe"]["method"]["iterations"]
    return [run for run in runs if run["iterations"] and run["iterations"][-1]["iteration"] == last]


def main(argv: Sequence[str] | None = None) -> int:
    p = parser(__doc__)
    p.add_argument("overrides", nargs="*", metavar="key=value", help="keys of the recipe rac_stack")
    p.add_argument("--jobs", type=int, default=1, help="processes of one thread each (1)")
    p.add_argument("--seeds", type=int, default=3, help="training seeds (3)")
    p.add_argument("--report", action="store_true", help="report what is there, run nothing")
    p.add_argument("--task", choices=TASKS, default="stack", help="see above (stack)")
    p.add_argument("--images", action="store_true", help="RaC and HG-DAgger on one seed from pixels, placing")
    p.add_argument("--smoke", action="store_true", help="the whole path at toy size")
    p.add_argument("--out", type=Path, help="folder of the runs (outputs/reproduce/rac)")
    p.add_argument("--name", help="stem of the result files")
    args = p.parse_args(argv)
    if args.images and args.task != "stack":
        p.error("--images is of a task of its own: leave --task out")
    kind = IMAGES if args.images else TASKS[args.task]
    overrides = [*SIZE, *kind, *(SMOKE if args.smoke else ()), *args.overrides]
    name = args.name or "rac" + f"_{args.task}" * (args.task != "stack") + "_images" * args.images
    name += "_smoke" * (args.smoke and not args.name)  # toy cells never lie among the others
    out, seeds, these = args.out or OUT.with_name(name), range(args.seeds), json.loads(json.dumps(settings(overrides)))
    kept = adopted(name, these)
    if not args.report:
        same_settings(out, these)
        pairs = [(arm, 0) for arm in ("rac", "hg_dagger")] if args.images else list(cells(seeds))
        over = {(run["arm"], run["seed"]) for run in kept}
        over -= {("rac", seed) for seed in seeds if ("masked", seed) not in over}  # which trains on RaC's data
        together(args.jobs, partial(work, [pair for pair in pairs if pair not in over], out, overrides))
    records = load_records(out)
    for run in kept:
        runs = records.setdefault(run["arm"], {})
        runs[run["seed"]] = max(runs.get(run["seed"], []), run["iterations"], key=len)
    if not records:
        sys.exit(f"{out} holds no runs yet")
    rac_report.report(name, ABOUT, records, published(these, cells_of(records)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

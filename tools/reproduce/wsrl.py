"""WSRL against methods that keep offline data, start from nothing, or do not warm up, on two tasks with sparse reward.

    python tools/reproduce/wsrl.py --jobs 2     # runs what is missing, the most informative first, then reports
    python tools/reproduce/wsrl.py --report     # reports what is there
    python tools/reproduce/wsrl.py --smoke      # the whole path at toy size; the figures mean nothing

Claims (arXiv:2412.07762): after offline training, a short warm-up with the frozen policy, and online learning without
the offline data, there is no collapse below the pre-trained policy, fewer steps are needed than by RLPD and than by
Cal-QL fine-tuning that keeps the data, and without the warm-up success dips. All arms of a seed share the stored
episodes, those that pre-train share that too; networks, batches and updates a control step are the same. Arms that
begin with nothing get what they need for it, as in ``expo.py``: a larger temperature, and no longer a random warm-up
than fills their first batches.
Observations hold the poses of the objects: about algorithms, not about seeing.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]
import rl_grid  # noqa: E402
from rl_cells import Arm  # noqa: E402
from rl_report import EARLY, Runs, arms_of, plot, ratio  # noqa: E402

from results import ROOT, Check, write  # noqa: E402
from vla_stack.statistics import SEEDS, mean_interval  # noqa: E402

THRESHOLD = 0.8  # success
MARGIN = -0.1  # success: a fall within it is no dip
FEWER = 0.99  # of the other's steps: where neither arrives the ratio is 1
FROM_NOTHING = ("method.warmup=400", "method.sac.temperature=0.1", "method.sac.lr_temperature=3e-4")
ARMS = {
    "wsrl": Arm("WSRL"),
    "rlpd": Arm("RLPD", ("method.arm=rlpd", *FROM_NOTHING), pretrained=False),
    "cal_ql": Arm("Cal-QL, data kept", ("method.arm=cal_ql",)),
    "no_warmup": Arm("WSRL without warm-up", ("method.arm=no_warmup",)),
    "sac": Arm("SAC from scratch", ("method.arm=sac", *FROM_NOTHING), pretrained=False),
    "random_warmup": Arm("WSRL, random warm-up", ("method.arm=random_warmup",)),
}
GRID = rl_grid.Grid(
    name="wsrl",
    config=ROOT / "vla_stack" / "configs" / "rl_wsrl.yaml",
    tasks={
        "pick": (),
        "metaworld-push": (
            "task.id=metaworld/push-v3",
            "task.options.control_hz=20",
            "task.options.max_episode_steps=60",
        ),
    },
    arms=ARMS,
    order=(("wsrl", "rlpd", "no_warmup"), ("cal_ql",), ("sac", "random_warmup")),
    smoke=(
        *(
            "method.offline.episodes=3",
            "method.offline_steps=2",
            "method.warmup=8",
            "method.sac.batch=8",
            "method.sac.actor=[8]",
        ),
        *(
            "method.sac.critic=[8]",
            "method.steps=16",
            "eval.every=8",
            "eval.episodes=2",
            "eval.num_envs=2",
            "task.options.max_episode_steps=4",
        ),
    ),
)


def report(grid: rl_grid.Grid, name: str, records: rl_grid.Records, kept: dict[str, Any]) -> None:
    checks: list[Check] = []
    tasks = {task: arms_of(records, task, list(ARMS)) for task in grid.tasks}
    tasks = {task: arms for task, arms in tasks.items() if arms}
    for task, arms in tasks.items():
        if "wsrl" in arms:
            start = float(arms["wsrl"].success[:, 0].mean())
            why = "whoever begins there needs no steps to get there"
            checks.append(Check(f"{task}: success before", start, THRESHOLD, "<=", arms["wsrl"].at(0), why))
            warmup = next(r["warmup"] for r in records if r["task"] == task and r["arm"] == "wsrl")
            checks += dips(task, arms, warmup)
        for other in ("rlpd", "cal_ql"):
            if "wsrl" in arms and other in arms and set(arms["wsrl"].seeds) & set(arms[other].seeds):
                checks += faster(task, arms["wsrl"], arms[other], ARMS[other].about)
        for arm, runs in arms.items():
            last = float(runs.success[:, -1].mean())
            checks.append(Check(f"{task}: {ARMS[arm].about}, success at the end", last, interval=runs.at(-1)))
    data = {task: {arm: runs.curve() for arm, runs in arms.items()} for task, arms in tasks.items()}
    write(name, checks, {"threshold": THRESHOLD, "tasks": data, **kept}, sorted({r["seed"] for r in records}))
    plot(name, {t: t for t in tasks}, tasks, {k: a.about for k, a in ARMS.items()})


def dips(task: str, arms: dict[str, Runs], warmup: int) -> list[Check]:
    """Whether success falls when learning begins: the first evaluations after that, minus the one before."""
    what = f"first {EARLY} evaluations after learning begins minus start"
    dip = arms["wsrl"].dip(warmup)
    about, why = ARMS["wsrl"].about, "success may fall below its start, by more than the margin"
    checks = [Check(f"{task}: {about}, {what}: lower end", dip.low, MARGIN, ">=", dip, why)]
    if "no_warmup" not in arms:
        return checks
    dip = arms["no_warmup"].dip(0)  # it learns from the first step on
    about, why = ARMS["no_warmup"].about, "no dip that could be told from none"
    checks.append(Check(f"{task}: {about}, {what}: upper end", dip.high, 0.0, "<=", dip, why))
    if seeds := sorted(set(arms["wsrl"].seeds) & set(arms["no_warmup"].seeds)):
        apart = mean_interval(arms["wsrl"].of(seeds).early(warmup) - arms["no_warmup"].of(seeds).early(0), SEEDS)
        name = f"{task}: the same, with minus without warm-up: lower end"
        checks.append(Check(name, apart.low, 0.0, ">", apart, "not told apart"))
    return checks


def faster(task: str, ours: Runs, theirs: Runs, about: str) -> list[Check]:
    """Ratio of steps to the threshold, over seeds that do not begin there."""
    starts = dict(zip(ours.seeds, ours.success[:, 0], strict=True))
    shared = sorted(set(ours.seeds) & set(theirs.seeds))
    seeds = [s for s in shared if starts[s] < THRESHOLD]
    if not seeds:
        return []
    ours, theirs = ours.of(seeds), theirs.of(seeds)
    steps = ratio(ours.to_threshold(THRESHOLD), theirs.to_threshold(THRESHOLD))
    shares = f"{ours.reached(THRESHOLD):.0%} of WSRL's seeds, {theirs.reached(THRESHOLD):.0%} of the other's"
    why = f"{shares} reach {THRESHOLD:.0%}"
    name = f"{task}: steps to {THRESHOLD:.0%}, WSRL over {about}, {len(seeds)} seeds"
    return [Check(name, steps.value, interval=steps), Check(f"{name}: upper end", steps.high, FEWER, "<=", steps, why)]


if __name__ == "__main__":
    sys.exit(rl_grid.main(GRID, __doc__, report))

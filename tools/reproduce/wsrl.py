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
import numpy as np  # noqa: E402
import rl_grid  # noqa: E402
from rl_cells import Arm  # noqa: E402
from rl_report import Runs, arms_of, interval, plot, ratio  # noqa: E402

from results import ROOT, Check, write  # noqa: E402

THRESHOLD = 0.8  # success
DIP = -0.01  # a curve that only rises is lowest at its start, 0
FEWER = 0.99  # of the other's steps: where neither arrives the ratio is 1
FROM_NOTHING = ("wsrl.warmup=400", "wsrl.sac.temperature=0.1", "wsrl.sac.lr_temperature=3e-4")
ARMS = {
    "wsrl": Arm("WSRL"),
    "rlpd": Arm("RLPD", ("wsrl.arm=rlpd", *FROM_NOTHING), pretrained=False),
    "cal_ql": Arm("Cal-QL, data kept", ("wsrl.arm=cal_ql",)),
    "no_warmup": Arm("WSRL without warm-up", ("wsrl.arm=no_warmup",)),
    "sac": Arm("SAC from scratch", ("wsrl.arm=sac", *FROM_NOTHING), pretrained=False),
    "random_warmup": Arm("WSRL, random warm-up", ("wsrl.arm=random_warmup",)),
}
GRID = rl_grid.Grid(
    name="wsrl",
    config=ROOT / "configs" / "rl_wsrl.yaml",
    tasks={
        "pick": (),
        "metaworld-drawer-open": ("env.id=metaworld/drawer-open-v3", "env.control_hz=20", "env.limit=60"),
    },
    arms=ARMS,
    order=(("wsrl", "rlpd", "no_warmup"), ("cal_ql",), ("sac", "random_warmup")),
    smoke=(
        *("offline.episodes=3", "wsrl.offline_steps=2", "wsrl.warmup=8", "wsrl.sac.batch=8", "wsrl.sac.actor=[8]"),
        *("wsrl.sac.critic=[8]", "steps=16", "eval_every=8", "eval_episodes=2", "eval_envs=2", "env.limit=4"),
    ),
)


def report(grid: rl_grid.Grid, name: str, records: list[dict[str, Any]]) -> None:
    checks: list[Check] = []
    tasks = {task: arms_of(records, task, list(ARMS)) for task in grid.tasks}
    tasks = {task: arms for task, arms in tasks.items() if arms}
    for task, arms in tasks.items():
        if "wsrl" in arms:
            start = arms["wsrl"].success[:, 0]
            checks.append(Check(f"{task}: success before", float(start.mean()), interval=interval(start)))
        if "wsrl" in arms:
            warmup = next(r["warmup"] for r in records if r["task"] == task and r["arm"] == "wsrl")
            checks.append(dip(task, "wsrl", arms["wsrl"], warmup))
        if "no_warmup" in arms:
            checks.append(dip(task, "no_warmup", arms["no_warmup"], 0))  # it learns from the first step on
        for other in ("rlpd", "cal_ql"):
            if "wsrl" in arms and other in arms and set(arms["wsrl"].seeds) & set(arms[other].seeds):
                checks.append(faster(task, arms["wsrl"], arms[other], ARMS[other].about))
        for arm, runs in arms.items():
            last = runs.success[:, -1]
            checks.append(Check(f"{task}: {ARMS[arm].about}, success at the end", last.mean(), interval=interval(last)))
    data = {task: {arm: runs.curve() for arm, runs in arms.items()} for task, arms in tasks.items()}
    write(name, checks, {"threshold": THRESHOLD, "tasks": data}, sorted({r["seed"] for r in records}))
    plot(name, {t: t for t in tasks}, tasks, {k: a.about for k, a in ARMS.items()})


def dip(task: str, arm: str, runs: Runs, warmup: int) -> Check:
    """How far the mean curve falls below its start after ``warmup`` steps, at its lowest."""
    after = runs.success[:, runs.steps > warmup] - runs.success[:, :1]
    lowest = after[:, after.mean(0).argmin()]
    low, high = interval(lowest)
    name = f"{task}: {ARMS[arm].about}, lowest{' after the warm-up' * (arm == 'wsrl')} minus start, upper end"
    if arm == "wsrl":  # no dip: the interval reaches 0
        return Check(name, high, 0.0, ">=", (low, high), "success falls below its start")
    return Check(name, high, DIP, "<=", (low, high), "no dip beyond the interval")


def faster(task: str, ours: Runs, theirs: Runs, about: str) -> Check:
    seeds = sorted(set(ours.seeds) & set(theirs.seeds))
    steps = [np.array([r.to_threshold(THRESHOLD)[r.seeds.index(s)] for s in seeds]) for r in (ours, theirs)]
    value, bounds = ratio(*steps)
    shares = f"{ours.reached(THRESHOLD):.0%} of WSRL's seeds, {theirs.reached(THRESHOLD):.0%} of the other's"
    why = f"{shares} reach {THRESHOLD:.0%}"
    return Check(f"{task}: steps to {THRESHOLD:.0%}, WSRL over {about}", value, FEWER, "<=", bounds, why)


if __name__ == "__main__":
    sys.exit(rl_grid.main(GRID, __doc__, report))

"""EXPO against its base alone, best-of-N, edits alone and RLPD, on two tasks with sparse reward.

    python tools/reproduce/expo.py --jobs 2     # runs what is missing, the most informative first, then reports
    python tools/reproduce/expo.py --report     # reports what is there
    python tools/reproduce/expo.py --smoke      # the whole path at toy size; the figures mean nothing

Claim (arXiv:2507.07986): an expressive policy that only imitates, a small policy that edits its actions, and the best
of both by the critics where it acts and in the targets, reach a success rate in at most 0.6 times the control steps of
the strongest baseline. All arms of a seed share demonstrations, networks, rates, batches and updates a chunk; those
with a base share its imitation. Observations hold the poses of the objects: about algorithms, not about seeing.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]
import rl_grid  # noqa: E402
from rl_cells import Arm  # noqa: E402
from rl_report import arms_of, plot, ratio  # noqa: E402

from results import ROOT, Check, write  # noqa: E402

CONFIG = ROOT / "vla_stack" / "configs" / "rl_expo.yaml"
THRESHOLD, SOONER = 0.8, 0.6  # success: what is asked for, and what is reached on the way there
BOUND, FEWER = 0.6, 0.99
# RLPD of EXPO's sizes; its own actor has its own temperature, and EXPO's rates, not those of WSRL's fine-tuning.
RLPD = (
    *("method=wsrl", "method.arm=rlpd", "method.warmup=400", "method.sac.temperature=0.1"),
    *("method.sac.lr_actor=3e-4", "method.sac.lr_temperature=3e-4"),
)
ARMS = {
    "expo": Arm("EXPO"),
    "best_of_n": Arm("best of N, no edits", ("method.edits=0", "method.samples=8")),  # as many candidates
    "edit_only": Arm("edits alone", ("method.samples=1", "method.edits=1", "method.unedited=false")),
    "rlpd": Arm("RLPD", RLPD, pretrained=False),
    "base": Arm("base alone", ("method.learn=false",)),
}

GRID = rl_grid.Grid(
    name="expo",
    config=CONFIG,
    tasks={
        # As many demonstrations as bring imitation to 20-60 %.
        "pick": ("task.id=sim/pick-v0", "method.offline.episodes=14"),
        "metaworld-peg-insert-side": (
            *(
                "task.id=metaworld/peg-insert-side-v3",
                "task.options.control_hz=20",
                "task.options.max_episode_steps=60",
                "method.offline.episodes=10",
            ),
        ),
    },
    arms=ARMS,
    order=(("expo", "best_of_n", "rlpd"), ("edit_only", "base")),
    smoke=(
        *(
            "method.offline.episodes=3",
            "method.offline.failures=true",
            "method.base_steps=2",
            "method.base=[8]",
            "method.samples=2",
        ),
        *("method.edits=1", "method.sac.batch=8", "method.sac.actor=[8]", "method.sac.critic=[8]"),
        "task.options.max_episode_steps=6",
        *("method.steps=16", "eval.every=8", "eval.episodes=2", "eval.num_envs=2"),
    ),
)


def report(grid: rl_grid.Grid, name: str, records: rl_grid.Records, kept: dict[str, Any]) -> None:
    checks: list[Check] = []
    tasks = {task: arms_of(records, task, list(ARMS)) for task in grid.tasks}
    tasks = {task: arms for task, arms in tasks.items() if arms}
    for task, arms in tasks.items():
        # Baselines that have run on fewer seeds are not compared yet.
        seeds = sorted(arms["expo"].seeds) if "expo" in arms else []
        others = [arm for arm, runs in arms.items() if arm != "expo" and set(runs.seeds) >= set(seeds)]
        if seeds and others:
            steps = {arm: arms[arm].of(seeds).to_threshold(THRESHOLD) for arm in ("expo", *others)}
            strongest = min(others, key=lambda arm: steps[arm].mean())
            fewer = ratio(steps["expo"], steps[strongest])
            reached = {ARMS[a].about: f"{arms[a].reached(THRESHOLD):.0%}" for a in steps}
            why = "seeds that reach it: " + ", ".join(f"{a} {share}" for a, share in reached.items())
            label = f"{task}: steps to {THRESHOLD:.0%}, EXPO over {ARMS[strongest].about}, the strongest baseline"
            checks.append(Check(f"{label}, {len(seeds)} seeds", fewer.value, BOUND, "<=", fewer, why))
            checks.append(Check(f"{label}: upper end", fewer.high, FEWER, "<=", fewer, why))
            for other in others:
                for threshold in (SOONER, THRESHOLD):
                    fewer = ratio(*(arms[a].of(seeds).to_threshold(threshold) for a in ("expo", other)))
                    label = f"{task}: steps to {threshold:.0%}, EXPO over {ARMS[other].about}"
                    checks.append(Check(label, fewer.value, interval=fewer))
        for arm, runs in arms.items():
            # Arms with a base share the evaluation before: critics that know nothing choose among EXPO's candidates.
            for when, column in (("before", 0), ("at the end", -1))[arm not in ("expo", "rlpd") :]:
                rate = runs.at(column)
                checks.append(Check(f"{task}: {ARMS[arm].about}, success {when}", rate.value, interval=rate))
    data = {task: {arm: runs.curve() for arm, runs in arms.items()} for task, arms in tasks.items()}
    write(name, checks, {"threshold": THRESHOLD, "tasks": data, **kept}, sorted({r["seed"] for r in records}))
    plot(name, {t: t for t in tasks}, tasks, {k: a.about for k, a in ARMS.items()})


if __name__ == "__main__":
    sys.exit(rl_grid.main(GRID, __doc__, report))

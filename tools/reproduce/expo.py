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
from vla_stack.training.recipe_tree import read_tree  # noqa: E402

CONFIG = ROOT / "configs" / "rl_expo.yaml"
THRESHOLD, SOONER = 0.8, 0.6  # success: what is asked for, and what is reached on the way there
BOUND, FEWER = 0.6, 0.99
ARMS = {
    "expo": Arm("EXPO"),
    "best_of_n": Arm("best of N, no edits", ("expo.edits=0", "expo.samples=8")),  # as many candidates
    "edit_only": Arm("edits alone", ("expo.samples=1", "expo.edits=1", "expo.unedited=false")),
    "rlpd": Arm("RLPD", ("method=wsrl", "wsrl.arm=rlpd"), pretrained=False),
    "base": Arm("base alone", ("expo.learn=false",)),
}
SAME = ("actor", "critic", "members", "subset", "batch", "utd")  # of EXPO's critics and RLPD's


def rlpd_keys() -> tuple[str, ...]:
    """RLPD with EXPO's sizes; its own actor has its own entropy target and rows."""
    sac = read_tree(CONFIG)["expo"]["sac"]
    own = "wsrl.warmup=400 wsrl.sac.layer_norm=true wsrl.sac.entropy_backup=false wsrl.sac.actor_q=mean".split()
    own += "wsrl.sac.target_entropy=-0.5 wsrl.sac.actor_rows=last wsrl.sac.temperature=0.1".split()
    own += "wsrl.sac.lr_actor=3e-4 wsrl.sac.lr_temperature=3e-4".split()  # EXPO's, not those of WSRL's fine-tuning
    return (*(f"wsrl.sac.{key}={sac[key]}" for key in SAME), *own)


GRID = rl_grid.Grid(
    name="expo",
    config=CONFIG,
    tasks={
        # As many demonstrations as bring imitation to 20-60 %.
        "pick": ("env.id=sim/pick-v0", "offline.episodes=14", *rlpd_keys()),
        "metaworld-peg-insert-side": (
            *("env.id=metaworld/peg-insert-side-v3", "env.control_hz=20", "env.limit=60", "offline.episodes=10"),
            *rlpd_keys(),
        ),
    },
    arms=ARMS,
    order=(("expo", "best_of_n", "rlpd"), ("edit_only", "base")),
    smoke=(
        *("offline.episodes=3", "offline.failures=true", "expo.base_steps=2", "expo.base=[8]", "expo.samples=2"),
        *("expo.edits=1", "expo.sac.batch=8", "expo.sac.actor=[8]", "expo.sac.critic=[8]", "wsrl.sac.batch=8"),
        *("wsrl.sac.actor=[8]", "wsrl.sac.critic=[8]", "wsrl.warmup=8", "env.limit=6"),
        *("steps=16", "eval_every=8", "eval_episodes=2", "eval_envs=2"),
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
            value, bounds = ratio(steps["expo"], steps[strongest])
            reached = {ARMS[a].about: f"{arms[a].reached(THRESHOLD):.0%}" for a in steps}
            why = "seeds that reach it: " + ", ".join(f"{a} {share}" for a, share in reached.items())
            label = f"{task}: steps to {THRESHOLD:.0%}, EXPO over {ARMS[strongest].about}, the strongest baseline"
            checks.append(Check(f"{label}, {len(seeds)} seeds", value, BOUND, "<=", bounds, why))
            checks.append(Check(f"{label}: upper end", bounds[1], FEWER, "<=", bounds, why))
            for other in others:
                for threshold in (SOONER, THRESHOLD):
                    value, bounds = ratio(*(arms[a].of(seeds).to_threshold(threshold) for a in ("expo", other)))
                    label = f"{task}: steps to {threshold:.0%}, EXPO over {ARMS[other].about}"
                    checks.append(Check(label, value, interval=bounds))
        for arm, runs in arms.items():
            # Arms with a base share the evaluation before: critics that know nothing choose among EXPO's candidates.
            for when, column in (("before", 0), ("at the end", -1))[arm not in ("expo", "rlpd") :]:
                rate, bounds = float(runs.success[:, column].mean()), runs.interval(column)
                checks.append(Check(f"{task}: {ARMS[arm].about}, success {when}", rate, interval=bounds))
    data = {task: {arm: runs.curve() for arm, runs in arms.items()} for task, arms in tasks.items()}
    write(name, checks, {"threshold": THRESHOLD, "tasks": data, **kept}, sorted({r["seed"] for r in records}))
    plot(name, {t: t for t in tasks}, tasks, {k: a.about for k, a in ARMS.items()})


if __name__ == "__main__":
    sys.exit(rl_grid.main(GRID, __doc__, report))

"""Does the failure monitor call in time, and how often for nothing? The shipped policy, on starts it was not fitted to.

    python tools/reproduce/monitor.py --blocks 5
    python tools/reproduce/monitor.py --blocks 5 --report    # from the episodes that are there

The monitor's choices were made looking at ``sim/pick-v0``; that a clock is one of its scores, that times have one limit
and each score its own, looking at the generalist on the tasks of ``monitor_help.py``. Successes on starts as they are
come in four folds of each task: every start is judged once, by a monitor that was fitted to the other three quarters,
which gives the rate of false alarms. Failures under conditions that no monitor saw (half of each picture covered,
answers 600 ms late) are judged by one that was fitted to all successes of the task. Tasks that the policy never learnt
have no successes; they are judged by one monitor that was fitted to those of all three tasks. A failure counts as
called where the alarm comes at least 1 s before its end. Beside the monitor stands a clock: an alarm when an episode
lasts longer than 95 % of the successes that the monitor was fitted to.

Finished blocks of 20 episodes are kept in ``--out``; the command goes on where it was stopped.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from results import Check, parser, write
from vla_stack.evaluation.evaluate import evaluate
from vla_stack.evaluation.monitoring import EARLY_S, Listening, Watched, alarm_step, fit, policy_features, watched
from vla_stack.evaluation.pictures import Changed, Picture
from vla_stack.policies.chunk_policy import load_policy
from vla_stack.policies.directory import resolve_policy
from vla_stack.rollout.latency import Latency
from vla_stack.runtime.monitor import Decided, Monitor
from vla_stack.statistics import Estimate, success_interval

ALPHA, BLOCK = 0.05, 20
KNOWN, UNKNOWN = ("pick", "place", "obstacle"), ("stack", "push", "press")
FIT, JUDGE = 50_000, 60_000  # first seeds of two series of starts
FOLDS = 4
TUNED_ON = "pick"
LATE_S = 0.6
CHANGES = ("covered", "late")
Cell = tuple[str, str]  # task, condition: fit, seen, or one of CHANGES


def covered(picture: Picture, _: np.random.Generator) -> Picture:
    """The lower half of a picture behind something grey, as if a hand or a box stood there."""
    out = picture.copy()
    out[len(out) // 2 :] = 128
    return out


def cells(blocks: int) -> list[tuple[Cell, int]]:
    """What is run, in an order in which every cell has something early."""
    out: list[tuple[Cell, int]] = []
    for block in range(blocks):
        out += [((task, what), block) for what in ("fit", "seen") for task in KNOWN]
        if block == 0:
            out += [((task, what), block) for what in CHANGES for task in KNOWN]
            out += [((task, "seen"), block) for task in UNKNOWN]
    return out


def measured(policy: Any, cell: Cell, block: int, folder: Path) -> list[Watched]:
    """Episodes of a block, run or read."""
    (task, what), dt = cell, policy.spec.robot.dt
    file = folder / f"{task}-{what}-{block}.npz"
    if not file.exists():
        listening = Listening(policy, policy_features(policy))
        acting = Changed(listening, covered) if what == "covered" else listening  # its features are of what it sees
        seed = (FIT if what == "fit" else JUDGE) + BLOCK * block
        latency = Latency(LATE_S if what == "late" else 0.0)
        result = evaluate(acting, f"sim/{task}-v0", BLOCK, seed, latency=latency, num_envs=5)
        save(file, [watched(listening, e) for e in result.episodes])
    episodes = read(file)
    print(f"{task:<9}{what:<8}{block}  {sum(e.success for e in episodes)} of {len(episodes)}", flush=True)
    return [e for e in episodes if e.decisions and e.steps * dt > 0]


def save(file: Path, episodes: Sequence[Watched]) -> None:
    """Episodes as arrays, complete or not at all."""
    flat = [d for e in episodes for d in e.decisions]
    arrays: dict[str, Any] = {
        "lengths": [len(e.decisions) for e in episodes],
        "steps": [e.steps for e in episodes],
        "success": [e.success for e in episodes],
        "at": [(d.step, d.origin, d.used) for d in flat],
        "state": np.stack([d.state for d in flat]),
        "actions": np.stack([d.actions for d in flat]),
        "features": np.stack([d.features for d in flat if d.features is not None]),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".tmp.npz")
    np.savez_compressed(partial, **arrays)
    partial.replace(file)


def read(file: Path) -> list[Watched]:
    """Inverse of :func:`save`."""
    with np.load(file, allow_pickle=False) as a:
        rows = zip(a["at"].tolist(), a["state"], a["actions"], a["features"], strict=True)
        flat = iter([Decided(step, s, x, origin, f, used) for (step, origin, used), s, x, f in rows])
        about = zip(a["lengths"].tolist(), a["steps"].tolist(), a["success"].tolist(), strict=True)
        return [Watched([next(flat) for _ in range(n)], steps, success) for n, steps, success in about]


def without_features(episodes: Sequence[Watched]) -> list[Watched]:
    """What the robot's side knows of them."""
    return [
        Watched([Decided(d.step, d.state, d.actions, d.origin, used=d.used) for d in e.decisions], e.steps, e.success)
        for e in episodes
    ]


class Clock:
    """An alarm after a fixed time: the longest that all but a share of successes take, by split conformal prediction.

    Args:
        episodes: What a monitor would be fitted to.
    """

    def __init__(self, episodes: Sequence[Watched]) -> None:
        steps = sorted(e.steps for e in episodes if e.success)
        self.limit = steps[min(math.ceil((len(steps) + 1) * (1 - ALPHA)), len(steps)) - 1]

    def __call__(self, episode: Watched) -> int | None:
        return self.limit if episode.steps > self.limit else None


def calls(monitor: Monitor | Clock, episodes: Sequence[Watched]) -> list[int | None]:
    """Step of each episode's alarm."""
    return [monitor(e) if isinstance(monitor, Clock) else alarm_step(monitor, e.decisions) for e in episodes]


def main() -> int:
    p = parser(__doc__)
    p.add_argument("--blocks", type=int, default=5, help="of 20 episodes, to fit and to judge each task (default: 5)")
    p.add_argument("--report", action="store_true", help="run nothing, judge the episodes that are there")
    p.add_argument("--out", type=Path, default=Path("outputs/monitor"), help="folder of finished blocks")
    args = p.parse_args()
    torch.set_num_threads(1)
    policy = load_policy(resolve_policy("shipped"), frozen=True)
    runs: dict[Cell, list[Watched]] = {}
    for cell, block in cells(args.blocks):
        if args.report and not (args.out / f"{cell[0]}-{cell[1]}-{block}.npz").exists():
            continue
        runs.setdefault(cell, []).extend(measured(policy, cell, block, args.out))
    checks, data = judge(runs, policy.spec.robot.dt)
    write("monitor", checks, data, seeds=[FIT, JUDGE])
    return 0


def judge(runs: dict[Cell, list[Watched]], dt: float) -> tuple[list[Check], dict[str, Any]]:
    """Checks, and every count behind them."""
    nominal = {task: [*runs[task, "fit"], *runs[task, "seen"]] for task in KNOWN}
    everything = [e for task in KNOWN for e in nominal[task]]
    rows: list[dict[str, Any]] = []
    for task in KNOWN:
        for fold in range(FOLDS):
            rest = [e for i, e in enumerate(nominal[task]) if i % FOLDS != fold]
            rows += counted(task, "seen", nominal[task][fold::FOLDS], rest, dt)
    for (task, what), episodes in runs.items():
        if what in CHANGES or task in UNKNOWN:
            rows += counted(task, what, episodes, nominal.get(task, everything), dt)
    checks: list[Check] = []
    names = {row["who"] for row in rows}
    for who in sorted(names, reverse=True):
        mine = [row for row in rows if row["who"] == who]
        false = rate([r for r in mine if r["condition"] == "seen" and r["task"] in KNOWN], "false", "successes")
        fresh = rate(
            [r for r in mine if r["condition"] == "seen" and r["task"] in KNOWN and r["task"] != TUNED_ON],
            "false",
            "successes",
        )
        early = rate([r for r in mine if r["task"] != TUNED_ON], "early", "failures")
        why = (
            "successes last one of a few numbers of steps, so that a limit lets more pass than asked; and so many "
            "starts leave some points open: more --blocks narrow it"
        )
        checks.append(Check(f"{who}: false alarms, nominal 5 %", false.value, interval=false))
        checks.append(Check(f"{who}: false alarms, tasks not tuned on", fresh.value, interval=fresh))
        if who != "clock":
            name = f"{who}: false alarms, tasks not tuned on, distance from nominal"
            checks.append(Check(name, abs(fresh.value - ALPHA), 0.02, "<=", why=why))
        why = "see the rows by condition: an alarm that comes, but less than 1 s before the end, does not count"
        name = f"{who}: failures called 1 s early, tasks not tuned on"
        checks.append(Check(name, early.value, None if who == "clock" else 0.8, ">=", early, why))
        changed = [r for r in mine if r["failures"] and (r["condition"] in CHANGES or r["task"] in UNKNOWN)]
        for task, what in sorted({(r["task"], r["condition"]) for r in changed}):
            here = [r for r in mine if (r["task"], r["condition"]) == (task, what)]
            called = rate(here, "early", "failures")
            checks.append(Check(f"{who}: {task}, {what}: called 1 s early", called.value, interval=called))
    shared = [
        (a["seconds_to_alarm"], b["seconds_to_alarm"])
        for a in rows
        for b in rows
        if (a["who"], b["who"]) == ("monitor", "clock") and (a["task"], a["condition"]) == (b["task"], b["condition"])
        if a["condition"] in CHANGES or a["task"] in UNKNOWN
    ]
    ahead = [b - a for a, b in shared if a is not None and b is not None]
    if ahead:
        checks.append(Check("monitor before the clock, median over conditions (s)", float(np.median(ahead))))
    return checks, {"alpha": ALPHA, "rows": rows, "starts": {task: len(e) for task, e in nominal.items()}}


def counted(
    task: str, what: str, episodes: Sequence[Watched], fitted_to: Sequence[Watched], dt: float
) -> list[dict[str, Any]]:
    """Alarms of the monitor, of what the robot's side knows of it, and of the clock."""
    monitor, rows = fit(fitted_to, dt, ALPHA), []
    for who, found in (
        ("monitor", calls(monitor, episodes)),
        ("monitor, on the robot", calls(monitor, without_features(episodes))),
        ("clock", calls(Clock(fitted_to), episodes)),
    ):
        won = [a is not None for e, a in zip(episodes, found, strict=True) if e.success]
        lost = [(a, e.steps) for e, a in zip(episodes, found, strict=True) if not e.success]
        early = [a is not None and (steps - a) * dt >= EARLY_S for a, steps in lost]
        seconds = [a * dt for a, _ in lost if a is not None]
        row = {"task": task, "condition": what, "who": who, "successes": len(won), "false": sum(won)}
        row |= {"failures": len(lost), "early": sum(early)}
        rows.append(row | {"seconds_to_alarm": float(np.median(seconds)) if seconds else None})
    return rows


def rate(rows: Sequence[dict[str, Any]], part: str, whole: str) -> Estimate:
    """A share of all rows together."""
    return success_interval(sum(r[part] for r in rows), sum(r[whole] for r in rows))


if __name__ == "__main__":
    sys.exit(main())

"""The generalist: one policy from pictures and sentences, on every task that it has learnt and on what it has not seen.

    python tools/reproduce/suite.py                      # all parts; hours of one core
    python tools/reproduce/suite.py --parts own          # what is reported is what these parts have

Starts that training never saw; those of a split are the matched arm's with one thing changed. Parts: ``own``, 50 starts
a row: orders and names that training never says, pairs of colour and thing that were never named together, things that
no training episode has; ``shifts``, 25: camera, light, texture, background, distractors, start pose, dynamics and
noise; ``pictures``, 25: less and more light, shadow and the like, drawn over the pictures alone; ``control``, 25:
another sentence than the one that counts; ``delay``, 25: four steps (400 ms) against none.
Otherwise asynchronous execution with one step (100 ms) of delay, under the virtual clock. A row that has been run is
kept in ``--out``, so the command goes on where it was stopped; so is one of the same policy in the published file.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from claims import claimed

import freshness
from results import RESULTS, Check, parser, write
from tasks import NAMING, TASKS
from vla_stack.data.layout import read_json, write_json
from vla_stack.evaluation.evaluate import OnEpisode
from vla_stack.evaluation.suite import SEEN, SUITES, Row, Terms, run_suite, splits_of, table
from vla_stack.policies.chunk_policy import load_policy
from vla_stack.policies.directory import resolve_policy
from vla_stack.rollout.engine import ChunkPolicy
from vla_stack.rollout.latency import Latency
from vla_stack.runtime.executor import ExecutorConfig
from vla_stack.statistics import paired_interval, success_interval

STARTS = {"own": 50, "shifts": 25, "pictures": 25, "control": 25, "delay": 25}  # of a row of each part
SEED, DELAY, LATE = 40_000, 1, 4  # steps
MODES = ("naive", "rtc", "prefix")  # of executing late chunks, the last one where the policy was trained for it
MEAN, LEAST, UNSEEN_OBJECTS, WORDS, KEPT, KEPT_LATE, CHANCE = 0.85, 0.60, 0.60, -0.05, 0.9, 0.8, 0.25
WHY = "where one of many kinds is named, most episodes that fail go to another thing: kinds are still confused"
NARROW = "a slot 3 mm wider than the tile on each side"
BLIND = "four steps of ten a second: what lies ahead of its picture it has to guess"
WHYS = {
    "texture": "every third round of its scenes has other textures: the slot, the drawer and the cubes suffer most",
    "unseen-names": "a sentence encoder knows most of these words, and tells kinds of things less well than shelves",
    "unseen-orders": "verbs that training never says, where one of many kinds is named",
}


@contextmanager
def silent(title: str) -> Iterator[OnEpisode]:
    yield lambda _: None


def run(policy: ChunkPolicy, task: str, part: str, out: Path) -> list[Row]:
    """Rows of a part, of one task; those of ``seen`` with the part ``own``."""
    env, step = f"sim/{task}-v0", 1 / policy.spec.robot.rate_hz

    def rows(folder: str, *names: str, delay: int = DELAY, mode: str = "naive", **terms: Any) -> list[Row]:
        fixed = Terms(STARTS[part], SEED, ExecutorConfig(mode=mode), Latency(delay * step), **terms)
        splits = {env: splits_of(env, names, own=part == "own")}
        return run_suite(policy, splits, fixed, out / folder, silent)

    if part == "own":
        return rows("", SEEN)
    if part == "shifts":
        return rows("shifts", *SUITES["shifts"])[1:]
    if part == "pictures":  # but for those that are among the shifts
        return [row for row in rows("shifts", *SUITES["pictures"]) if row.split not in SUITES["shifts"]]
    if part == "control":
        if task not in NAMING:
            return []
        (control,), (seen,) = rows("control", SEEN, instruct="swap"), rows("shifts", SEEN)
        return [Row(env, "wrong instruction", control.success, seen.success)]
    (prompt,), late = rows("delay-0", SEEN, delay=0), f"{LATE * step * 1000:.0f} ms"
    modes = MODES if policy.spec.d_train_max >= LATE else MODES[:-1]
    found = {mode: rows(f"delay-{LATE}-{mode}", SEEN, delay=LATE, mode=mode)[0] for mode in modes}
    return [Row(env, f"{late}, {mode}", row.success, prompt.success) for mode, row in found.items()]


def checks(parts: dict[str, list[Row]]) -> list[Check]:
    """What the parts that were run say; the mean over tasks, and each row."""
    found = []
    for part, rows in parts.items():
        if seen := [row.rates[0].value for row in rows if row.split == SEEN]:
            found += [
                Check("seen: mean success over the tasks", float(np.mean(seen)), MEAN, why=WHY),
                Check("seen: lowest success of a task", min(seen), LEAST, why=NARROW),
            ]
        for split in dict.fromkeys(row.split for row in rows if row.split != SEEN):
            of = [row for row in rows if row.split == split]
            success, matched = ([x for row in of for x in getattr(row, arm)] for arm in ("success", "matched"))
            rate, kept = success_interval(sum(success), len(success)), sum(success) / max(1, sum(matched))
            bound = {"unseen-objects": UNSEEN_OBJECTS, "wrong instruction": CHANCE}.get(split)
            sense = "<=" if part == "control" else ">="
            why = WHYS.get(split, WHY)
            found.append(Check(f"{split}: success, {len(of)} tasks", rate.value, bound, sense, rate, why))
            change = paired_interval(matched, success)
            bound = WORDS if split in ("unseen-orders", "unseen-names") else None
            found.append(Check(f"{split}: minus the matched starts", change.value, bound, ">=", change, why))
            if part in ("shifts", "pictures"):
                found.append(
                    Check(f"{split}: success over that of the matched starts", kept, KEPT, why=WHYS.get(split, ""))
                )
            elif part == "delay":
                found.append(Check(f"{split}: success over that without delay", kept))
    if late := [c.value for c in found if c.name.endswith("over that without delay")]:
        name = "late by 400 ms, best mode: success over that without delay"
        found.append(Check(name, max(late), KEPT_LATE, why=BLIND))
    rows = [row for part in parts.values() for row in part]
    return found + [Check(f"{r.env}, {r.split}", r.rates[0].value, interval=r.rates[0]) for r in rows]


def adopt(out: Path) -> None:
    """Lay what the published file has among the rows that are kept; whether they are of this policy is looked at there.

    They are stored as digits, so that an outcome does not take a line.
    """
    path = RESULTS / "suite.json"
    runs = {} if os.environ.get(freshness.ANEW) or not path.exists() else read_json(path)["data"].get("runs", {})
    with claimed(out / "locks" / "adopt", wait=True):
        for name, run in runs.items():
            if not (out / name).exists():
                write_json(out / name, {"of": run["of"], "success": [digit == "1" for digit in run["success"]]})


def kept(out: Path) -> dict[str, Any]:
    """What :func:`adopt` takes: every row that was run, file by file."""
    files = {path.relative_to(out).as_posix(): read_json(path) for path in sorted(out.rglob("*.json"))}
    return {name: {**run, "success": "".join(str(int(x)) for x in run["success"])} for name, run in files.items()}


def main() -> int:
    p = parser(__doc__)
    p.add_argument("--policy", default="generalist", help="the policy (generalist)")
    p.add_argument("--tasks", nargs="+", default=TASKS, choices=TASKS, help="these alone; prints, and writes nothing")
    p.add_argument("--parts", nargs="+", default=list(STARTS), choices=STARTS)
    p.add_argument("--out", type=Path, default=Path("outputs/suite"), help="folder of finished rows")
    args = p.parse_args()
    torch.set_num_threads(1)
    policy = load_policy(resolve_policy(args.policy))
    adopt(args.out)
    parts: dict[str, list[Row]] = {part: [] for part in args.parts}
    for part, rows in parts.items():
        for task in args.tasks:
            rows += run(policy, task, part, args.out)
            if rows:
                print(table(rows), flush=True)
    if tuple(args.tasks) == TASKS:
        write("suite", checks(parts), {"runs": kept(args.out)}, seeds=[SEED])
    return 0


if __name__ == "__main__":
    sys.exit(main())

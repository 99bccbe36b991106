"""The generalist: one policy from pictures and sentences, on every task that it has learnt and on what it has not seen.

    python tools/reproduce/suite.py

50 starts a row that training never saw; those of a split are the matched arm's with one thing changed: other words,
pairs of colour and thing that were never named together, things that no training episode has. Asynchronous execution
with one step (100 ms) of delay under the virtual clock. A row that has been run is kept in ``--out``, so the command
goes on where it was stopped.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from results import Check, parser, write
from vla_stack.evaluation.evaluate import OnEpisode
from vla_stack.evaluation.suite import SEEN, Row, Terms, run_suite, splits_of, table
from vla_stack.policies.chunk_policy import load_policy
from vla_stack.policies.directory import resolve_policy
from vla_stack.rollout.latency import Latency
from vla_stack.runtime.executor import ExecutorConfig
from vla_stack.statistics import success_interval

TASKS = (
    *("pick", "place", "obstacle", "push", "stack", "drawer"),
    *("pick_any", "place_relation", "press", "shelf", "slot", "sort_one"),
)
EPISODES, SEED, DELAY = 50, 40_000, 1
MEAN, LEAST, UNSEEN_OBJECTS, WORDS = 0.85, 0.60, 0.60, -0.05
NAMES = "where one of many kinds is named, most episodes that fail go to another thing: kinds are still confused"
NARROW = "a slot 3 mm wider than the tile on each side: it is let go beside it"
PHRASES = "the split has names of things that training never says, which words learnt from nothing cannot know"


@contextmanager
def silent(title: str) -> Iterator[OnEpisode]:
    yield lambda _: None


def checks(rows: list[Row]) -> list[Check]:
    seen = [row for row in rows if row.split == SEEN]
    rates = [row.rates[0] for row in seen]
    found = [
        Check("seen: mean success over the tasks", float(np.mean([r.value for r in rates])), MEAN, why=NAMES),
        Check("seen: lowest success of a task", min(r.value for r in rates), LEAST, why=NARROW),
    ]
    for split in sorted({row.split for row in rows} - {SEEN}):
        part = [row for row in rows if row.split == split]
        outcomes = [x for row in part for x in row.success]
        pooled = success_interval(sum(outcomes), len(outcomes))
        bound = UNSEEN_OBJECTS if split == "unseen-objects" else None
        found.append(Check(f"{split}: success, {len(part)} tasks", pooled.value, bound, interval=pooled, why=NAMES))
        difference = float(np.mean([row.difference.value for row in part]))
        bound = WORDS if split == "unseen-words" else None
        found.append(Check(f"{split}: mean difference to the matched starts", difference, bound, why=PHRASES))
    found += [Check(f"{r.env}, {r.split}", r.rates[0].value, interval=r.rates[0]) for r in rows]
    return found


def main() -> int:
    p = parser(__doc__)
    p.add_argument("--policy", default="generalist", help="the policy (generalist)")
    p.add_argument("--tasks", nargs="+", default=TASKS, choices=TASKS)
    p.add_argument("--episodes", type=int, default=EPISODES)
    p.add_argument("--seen", action="store_true", help="only what is like training; prints, and writes nothing")
    p.add_argument("--out", type=Path, default=Path("outputs/suite"), help="folder of finished rows")
    args = p.parse_args()
    torch.set_num_threads(1)
    policy = load_policy(resolve_policy(args.policy))
    delay = Latency(DELAY / policy.spec.robot.rate_hz)
    terms = Terms(args.episodes, SEED, ExecutorConfig(mode="naive"), delay)
    rows: list[Row] = []
    for task in args.tasks:
        splits = splits_of(f"sim/{task}-v0", [SEEN], own=not args.seen)
        rows += run_suite(policy, {f"sim/{task}-v0": splits}, terms, args.out, silent)
        print(table(rows).splitlines()[-1] if args.seen else table(rows), flush=True)
    if not args.seen:
        write("suite", checks(rows), {"rows": [row.to_json() for row in rows]}, seeds=[SEED])
    return 0


if __name__ == "__main__":
    sys.exit(main())

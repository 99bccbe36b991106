"""Do the experts do the long tasks, those of memory, the one with slips and jams, and push; how long are they?

Of the jams, how many an expert gets out of that backs out, and one that can only advance. A control step with two 64 px
cameras is compared with that of picking a cube, in turns in the same process.

    python tools/bench/long_tasks.py [--episodes 100]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from short_tasks import BASELINE, SEED, cost

import sim
from sim import registry
from sim.tasks import jam
from vla_stack.statistics import wilson

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from results import Check, parser, write

LONG = ("open_put_close", "regrasp_insert", "set_table", "sort")
MEMORY = ("covers", "repeat")
COST = 1.4  # control steps of picking: what is 2.8 ms there stays under 4 ms
TASKS = (*LONG, *MEMORY, "jam", "push")


def lengths(task: str, episodes: int, **options: Any) -> tuple[list[int], list[int]]:
    """Control steps of the episodes in which the expert succeeds, and of those in which it fails."""
    env = gym.make(registry.task_id(task), cameras=(), **options)
    steps: tuple[list[int], list[int]] = ([], [])
    for k in range(episodes):
        env.reset(seed=SEED + k)
        expert, n, done = sim.make_expert(env), 0, False
        while not done:
            _, _, terminated, truncated, info = env.step(expert.act())
            n, done = n + 1, terminated or truncated
        steps[not info["is_success"]].append(n)
    return steps


def jammed(episodes: int, retreats: bool) -> tuple[int, int]:
    """Of the first jam of each episode without slips: how many there were, and how many of the cubes were seated."""
    env = gym.make(registry.task_id("jam"), cameras=(), slips=0.0, retreats=retreats)
    task: Any = env.unwrapped
    jams = solved = 0
    for k in range(episodes):
        env.reset(seed=SEED + k)
        expert, colour, done = sim.make_expert(env), "", False
        while not done and not (colour and task.seated(colour)):
            _, _, terminated, truncated, _ = env.step(expert.act())
            done = terminated or truncated
            colour = colour or next((c for c in jam.COLOURS if task.jammed(c)), "")
        jams += bool(colour)
        solved += bool(colour) and task.seated(colour)
    return jams, solved


def main() -> int:
    p = parser(__doc__)
    p.add_argument("--episodes", type=int, default=100, help="of each task")
    p.add_argument("--out", type=Path)
    args = p.parse_args()
    checks, steps = [], {}
    for task in TASKS:
        won, _ = lengths(task, args.episodes)
        interval = wilson(len(won), args.episodes)
        checks.append(Check(f"{task}: expert", len(won) / args.episodes, 0.98, ">=", interval))
        steps[task] = [int(np.percentile(won, q)) for q in (0, 50, 100)]
    for retreats, bound, sign in ((True, 0.95, ">="), (False, 0.5, "<=")):
        jams, solved = jammed(args.episodes, retreats)
        name = f"jam: solved by an expert that {'backs out' if retreats else 'only advances'}"
        checks.append(Check(name, solved / jams, bound, sign, wilson(solved, jams)))
    times = cost(list(TASKS))
    for task in TASKS:
        ratio = times[task][0] / times[BASELINE][0]
        why = "" if ratio <= COST else "six things of the library, each of several parts, and two trays are drawn twice"
        checks.append(Check(f"{task}: control step, times that of {BASELINE}", ratio, COST, "<=", why=why))
    data = {"episodes": args.episodes, "steps of the expert: least, median, most": steps, "ms": times}
    write("long_tasks", checks, data, [SEED], args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())

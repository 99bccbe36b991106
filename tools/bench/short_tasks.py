"""Do the experts do the tasks among things of the library, in every split, and what does a scene of things cost?

Every thing is picked up from several starts, every task done with seen and with unseen things. A control step and a
reset with two 64 px cameras are compared with those of picking a cube, in turns in the same process.

    python tools/bench/short_tasks.py [--episodes 100] [--starts 20]
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

import sim
from sim import library, registry
from sim.arm import CAMERAS
from sim.tabletop import Tabletop
from vla_stack import registry as names
from vla_stack.statistics import wilson

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from results import ROOT, Check, parser, write

SEED = 5000
BASELINE = "pick"
STEPS, ROUNDS = 12, 10  # control steps of an episode that are timed; episodes a task, in turns
SPLITS = ("seen", "unseen-objects")


def short_tasks() -> list[str]:
    """Tasks of the library with a time limit of at most ten seconds."""
    found = [n for n in sim.TASKS if issubclass(names.TASKS.get(n), Tabletop)]
    return [n for n in found if sim.TASKS[n].max_episode_steps <= 100]


def expert_succeeds(env: gym.Env, seed: int, options: dict[str, Any] | None = None) -> bool:
    env.reset(seed=seed, options=options)
    expert = sim.make_expert(env)
    while True:
        _, _, terminated, truncated, info = env.step(expert.act())
        if terminated or truncated:
            return bool(info["is_success"])


def lifted(starts: int) -> dict[str, int]:
    """Of ``starts`` episodes, how many times each thing was picked up."""
    envs = {split: gym.make(registry.task_id("pick_any"), cameras=(), split=split) for split in SPLITS}
    return {
        kind: sum(
            expert_succeeds(envs[SPLITS[library.KINDS[kind].held_out]], SEED + k, {"variant": {"object": kind}})
            for k in range(starts)
        )
        for kind in library.KINDS
    }


def cost(tasks: list[str]) -> dict[str, tuple[float, float]]:
    """CPU milliseconds of a control step and of a reset, each the median of episodes in turns."""
    envs = {task: gym.make(registry.task_id(task), cameras=CAMERAS).unwrapped for task in (BASELINE, *tasks)}
    taken: dict[str, list[tuple[float, float]]] = {task: [] for task in envs}
    for k in range(ROUNDS + 1):
        for task, env in envs.items():
            begun = time.process_time()
            env.reset(seed=SEED + k)
            reset = time.process_time() - begun
            expert, steps = sim.make_expert(env), 0.0
            for _ in range(STEPS):
                action = expert.act()
                begun = time.process_time()
                env.step(action)
                steps += time.process_time() - begun
            taken[task].append((1e3 * steps / STEPS, 1e3 * reset))
    medians = {task: np.median(rows[1:], axis=0) for task, rows in taken.items()}  # the first opens the GL context
    return {task: (float(step), float(reset)) for task, (step, reset) in medians.items()}


def main() -> int:
    p = parser(__doc__)
    p.add_argument("--episodes", type=int, default=100, help="of each task and split")
    p.add_argument("--starts", type=int, default=20, help="of each thing")
    p.add_argument("--out", type=Path)
    args = p.parse_args()
    tasks, checks = short_tasks(), []
    things = lifted(args.starts)
    done, n = sum(things.values()), args.starts * len(things)
    checks.append(Check("things picked up by the expert", done / n, 0.98, ">=", wilson(done, n)))
    data: dict[str, Any] = {"lifted": things, "starts": args.starts, "successes": {}}
    for task in tasks:
        for split, bound in zip(SPLITS, (0.98, 0.95), strict=True):
            env = gym.make(registry.task_id(task), cameras=(), split=split)
            done = sum(expert_succeeds(env, SEED + k) for k in range(args.episodes))
            data["successes"][f"{task}, {split}"] = done
            interval = wilson(done, args.episodes)
            checks.append(Check(f"{task}: expert, {split}", done / args.episodes, bound, ">=", interval))
    times = cost(tasks)
    step, reset = times[BASELINE]
    data |= {"ms": times, "episodes": args.episodes}
    for task in tasks:
        checks.append(Check(f"{task}: control step, times that of {BASELINE}", times[task][0] / step, 1.3, "<="))
    slowest = max(times[task][1] for task in tasks)
    checks.append(Check(f"reset, milliseconds more than that of {BASELINE}", slowest - reset, 10.0, "<="))
    write("short_tasks", checks, data, [SEED], args.out, inputs=[ROOT / "sim" / "tasks"])
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Tasks that need a memory, with a history and without, from pictures and sentences.

    python tools/reproduce/memory.py                              # hours of one core; resumes
    python tools/reproduce/memory.py --tasks covers --seeds 0     # the most informative cells alone
    python tools/reproduce/memory.py --smoke                      # the same code, tiny, nothing written

``covers``: which of two covers came down over the named cube? ``repeat``: which of three buttons was lit at first? What
tells is out of sight long before the choice, and a wrong choice ends the episode. Both arms see the same
demonstrations and the same starts, for equally many steps; one is shown the first observation of the episode beside
the present one (``policy.options.history=1``). Both begin with one policy, whose encoders of pictures and words were
taught what is where in scenes of the task that are only reset (``tools/ground.py``): what demonstrations alone teach
about the first picture is right half of the time. A latency is that of a chunk on one thread over the other arm's, in
turns.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import labels
import numpy as np
import torch
from claims import Cell, adopt, cell_file, published, run_cells, same_settings

from ground import widened
from results import ROOT, Check, parser, write
from vla_stack import envs
from vla_stack.envs.making import observe
from vla_stack.history import History
from vla_stack.policies.chunk_policy import load_policy
from vla_stack.policies.directory import resolve_policy, write_manifest
from vla_stack.policies.reading import read_config, read_processors
from vla_stack.schema import Observation
from vla_stack.statistics import seeds_interval

HORIZON = 12
ARMS = {"present": 0, "history": 1}
TASKS = ("covers", "repeat")
WITHOUT, WITH, SLOWER = 0.55, 0.9, 1.3
POINTERS = 2  # a camera's, for the first and the last of the places that a scene is about
TIMED = 60  # chunks of each policy
CHANCE = "the choice is not learnt: as many are right without the first observation"


@dataclass(frozen=True)
class Settings(labels.Settings):
    """Size of the experiment; ``minutes`` of grounding."""

    demos: int = 600
    steps: int = 2000
    episodes: int = 100
    minutes: float = 12.0


SMOKE = Settings(demos=4, steps=2, episodes=2, minutes=0.05)


def start(task: str, arm: str, settings: Settings, out: Path) -> Path:
    """The policy that an arm begins with: the shipped one with words of the task, and encoders that know its scenes."""
    begin = out / "starts" / task
    if not begin.exists():
        renewed, partial, tools = begin.with_suffix(".new"), begin.with_suffix(".partial"), ROOT / "tools"
        demos = labels.demonstrations(task, settings, out)
        commands: list[list[Any]] = [
            [tools / "renew.py", "shipped", renewed, demos],
            [tools / "ground.py", renewed, partial, "--tasks", task, "--pointers", POINTERS]
            + ["--minutes", settings.minutes, "--later", 0.0],
        ]
        for command in commands:
            subprocess.run([sys.executable, *map(str, command)], check=True)
        partial.rename(begin)
    if not ARMS[arm]:
        return begin
    remembering = out / "starts" / f"{task}-{arm}"
    config = read_config(begin, "cpu")
    torch.manual_seed(0)
    policy = widened(begin, config, history=ARMS[arm])
    for part in (policy, *read_processors(begin, config, "cpu")):
        part.save_pretrained(remembering)
    write_manifest(remembering)
    return remembering


def run(cell: Cell, settings: Settings, out: Path, timed: int) -> dict[str, Any]:
    """Train a cell and roll it out; beside a policy without history that is there, how much slower it is."""
    record = labels.run(cell, HORIZON, settings, out, start=start(cell.task, cell.arm, settings, out))
    other = Cell(cell.task, "present", cell.seed)
    if cell.arm == "history" and cell_file(other, out).exists():
        record["latency"] = latency(out / "runs" / cell.name, out / "runs" / other.name, cell.task, timed)
    return record


def latency(run: Path, other: Path, task: str, timed: int) -> float:
    """Median time of a chunk of one policy over that of another, as they are served, in turns.

    Each chunk is of new pictures: a policy with a history keeps what it made of those that it has seen.
    """
    policies = [load_policy(resolve_policy(str(folder)), frozen=True) for folder in (run, other)]
    shown = [second_observations(policy.spec, task) for policy in policies]
    times: list[list[float]] = [[], []]
    for i in range(timed):
        for policy, observation, took in zip(policies, shown, times, strict=True):
            new = replace(observation, images={k: (v + i).astype(v.dtype) for k, v in observation.images.items()})
            begin = time.perf_counter()
            policy.infer([new], [i])
            took.append(time.perf_counter() - begin)
    first, second = (float(np.median(took[timed // 5 :])) for took in times)
    return first / second


def second_observations(spec: Any, task: str) -> Observation:
    """What a policy is shown when it is asked for the second time."""
    env = envs.make(f"sim/{task}-v0", 1, spec)
    try:
        history = History(spec.history)
        (step,) = env.reset([0], [0])
        for k in (0, labels.EXECUTE):
            shown = history.beside(observe(step.observation, spec.robot, step.info["task"], k))
        return shown
    finally:
        env.close()


def report(records: list[dict[str, Any]]) -> list[Check]:
    """Success of both arms and what lies between them, over the seeds that both have."""
    by: dict[str, dict[str, dict[int, dict[str, Any]]]] = defaultdict(lambda: defaultdict(dict))
    for r in records:
        by[r["task"]][r["arm"]][r["seed"]] = r
    checks = []
    for task, arms in sorted(by.items()):
        seeds = sorted(set.intersection(*(set(arms[arm]) for arm in ARMS)))
        if not seeds:
            continue
        where = f"{task}, {len(seeds)} seed{'s' * (len(seeds) > 1)}"
        present, history = (np.array([arms[arm][s]["outcomes"] for s in seeds]) for arm in ARMS)
        for name, found, bound, sense, why in (
            ("without history", present, WITHOUT, "<=", "something tells what was shown"),
            ("with the first observation", history, WITH, ">=", CHANCE),
        ):
            rate = float(found.mean())
            checks.append(Check(f"{where}: success {name}", rate, bound, sense, seeds_interval(found), why))
        gain = seeds_interval(history, present)
        checks.append(Check(f"{where}: with minus without", gain.value, interval=gain))
        if slower := [arms["history"][s]["latency"] for s in seeds if "latency" in arms["history"][s]]:
            checks.append(Check(f"{where}: time of a chunk, with over without", float(np.median(slower)), SLOWER, "<="))
    return checks


def main() -> int:
    p = parser(__doc__)
    p.add_argument("--out", type=Path, default=Path("outputs/memory"), help="folder of demonstrations and cells")
    p.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    p.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    p.add_argument("--report", action="store_true", help="write what is there, run nothing")
    p.add_argument("--smoke", action="store_true", help="the same code, tiny, nothing written")
    args = p.parse_args()
    torch.set_num_threads(1)
    settings = SMOKE if args.smoke else Settings()
    same_settings(args.out, asdict(settings))
    adopt("memory", args.out, asdict(settings))
    todo = [Cell(task, arm, seed) for seed in args.seeds for task in args.tasks for arm in ARMS]
    timed = 5 if args.smoke else TIMED
    records = run_cells([] if args.report else todo, lambda cell: run(cell, settings, args.out, timed), args.out)
    checks = report(records)
    if not args.smoke:
        write("memory", checks, published(asdict(settings), records), seeds=sorted({r["seed"] for r in records}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

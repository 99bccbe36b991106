"""Chunk labels branched from the clean expert at every perturbed state, against the series of clean labels.

    python tools/reproduce/labels.py --out outputs/labels
    python tools/reproduce/labels.py --out outputs/labels --seeds 0 --tasks place    # the most informative cells alone

One dataset a task, collected with noise; both arms see the same frames, of which ``series`` reads the actions that
follow, each the answer to noise that came in between (``data.branched=false``), and ``branched`` the frame's own chunk
label. Equal steps, equal starts, equal noise of the policy. On ``-poses`` the policy is given the objects' poses and
has no cameras: a cheaper, extra arm. Cells that are done are kept; what is there is reported, however many seeds.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from claims import Cell, adopt, claimed, published, run_cells, same_settings

from results import Check, parser, write
from vla_stack.statistics import seeds_interval

ARMS = ("branched", "series")
HORIZONS = (6, 16)
EXECUTE = 5
TASKS = ("stack-poses", "place-poses", "place", "stack", "obstacle")
START = 40_000  # seed of the first of the starts
ENCODERS_LR = 0.1  # of what a policy to start from sees and reads by, of the others' learning rate


@dataclass(frozen=True)
class Settings:
    """Size of the experiment; ``steps`` of pictures and of poses.

    From pictures 1500 steps are too few to tell: horizon 6, one seed, branched and series did place in 6 and 42 % of
    200 starts, stack in 6 and 5, obstacle in 16 and 18. Most episodes that failed had not reached the cube yet.
    """

    demos: int = 600
    noise: float = 0.3
    steps: int = 5000
    steps_poses: int = 500
    episodes: int = 200


SMOKE = Settings(demos=4, steps=2, steps_poses=2, episodes=2)


def cells(tasks: list[str], seeds: list[int]) -> list[tuple[Cell, int]]:
    """Cells and their horizons, the most informative first: both arms of a task and horizon side by side."""
    return [
        (Cell(task, f"{arm}-{horizon}", seed), horizon)
        for seed in seeds
        for horizon in HORIZONS
        for task in tasks
        for arm in ARMS
    ]


def demonstrations(task: str, settings: Settings, out: Path) -> Path:
    """Of one of the tasks here; those that are there already are kept."""
    from vla_stack.rollout.collect import CollectConfig, collect

    name, poses = task.removesuffix("-poses"), task.endswith("-poses")
    root = out / "demos" / task
    with claimed(root.with_suffix(".lock"), wait=True):
        config = CollectConfig(name, noise=settings.noise, branch=max(HORIZONS), privileged=poses)
        collect(config, root, settings.demos, workers=1)
    return root


def run(
    cell: Cell,
    horizon: int,
    settings: Settings,
    out: Path,
    options: dict[str, Any] | None = None,
    start: Path | None = None,
) -> dict[str, Any]:
    """Train a cell, the policy with further ``options``, and roll it out: its outcomes, the CPU time of training.

    From the policy in ``start``, if there is one, whose encoders then learn slower.
    """
    from vla_stack.evaluation.evaluate import evaluate
    from vla_stack.methods.imitation.recipe import Imitation
    from vla_stack.policies.chunk_policy import load_policy
    from vla_stack.runtime.executor import ExecutorConfig
    from vla_stack.training.optimizer_recipe import OptimizerRecipe
    from vla_stack.training.recipe import DataRecipe, PolicyRecipe, Recipe
    from vla_stack.training.train import train

    task, poses = cell.task.removesuffix("-poses"), cell.task.endswith("-poses")
    root, run_dir = demonstrations(cell.task, settings, out), out / "runs" / cell.name
    sizes: dict[str, Any] = {"depth": 3, "width": 64, "expert_width": 96, "heads": 4, "head_dim": 16} if poses else {}
    steps = settings.steps_poses if poses else settings.steps
    recipe = Recipe(
        name=cell.name,
        policy=PolicyRecipe(
            "vla",
            str(start or ""),
            options={"chunk_size": horizon, "n_action_steps": EXECUTE, **sizes, **(options or {})},
        ),
        data=DataRecipe(
            root=(str(root),), opening_frames=2, opening_weight=5.0, branched=not cell.arm.startswith("series")
        ),
        method=Imitation(
            optimizer=OptimizerRecipe(
                lr=2e-3,
                betas=(0.9, 0.99),
                warmup_steps=50,
                final_lr_ratio=0.01,
                backbone_lr_scale=ENCODERS_LR if start else 1.0,
            ),
            steps=steps,
            ema=0.99,
            log_every=max(1, steps // 10),
            save_every=max(1, steps // 4),
        ),
        seed=cell.seed,
        device="cpu",
        threads=1,
    )
    begun = time.process_time()
    policy = train(recipe, recipe.method.loss(), run_dir) / "pretrained_model"
    spent = time.process_time() - begun
    result = evaluate(
        load_policy(policy),
        f"sim/{task}-v0",
        settings.episodes,
        START,
        ExecutorConfig(mode="sync", execute=EXECUTE),
        env_options={"privileged": True} if poses else None,
    )
    return {**asdict(cell), "horizon": horizon, "cpu_s": spent, "outcomes": [int(o) for o in result.outcomes]}


def report(records: list[dict[str, Any]]) -> list[Check]:
    """Success of both arms and what lies between them, over the seeds that both have."""
    outcomes: dict[tuple[str, int], dict[str, dict[int, list[int]]]] = defaultdict(lambda: defaultdict(dict))
    for r in records:
        outcomes[r["task"], r["horizon"]][r["arm"].split("-")[0]][r["seed"]] = r["outcomes"]
    checks = []
    for (task, horizon), arms in sorted(outcomes.items()):
        seeds = sorted(set(arms["branched"]) & set(arms["series"]))
        if not seeds:
            continue
        branched, series = (np.array([arms[arm][s] for s in seeds]) for arm in ARMS)
        where = f"{task}, h={horizon}, {len(seeds)} seed{'s' * (len(seeds) > 1)}"
        checks.append(Check(f"{where}: success, branched", float(branched.mean()), interval=seeds_interval(branched)))
        checks.append(Check(f"{where}: success, series", float(series.mean()), interval=seeds_interval(series)))
        gain = seeds_interval(branched, series)
        why = "" if gain.value > 0 else "branched labels are not ahead here"
        checks.append(Check(f"{where}: branched minus series", gain.value, 0.0, ">", gain, why))
    return checks


def main() -> int:
    p = parser(__doc__)
    p.add_argument("--out", type=Path, default=Path("outputs/labels"), help="folder of demonstrations and cells")
    p.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    p.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    p.add_argument("--report", action="store_true", help="write what is there, run nothing")
    p.add_argument("--smoke", action="store_true", help="the same code, tiny, nothing written")
    args = p.parse_args()
    settings = SMOKE if args.smoke else Settings()
    same_settings(args.out, asdict(settings))
    adopt("labels", args.out, asdict(settings))
    horizons = {} if args.report else dict(cells(args.tasks, args.seeds))
    records = run_cells(horizons, lambda cell: run(cell, horizons[cell], settings, args.out), args.out)
    checks = report(records)
    if not args.smoke:
        seeds = sorted({r["seed"] for r in records})
        write("labels", checks, {"execute": EXECUTE, **published(asdict(settings), records)}, seeds=seeds)
    return 0


if __name__ == "__main__":
    sys.exit(main())

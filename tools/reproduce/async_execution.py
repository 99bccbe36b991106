"""Success against latency for every way of executing chunks, from pictures and sentences.

    python tools/reproduce/async_execution.py                          # all of it is hours of one core; resumes
    python tools/reproduce/async_execution.py --modes sync naive rtc prefix --seeds 0       # those of one training seed
    python tools/reproduce/async_execution.py --jobs 2                 # two processes share the cells
    python tools/reproduce/async_execution.py --report                 # of the cells that there are
    python tools/reproduce/async_execution.py --smoke                  # the same code, tiny, nothing written

Policies learn ``conveyor``, where cubes move, and ``pick``, where they wait, from the same demonstrations in equally
many steps: a plain one, and two that were given action prefixes in training, one with full attention among actions and
one with the Λ-mask. They begin with the generalist, whose encoders know cubes and their names. Then all modes run on
the same starts under the virtual clock, at delays of 0 to 600 ms, constant, gamma distributed and with spikes of a
second, and with other numbers of executed steps. Intervals are over training seeds and starts. Cells that are done are
not done again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from vla_stack.evaluation.evaluate import evaluate
from vla_stack.methods.imitation.recipe import Imitation
from vla_stack.policies.chunk_policy import load_policy
from vla_stack.rollout.collect import CollectConfig, collect
from vla_stack.rollout.latency import Latency
from vla_stack.runtime.executor import ExecutorConfig
from vla_stack.training.optimizer_recipe import OptimizerRecipe
from vla_stack.training.recipe import DataRecipe, PolicyRecipe, Recipe
from vla_stack.training.train import train

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from claims import Cell, adopt, claimed, published, run_cells, same_settings, together

from results import parser

NAME = "async_execution"
TASKS = {"conveyor": "dynamic", "pick": "quasi-static"}
START_WITH, NOISE = "generalist", 0.6  # its own noise is smaller
# At 10 Hz a delay of 100 ms is a control step. Six steps that are late and six that are executed are a whole chunk.
HORIZON, EXECUTE, MAX_DELAY, IMAGE_SIZE = 12, 6, 6, 128
LATENCIES = tuple(Latency(ms / 1000) for ms in (0, 100, 200, 300, 400, 600))
CLAIMED = (Latency(0.2), Latency(0.4))
EXECUTES = (4, EXECUTE, 8)  # with a delay of 400 ms no more than eight can be had
POLICIES: dict[str, dict[str, Any]] = {
    "plain": {"max_delay": 0},
    "prefix": {"max_delay": MAX_DELAY},
    "lambda": {"max_delay": MAX_DELAY, "prefix_attention": "lambda"},
}
MAIN = (("plain", "sync"), ("plain", "naive"), ("plain", "rtc"), ("prefix", "prefix"), ("prefix", "naive"))
LAMBDA = (("lambda", "prefix"), ("lambda", "naive"))
OTHERS = (("plain", "ensemble"), ("plain", "rtc_identity"), ("plain", "future_state"), ("plain", "bid"))
MODES = sorted({mode for _, mode in MAIN + LAMBDA + OTHERS})
FIRST_START = 700_000


@dataclass(frozen=True)
class Settings:
    """How much of everything; the defaults are the experiment that is reported."""

    demos: int = 300
    noise: float = 0.3
    steps: int = 800
    starts: int = 60


SMOKE = Settings(demos=3, steps=2, starts=2)


@dataclass(frozen=True)
class Way:
    """A way of executing the chunks of a policy."""

    policy: str
    mode: str
    latency: Latency
    execute: int = EXECUTE

    @property
    def arm(self) -> str:
        return f"{self.policy}-{self.mode}-{str(self.latency).replace(' ', '')}-{self.execute}"


def ways() -> dict[str, Way]:
    """Every one once, by its name as an arm, those that the claims need first."""

    def grid(pairs: Any, latencies: Any, executes: Any = (EXECUTE,)) -> Iterator[Way]:
        for latency, execute, (policy, mode) in product(latencies, executes, pairs):
            yield Way(policy, mode, latency, execute)

    rest = [latency for latency in LATENCIES if latency not in CLAIMED]
    late = [latency for latency in LATENCIES if latency.mean_s]
    order = (
        grid(MAIN, CLAIMED),
        grid(MAIN, rest),
        grid(LAMBDA + OTHERS, CLAIMED),
        grid(MAIN, [replace(latency, jitter="gamma") for latency in late]),
        grid(MAIN, CLAIMED, EXECUTES),
        grid(LAMBDA + OTHERS, rest),
        grid(MAIN, [replace(latency, jitter="spikes") for latency in late]),
        grid(LAMBDA + OTHERS, [replace(latency, jitter=j) for j in ("gamma", "spikes") for latency in late]),
        grid(OTHERS, CLAIMED, EXECUTES),
    )
    return {way.arm: way for group in order for way in group}


def cells(seeds: list[int], modes: list[str], tasks: list[str]) -> list[Cell]:
    """The most informative first: all tasks and training seeds of a way side by side."""
    chosen = [arm for arm, way in ways().items() if way.mode in modes]
    return [Cell(task, arm, seed) for arm in chosen for seed in seeds for task in tasks]


def demonstrations(settings: Settings, out: Path) -> list[Path]:
    """Datasets of both tasks; made where they are missing."""
    roots = [out / "demos" / task for task in TASKS]
    for task, root in zip(TASKS, roots, strict=True):
        with claimed(root.with_suffix(".lock"), wait=True):
            config = CollectConfig(task, noise=settings.noise, branch=HORIZON, image_size=IMAGE_SIZE)
            collect(config, root, settings.demos, workers=1)
    return roots


def recipe(settings: Settings, name: str, seed: int, roots: list[Path]) -> Recipe:
    """Training of one of the policies."""
    return Recipe(
        name=name,
        policy=PolicyRecipe("vla", START_WITH, options={**POLICIES[name], "noise_scale": NOISE}),
        data=DataRecipe(root=tuple(map(str, roots)), opening_frames=2, opening_weight=5.0),
        method=Imitation(
            reweight=name == "lambda",
            optimizer=OptimizerRecipe(
                lr=1e-3,
                betas=(0.9, 0.99),
                warmup_steps=min(50, settings.steps - 1),
                final_lr_ratio=0.01,
                backbone_lr_scale=0.1,
            ),
            steps=settings.steps,
            ema=0.99,
            log_every=max(1, settings.steps // 10),
            save_every=max(1, settings.steps // 4),
            keep=1,
        ),
        device="cpu",
        precision="auto",
        seed=seed,
        threads=1,
    )


def learnt(settings: Settings, name: str, seed: int, out: Path) -> Path:
    """One of the policies, trained if it is not there."""
    run = out / "runs" / f"{name}-seed{seed}"
    left = run / "checkpoints" / f"{settings.steps:06d}" / "pretrained_model"
    with claimed(run.with_suffix(".lock"), wait=True):
        if not left.exists():
            plan = recipe(settings, name, seed, demonstrations(settings, out))
            train(plan, plan.method.loss(), run)
    return left


def run(cell: Cell, settings: Settings, out: Path) -> dict[str, Any]:
    """Roll a policy out on all starts in one mode at one delay."""
    way = ways()[cell.arm]
    policy = load_policy(learnt(settings, way.policy, cell.seed, out), frozen=True)
    result = evaluate(
        policy,
        f"sim/{cell.task}-v0",
        settings.starts,
        FIRST_START,
        ExecutorConfig(mode=way.mode, execute=way.execute),
        way.latency,
        num_envs=min(20, settings.starts),
    )
    found = {
        "outcomes": [int(o) for o in result.outcomes],
        "seconds_to_success": result.seconds_to_success,
        "idle_fraction": result.idle_fraction,
        "discontinuity": result.discontinuity,
    }
    return asdict(cell) | {k: None if v != v else v for k, v in found.items()}


def main() -> int:
    p = parser(__doc__)
    p.add_argument("--out", type=Path, default=Path("outputs/reproduce/async_execution"))
    p.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of trainings")
    p.add_argument("--modes", nargs="+", default=MODES, choices=MODES)
    p.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    p.add_argument("--cells", type=int, help="the most informative so many alone")
    p.add_argument("--jobs", type=int, default=1, help="processes (default: %(default)s)")
    p.add_argument("--report", action="store_true", help="write what is there, run nothing")
    p.add_argument("--smoke", action="store_true", help="the same code, tiny, nothing written")
    args = p.parse_args()
    torch.set_num_threads(1)
    settings = SMOKE if args.smoke else Settings()
    same_settings(args.out, asdict(settings))
    adopt(NAME, args.out, asdict(settings))
    todo = [] if args.report else cells(args.seeds, args.modes, args.tasks)[: args.cells]
    if not args.report:
        together(args.jobs, lambda: bool(run_cells(todo, lambda cell: run(cell, settings, args.out), args.out)))
    records = run_cells([], lambda cell: {}, args.out)
    if not args.smoke:
        import async_report

        async_report.write_all(records, published(asdict(settings), records))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""EXPO, DSRL (both forms) and ReinFlow on a policy that sees and reads, against imitation of own successes and RLPD.

    python tools/reproduce/rl_vla.py              # runs what is missing, the first seed of all arms first, then reports
    python tools/reproduce/rl_vla.py --report     # reports what is there, runs that are not over among it
    python tools/reproduce/rl_vla.py --seeds 1 --arms expo dsrl --name rl_vla_pilot
    python tools/reproduce/rl_vla.py --smoke      # the whole path at toy size; the figures mean nothing

Claim asked for: from pictures and an instruction, starting at 30-50 %, at least one of EXPO and ReinFlow comes to at
least 80 %, with the lower end of its gain above 20 points. The start has eyes that are trained, as those of a policy
whose training was cut short are not. At the wall and at the belt it is the shipped generalist, trained further on
demonstrations of mixed quality, as people's are: some pass so low that they brush the wall, some reach for where the
cube was a moment ago. What is wanted is there to be found by trying. At the slot it is the generalist as it ships, with
its own, smaller noise. At MetaWorld's task it is a policy that has learnt from the expert alone, and knows less than
half. All arms meet as many episodes and are measured as they are deployed: in the end by a
separate evaluation of the directory that is left, on scenes that no curve is of.
A cell is one arm of one task and seed; a stopped run continues.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]
import rl_vla_report  # noqa: E402
from claims import Cell, adopt, claimed, extends, published, same_settings, together  # noqa: E402

import freshness  # noqa: E402
from results import RESULTS, ROOT, parser  # noqa: E402
from vla_stack.data.layout import read_json, write_json  # noqa: E402

OUT, CONFIGS = ROOT / "outputs" / "reproduce", ROOT / "vla_stack" / "configs"
SCENES = 500_000  # seed of the first episode of the last evaluation


@dataclass(frozen=True)
class Task:
    """A task.

    Attributes:
        id: Of the environment.
        limit: Control steps of an episode, about twice the expert's.
        demos: Demonstrations that EXPO and RLPD remember.
        start: The policy that all arms begin with; none: of each seed one that is trained on demonstrations of mixed
            quality, of which these are the first.
        mixed: What one or another demonstrator does, see :data:`grape_cells.FLAWS`.
        taught: Without mixed quality: demonstrations of the expert that the start is trained on, from nothing.
        steps: Of that training.
    """

    id: str
    limit: int
    demos: int
    start: str
    mixed: tuple[float, ...] = ()
    taught: int = 0
    steps: int = 0


TASKS = {  # demonstrators pass metres above the wall, or are seconds late
    "obstacle": Task("sim/obstacle-v0", 60, 20, "", (0.035, -0.01, -0.01, -0.015, -0.015)),
    "conveyor": Task("sim/conveyor-v0", 60, 20, "", (0.0, 0.14, 0.28)),
    "slot": Task("sim/slot-v0", 100, 20, "generalist"),
    "pick-place-v3": Task("metaworld/pick-place-v3", 100, 20, "", taught=25, steps=700),
}
OBSERVED = {"cameras": ("corner2", "gripperPOV"), "control_hz": 20, "control_mode": "ee_abs"}  # of MetaWorld's
OFF, ON = 16, 48  # episodes of an iteration
ARMS: dict[str, tuple[str, int, tuple[str, ...]]] = {  # recipe, episodes of an iteration, and what it changes
    "expo": ("rl_vla", OFF, ()),
    "reinflow": ("rl_reinflow_vla", ON, ()),
    "bc": (
        "rl_reinflow_vla",
        ON,
        (
            *("method.sigma_schedule=fixed", "method.sigma_low=1e-3", "method.sigma_high=1e-3"),
            *("method.critic_warmup=0", "method.fit_episodes=0"),
        ),
    ),
    "dsrl": ("rl_vla", OFF, ("method=dsrl",)),
    "dsrl_na": ("rl_vla", OFF, ("method=dsrl_na",)),
    "rlpd": ("rl_vla", OFF, ("method=rlpd_vla",)),
}
BRIEF = (
    "method.warmup=1",
    "method.sac={actor: [8], critic: [8], num_critics: 2, batch: 4, utd: 1, layer_norm: true, log_std: [-5, 0]}",
)
SMOKE = ("method.iterations=1", "method.episodes=2", "method.num_envs=2", "eval.num_envs=2")


@dataclass(frozen=True)
class Size:
    """How large the experiment is.

    Attributes:
        episodes: That each arm practises in.
        scenes: Episodes of an evaluation.
        smoke: The whole path at toy size.
    """

    episodes: int
    scenes: int
    smoke: bool


def grid(tasks: Sequence[str], arms: Sequence[str], seeds: Sequence[int]) -> list[Cell]:
    """All cells: a seed of every arm before the next seed."""
    return [Cell(task, arm, seed) for seed in seeds for task in tasks for arm in arms]


def begin(cell: Cell, out: Path, smoke: bool) -> tuple[str, Path]:
    """The policy that a cell begins with, and what is remembered beside it."""
    start = TASKS[cell.task].start
    if start:
        return start, demonstrations(cell.task, out, smoke)
    if TASKS[cell.task].taught:
        return taught(cell, out / "starts" / cell.task, smoke)
    from grape_cells import IMAGES, TINY, demonstrate, start_policy

    mixed = dataclasses.replace(IMAGES, above=TASKS[cell.task].mixed, **(TINY if smoke else {}))
    folder = out / "starts" / cell.task
    demonstrate(mixed, folder / "demos", cell.task)
    return str(start_policy(mixed, cell.seed, folder) / "checkpoints/last/pretrained_model"), folder / "demos"


def demonstrations(task: str, out: Path, smoke: bool) -> Path:
    """Dataset of a task's demonstrations, recorded where it is missing."""
    from vla_stack.envs.making import options_for
    from vla_stack.policies.chunk_policy import load_policy
    from vla_stack.rollout.collect import CollectConfig, collect

    there = TASKS[task]
    options = options_for(there.id, load_policy(there.start, frozen=True).spec, {})  # pictures as large as it reads
    name = there.id.removeprefix("sim/").removesuffix("-v0")
    config = CollectConfig(task=name, noise=0.3, branch=0, options=options)
    root = out / "demos" / task
    collect(config, root, 2 if smoke else TASKS[task].demos, workers=1)
    return root


def taught(cell: Cell, out: Path, smoke: bool) -> tuple[str, Path]:
    """A seed's start at a task of MetaWorld, trained where it is missing, and what it was trained on."""
    from vla_stack.rollout.collect import CollectConfig, collect
    from vla_stack.training.recipe import load
    from vla_stack.training.train import train

    task, root, run = TASKS[cell.task], out / "demos", out / f"seed{cell.seed}"
    collect(CollectConfig(task.id, noise=0.3, options=OBSERVED), root, 2 if smoke else task.taught, workers=1)
    steps = 2 if smoke else task.steps
    keys = [f"data.root={root}", f"method.steps={steps}", f"method.save_every={steps}", "method.ema=0.99"]
    keys += ["processes=1", "threads=1", f"seed={cell.seed}", "method.log_every=50"]
    recipe = load(CONFIGS / "metaworld.yaml", keys + ["method.optimizer.warmup_steps=1"] * smoke)
    if not (run / "checkpoints" / "last").exists():
        train(recipe, recipe.method.loss(), run)
    return str(run / "checkpoints" / "last" / "pretrained_model"), root


def recipe_of(cell: Cell, start: str, root: Path, size: Size) -> Any:
    """The recipe of a cell, from the policy ``start``, with the demonstrations ``root``."""
    from vla_stack.training.recipe import load

    task, (name, each, keys) = TASKS[cell.task], ARMS[cell.arm]
    limit = 4 if size.smoke else task.limit
    given = [
        *(f"method.episodes={each}", f"method.iterations={max(1, size.episodes // each)}", "method.save_every=1"),
        *(f"eval.every={2 * ON // each}", f"eval.episodes={size.scenes}", *keys, f"policy={start}"),
        *(f"data.root={root}", f"data.episodes={list(range(2 if size.smoke else task.demos))}", f"seed={cell.seed}"),
        f"task={{id: {task.id}, options: {{max_episode_steps: {limit}}}}}",
    ]
    if size.smoke:
        given += [
            *SMOKE,
            *(BRIEF if each == OFF else ["method.epochs=1", "method.minibatch=2"]),
        ]
        given += ["method.fit_episodes=1"] * (cell.arm == "reinflow")
    return load(CONFIGS / f"{name}.yaml", given)


def run_cell(cell: Cell, start: str, root: Path, out: Path, size: Size) -> dict[str, Any]:
    """Learn, and measure what is left as ``vla eval --mode sync`` does."""
    from reinflow_bc import ImitationLoop

    from vla_stack.evaluation.evaluate import evaluate
    from vla_stack.methods.episodes_loop import EXECUTOR
    from vla_stack.methods.on_flow.loop import FlowLoop
    from vla_stack.methods.reinflow.loop import ReinFlowLoop
    from vla_stack.policies.chunk_policy import load_policy

    recipe, run = recipe_of(cell, start, root, size), out / "runs" / cell.name
    if cell.arm == "bc":  # its pool of successes lives in memory: it begins anew
        shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True, exist_ok=True)
    loop = ImitationLoop if cell.arm == "bc" else ReinFlowLoop if cell.arm == "reinflow" else FlowLoop
    left = load_policy(loop(recipe, run).run() / "pretrained_model")
    how = {"num_envs": recipe.eval.num_envs, "env_options": recipe.task.options}
    result = evaluate(left, recipe.task.id, size.scenes, SCENES, EXECUTOR, **how)
    return record(cell, run) | {"served": [int(e.success) for e in result.episodes]}


def record(cell: Cell, run: Path) -> dict[str, Any]:
    """What a run has come to."""
    curve = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    keys = ("step", "env_steps", "rollout", "eval", "eval_success", "cpu_s", "q", "td", "entropy", "kl", "sigma")
    return dataclasses.asdict(cell) | {"curve": [{k: point[k] for k in keys if k in point} for point in curve]}


def unfinished(out: Path, cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Runs that have begun and are not over, as far as they are."""
    return [
        record(cell, out / "runs" / cell.name)
        for cell in cells
        if not (out / "cells" / f"{cell.name}.json").exists()
        and (out / "runs" / cell.name / "metrics.jsonl").exists()
    ]  # fmt: skip


def begun_elsewhere(name: str, settings: dict[str, Any], known: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Published runs that are not over, whose files lie on another machine, and which nothing here goes on with."""
    path = RESULTS / f"{name}.json"
    data = read_json(path)["data"] if path.exists() and not os.environ.get(freshness.ANEW) else {}
    if not extends(json.loads(json.dumps(settings)), data.get("settings", [])):
        return []
    here = {Cell(made["task"], made["arm"], made["seed"]) for made in known}
    return [made for made in data["unfinished"] if Cell(made["task"], made["arm"], made["seed"]) not in here]


def work(cells: Sequence[Cell], out: Path, size: Size) -> None:
    """Run cells until none is left; several processes may do so at once."""
    for cell in cells:
        path = out / "cells" / f"{cell.name}.json"
        with claimed(out / "locks" / cell.name) as ours:
            if not ours or path.exists():
                continue
            with claimed(out / "locks" / f"start-{cell.task}", wait=True):
                start, root = begin(cell, out, size.smoke)
            made = run_cell(cell, start, root, out, size)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, made)
            rates = [f"{p['eval']:.0%} at {p['env_steps']}" for p in made["curve"] if "eval" in p]
            print(cell.name, *rates, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    p = parser(__doc__)
    p.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="tasks (all)")
    p.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="arms (all)")
    p.add_argument("--jobs", type=int, default=1, help="processes of one thread each (1)")
    p.add_argument("--seeds", type=int, default=5, help="seeds (5)")
    p.add_argument("--episodes", type=int, default=480, help="episodes that each arm practises in (480)")
    p.add_argument("--scenes", type=int, default=100, help="episodes of an evaluation (100)")
    p.add_argument("--report", action="store_true", help="report what is there, run nothing")
    p.add_argument("--smoke", action="store_true", help="the whole path at toy size; the figures mean nothing")
    p.add_argument("--out", type=Path, help="folder of demonstrations, runs and cells (outputs/reproduce/<name>)")
    p.add_argument("--name", help="stem of the result files (rl_vla)")
    args = p.parse_args(argv)
    name = args.name or "rl_vla" + "_smoke" * args.smoke  # toy cells never lie among the others
    out, size = args.out or OUT / name, Size(args.episodes, 2 if args.smoke else args.scenes, args.smoke)
    tasks = {task: dataclasses.asdict(TASKS[task]) for task in TASKS}
    these = {"tasks": tasks, "arms": ARMS, "size": dataclasses.asdict(size)}
    adopt(name, out, these)
    if not args.report:
        same_settings(out, these)
        together(args.jobs, partial(work, grid(args.tasks, args.arms, range(args.seeds)), out, size))
    done = [read_json(path) for path in sorted((out / "cells").glob("*.json"))]
    begun = unfinished(out, grid(list(TASKS), list(ARMS), range(args.seeds)))
    begun += begun_elsewhere(name, these, [*done, *begun])
    if not (done or begun):
        sys.exit(f"{out} holds no runs yet")
    rl_vla_report.report(name, [*done, *begun], published(these, done) | {"unfinished": begun})
    return 0


if __name__ == "__main__":
    sys.exit(main())

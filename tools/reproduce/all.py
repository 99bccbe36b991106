"""Measure again what is stale, and go on with what was never finished, within so many core hours.

    python tools/reproduce/all.py --list               # in which order, what is due and why, what it has cost so far
    python tools/reproduce/all.py --hours 8            # of all cores together; the same command goes on later
    python tools/reproduce/all.py --hours 2 --only suite shipped robustness

The most informative comes first: what ships, then what each method claims with few seeds, then what a robot relies on,
then all seeds. A study whose code has changed is measured from its beginning, in a folder that is named by its code;
one that is as it was goes on from the cells that are published and those on the disk. When the hours are over, the
study that runs is stopped and reports the cells that it has, which may be fewer than there were: see `git diff
docs/results`. Commit code first: a result of a state that is in no revision is none.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from cpu_hours import end_all, of_all, of_children

import freshness
from results import RESULTS, ROOT, parser
from vla_stack.data.layout import read_json, write_json

OUT = ROOT / "outputs" / "reproduce" / "all"
POLL_S = 2.0


@dataclass(frozen=True)
class Step:
    """A study, or a part of one.

    Attributes:
        result: Stem of its result file.
        command: Script below ``tools/`` and its arguments.
        takes: Flags that the script knows: ``out`` where its cells lie, ``report`` of those that there are, ``jobs``.
    """

    result: str
    command: str
    takes: str = ""


CELLS = "out report"
SHARED = "out report jobs"  # cells that several processes work on
STEPS = (
    # what ships
    Step("suite", "reproduce/suite.py", "out"),
    Step("shipped", "reproduce/shipped.py"),
    Step("robustness", "reproduce/robustness.py", "out"),
    Step("onnx", "bench/onnx_backend.py"),
    Step("inference", "bench/inference.py"),
    # what each method claims, with few seeds
    Step("async_execution", "reproduce/async_execution.py --cells 60", SHARED),
    Step("memory", "reproduce/memory.py --seeds 0", CELLS),
    Step("labels", "reproduce/labels.py --seeds 0 --tasks place", CELLS),
    Step("progress", "reproduce/progress.py --seeds 1", CELLS),
    Step("rl_vla", "reproduce/rl_vla.py --seeds 1", SHARED),
    Step("reinflow", "reproduce/reinflow.py --seeds 1", SHARED),
    Step("grape_images", "reproduce/grape.py --images --seeds 1", SHARED),
    Step("grape", "reproduce/grape.py --seeds 1", SHARED),
    Step("rac_jam", "reproduce/rac.py --task jam --seeds 1", SHARED),
    Step("rac", "reproduce/rac.py --seeds 1", SHARED),
    Step("mixture_of_horizons", "reproduce/mixture_of_horizons.py --seeds 1", SHARED),
    Step("wsrl", "reproduce/wsrl.py --seeds 1", SHARED),
    Step("expo", "reproduce/expo.py --seeds 1", SHARED),
    Step("world_model", "reproduce/world_model.py --seeds 1", SHARED),
    Step("aloha", "reproduce/aloha.py", "out"),
    Step("external", "reproduce/external.py", "out"),
    # what a robot relies on
    Step("envelope", "bench/envelope.py"),
    Step("executor", "bench/executor.py"),
    Step("driver", "bench/driver.py"),
    Step("bus_faults", "bench/bus_faults.py"),
    Step("faults", "bench/faults.py"),
    Step("guardian", "bench/guardian.py --repeats 20"),
    Step("robot_extra", "bench/robot_extra.py"),
    Step("crash", "bench/crash.py"),
    Step("run_recording", "bench/run_recording.py"),
    Step("corruption", "bench/corruption.py"),
    Step("attacks", "bench/attacks.py", "out"),
    Step("fuzz_wire", "bench/fuzz_wire.py"),
    Step("console_flood", "bench/console_flood.py", "out"),
    Step("fleet", "bench/fleet.py"),
    Step("network", "bench/network.py"),
    Step("serving", "bench/serving.py"),
    # how fast it is, and how evaluations can be trusted
    Step("train", "bench/train.py"),
    Step("loader", "bench/loader.py"),
    Step("sac", "bench/sac.py"),
    Step("horizons_layout", "bench/horizons.py 8"),
    Step("data_scale", "bench/data_scale.py"),
    Step("compare", "bench/compare.py"),
    Step("short_tasks", "bench/short_tasks.py --episodes 50 --starts 10", "out"),
    Step("corrections", "bench/corrections.py"),
    Step("embodiments", "reproduce/embodiments.py", "out"),
    Step("stems", "reproduce/stems.py --tasks pick", CELLS),
    Step("monitor", "reproduce/monitor.py", CELLS),
    Step("monitor_help", "reproduce/monitor_help.py", CELLS),
    Step("rl_ray", "reproduce/rl_ray.py", CELLS),
    # all seeds
    Step("memory", "reproduce/memory.py", CELLS),
    Step("progress", "reproduce/progress.py", CELLS),
    Step("async_execution", "reproduce/async_execution.py", SHARED),
    Step("labels", "reproduce/labels.py", CELLS),
    Step("rl_vla", "reproduce/rl_vla.py", SHARED),
    Step("rl_robot", "reproduce/rl_robot.py", CELLS),
    Step("reinflow", "reproduce/reinflow.py", SHARED),
    Step("reinflow_metaworld", "reproduce/reinflow.py --task pick-place-v3 --name reinflow_metaworld", SHARED),
    Step("grape_images", "reproduce/grape.py --images", SHARED),
    Step("grape", "reproduce/grape.py", SHARED),
    Step("rac_jam", "reproduce/rac.py --task jam", SHARED),
    Step("rac_free", "reproduce/rac.py --task free", SHARED),
    Step("rac", "reproduce/rac.py", SHARED),
    Step("rac_images", "reproduce/rac.py --images", SHARED),
    Step("mixture_of_horizons", "reproduce/mixture_of_horizons.py", SHARED),
    Step("mixture_of_horizons_images", "reproduce/mixture_of_horizons.py --images", SHARED),
    Step("wsrl", "reproduce/wsrl.py", SHARED),
    Step("expo", "reproduce/expo.py", SHARED),
    Step("data_quality", "reproduce/data_quality.py", CELLS),
    Step("peers", "reproduce/peers.py", "out"),
    Step("world_model", "reproduce/world_model.py", SHARED),
)
ELSEWHERE = {  # result files that want more than this machine is sure to have, and what
    "base_gpu": "a GPU",
    "world_gpu": "a GPU",
    "openpi": "a copy of openpi's server, --stock",
    "vla_eval": "a policy of MetaWorld, --metaworld",
    "hil_so101": "an hour in real time, on cores that do nothing else",
    "fidelity": "tensors of the authors' code",
    "world_ranking": "the policies of data_quality and the recorded mixture of world_model",
    "mixture_of_horizons_short": "the settings of an earlier experiment",
}


@dataclass(frozen=True)
class Due:
    """Why a step is to be run; from its beginning, where what there is is of other code."""

    why: str
    anew: bool = False


@cache
def tree() -> freshness.Tree:
    return freshness.Tree(ROOT)


@cache
def digest(script: str) -> str:
    """Of all that a script below ``tools/`` may run."""
    return freshness.digest(tree(), f"tools/{script}")


def due(step: Step, stale: Sequence[str], there: bool, noted: dict[str, Any], now: str) -> Due | None:
    """Whether a step is to be run.

    Args:
        step: Which.
        stale: Why its result file is not of the code that there is (:func:`freshness.changed`); empty where it is.
        there: Whether there is such a file.
        noted: What is known of earlier runs of this command.
        now: :func:`digest` of its script.
    """
    if noted.get("over") and noted.get("digest") == now:
        return None
    if not there:
        return Due("was never measured")
    if stale:
        more = f" and {len(stale) - 2} more" if len(stale) > 2 else ""
        return Due("other now: " + ", ".join(stale[:2]) + more, anew=True)
    return Due("may lack cells") if "report" in step.takes else None


def words(step: Step, folder: Path, jobs: int, report: bool = False) -> list[str]:
    """What is run."""
    script, *rest = shlex.split(step.command)
    flags = ["--out", str(folder)] if "out" in step.takes.split() else []
    flags += ["--jobs", str(jobs)] if "jobs" in step.takes.split() and jobs > 1 and not report else []
    return [sys.executable, str(ROOT / "tools" / script), *rest, *flags, *["--report"] * report]


def environment(anew: bool) -> dict[str, str]:
    """What a study runs in; ``anew`` takes over nothing that was published, nor does a report of what it has."""
    return {**os.environ, "OMP_NUM_THREADS": "1", **({freshness.ANEW: "1"} if anew else {})}


def run(command: list[str], env: dict[str, str], left_s: float) -> tuple[int | None, float]:
    """Exit code, None where time was over before, and core seconds that it took."""
    begun = of_children()
    process = subprocess.Popen(command, env=env, cwd=ROOT, start_new_session=True)
    stopped = False
    try:
        while True:
            try:
                process.wait(POLL_S)
                break
            except subprocess.TimeoutExpired:
                if of_all(process.pid) > left_s:
                    stopped = True
                    break
    finally:  # Ctrl-C reaches this process alone
        if process.poll() is None:
            end_all(process)
    return None if stopped else process.returncode, of_children() - begun


def work(steps: Sequence[Step], hours: float, jobs: int, listed: bool) -> int:
    """Run what is due until time is over, or say what is."""
    notes = OUT / "all.json"
    known: dict[str, Any] = read_json(notes) if notes.exists() else {}
    failed, spent_s = [], 0.0
    for step in steps:
        result, now = RESULTS / f"{step.result}.json", digest(shlex.split(step.command)[0])
        noted = known.get(step.command, {})
        stale = freshness.changed(read_json(result), tree()) if result.exists() else []
        todo = due(step, stale, result.exists(), noted, now)
        cost = f"{noted['core_s'] / 3600:.2f} h" if "core_s" in noted else ""
        if listed or todo is None:
            print(f"{step.command:<72}{cost:>8}  {todo.why if todo else 'done'}", flush=True)
            continue
        print(f"\n{step.command}: {todo.why}", flush=True)
        folder = OUT / f"{step.result}-{now}"
        code, core_s = run(words(step, folder, jobs), environment(todo.anew), hours * 3600 - spent_s)
        spent_s += core_s
        earlier_s = noted.get("core_s", 0.0) if noted.get("digest") == now else 0.0
        known[step.command] = {"digest": now, "core_s": earlier_s + core_s, "over": code == 0}
        OUT.mkdir(parents=True, exist_ok=True)
        write_json(notes, known)
        if code is None:
            if "report" in step.takes.split():
                subprocess.run(words(step, folder, jobs, report=True), cwd=ROOT, env=environment(todo.anew))
            print(f"\n{hours:g} core hours are over in {step.command}: the same command goes on")
            break
        if code:
            failed.append(step.command)
            print(f"{step.command} failed with {code}", flush=True)
    if failed:
        print("failed: " + "; ".join(failed))
    return int(bool(failed))


def main(argv: Sequence[str] | None = None) -> int:
    p = parser(__doc__)
    p.add_argument("--hours", type=float, default=1.0, help="core hours, of all cores together (default: %(default)g)")
    p.add_argument("--only", nargs="+", metavar="NAME", choices=sorted({s.result for s in STEPS}), help="these results")
    p.add_argument("--jobs", type=int, default=1, help="processes of studies that can share cells (default: 1)")
    p.add_argument("--list", action="store_true", dest="listed", help="say what is due, run nothing")
    args = p.parse_args(argv)
    steps = [step for step in STEPS if not args.only or step.result in args.only]
    status = work(steps, args.hours, args.jobs, args.listed)
    if args.listed and not args.only:
        for name, needs in ELSEWHERE.items():
            print(f"{name:<82}needs {needs}")
    return status


if __name__ == "__main__":
    sys.exit(main())

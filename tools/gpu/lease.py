"""Measurements that wait for a GPU, most informative first; as many as fit into the minutes that one is at hand.

    python tools/gpu/lease.py --list
    python tools/gpu/lease.py --minutes 9 --out OUT     # what is not done yet, until the time is over
    python tools/gpu/lease.py --smoke                   # each job, tiny, on a CPU, as the tests do

A job is a command that prints each row as soon as it has it and writes one result file. What it printed lies in
``OUT/<job>.log`` whether it ended or not, its result in ``OUT/<job>.json``; a job whose result is there is not run
again. Each gets the time that is left, at most its own. ``--adopt OUT`` copies results that came back into
``docs/results`` of this tree.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
from results import parser  # noqa: E402

STARTING_S = 45.0  # of a process that imports torch and makes a policy
MAX_BYTES = 16 << 20  # of a file that comes back


@dataclass(frozen=True)
class Job:
    """One measurement.

    Attributes:
        name: Of its files.
        command: Below the root of the tree, without ``--out``.
        minutes: That it takes at most.
        result: File in ``docs/results`` that it becomes, if it is one whole.
        what: It answers, for people.
    """

    name: str
    command: tuple[str, ...]
    minutes: float
    result: str | None
    what: str


def bench(name: str, sections: tuple[str, ...], minutes: float, what: str, result: str | None = None) -> Job:
    only = ("--only", *sections) if sections else ()
    return Job("-".join((name, *sections)), (f"tools/bench/{name}.py", *only), minutes, result, what)


JOBS = (
    bench("base_gpu", ("pi05",), 6, "a chunk at the size of pi0.5: eager, captured, compiled, graph, LeRobot's own"),
    bench("base_gpu", ("base",), 4, "a chunk of the preset base, the same ways"),
    bench("base_gpu", ("training",), 3, "a step of base at batch 8 and 32: time, memory, share of the peak"),
    bench("base_gpu", ("exported", "onnx"), 4, "ONNX Runtime: base, and the shipped policy beside torch"),
    bench("world_gpu", (), 8, "imagined frames a second, a step of the world model", "world_gpu"),
    bench("learning_gpu", (), 3, "a step of the generalist, an update of actor and critics", "learning_gpu"),
    bench("base_gpu", (), 9, "all of base in one run, for the result file", "base_gpu"),
)


def run(job: Job, out: Path, seconds: float, smoke: bool) -> bool:
    """Whether a job gave its result within the time."""
    result, log = out / f"{job.name}.json", out / f"{job.name}.log"
    rest = ("--smoke",) if smoke else ("--seconds", f"{max(10.0, seconds - STARTING_S):.0f}", "--out", str(result))
    with log.open("w") as sink:
        try:
            code = subprocess.run(
                (sys.executable, *job.command, *rest), cwd=ROOT, stdout=sink, stderr=sink, timeout=seconds
            ).returncode
        except subprocess.TimeoutExpired:
            sink.write("\nthe time was over\n")
            return False
    return code == 0 and (smoke or result.is_file())


def adopt(out: Path) -> list[str]:
    """Copy whole results into the tree; their names."""
    names = []
    for job in JOBS:
        file = out / f"{job.name}.json"
        if job.result and file.is_file() and file.stat().st_size <= MAX_BYTES:
            shutil.copyfile(file, ROOT / "docs" / "results" / f"{job.result}.json")
            names.append(job.result)
    return names


def main() -> int:
    p = parser(__doc__)
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    p.add_argument("names", nargs="*", help="jobs, instead of all that are not done")
    p.add_argument("--list", action="store_true", help="what there is, and end")
    p.add_argument("--minutes", type=float, default=9.0, help="that the GPU is at hand (default: %(default)g)")
    p.add_argument("--out", type=Path, default=Path("outputs/gpu"), help="logs and results (default: %(default)s)")
    p.add_argument("--smoke", action="store_true", help="tiny, on a CPU; nothing is written but logs")
    p.add_argument("--adopt", type=Path, metavar="OUT", help="copy results into docs/results, and end")
    args = p.parse_args()
    unknown = set(args.names) - {job.name for job in JOBS}
    if unknown:
        p.error(f"no job is called {', '.join(sorted(unknown))}; there are {', '.join(job.name for job in JOBS)}")
    if args.list:
        print("\n".join(f"{job.name:28} {job.minutes:3.0f} min  {job.what}" for job in JOBS))
        return 0
    if args.adopt:
        print("\n".join(adopt(args.adopt)) or f"{args.adopt} holds no whole result")
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    end, failed = time.monotonic() + args.minutes * 60, []
    for job in JOBS:
        if (args.names and job.name not in args.names) or (args.out / f"{job.name}.json").is_file():
            continue
        left = end - time.monotonic()
        if left < STARTING_S:
            print(f"{job.name}: no time was left", flush=True)
            continue
        begun = time.monotonic()
        good = run(job, args.out, min(left, job.minutes * 60), args.smoke)
        print(f"{job.name}: {'done' if good else 'see its log'}, {time.monotonic() - begun:.0f} s", flush=True)
        failed += [] if good else [job.name]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""The unmodified vla-eval harness over our tasks and our server, beside `vla eval` on the same starts.

    python tools/bench/vla_eval.py [--episodes 50] [--metaworld RUN]

The shipped policy on the tasks that it was trained for; with ``--metaworld`` a policy of the recipe ``metaworld`` on
those of ``--tasks``. The harness runs as its users run it, ``vla-eval run --no-docker``, and
``vla serve --protocol vla-eval`` in a process of its own. Policies act from pictures and sentences.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from results import RESULTS, Check, parser, write

BIN = Path(sys.executable).parent
SHIPPED = ("sim/pick-v0", "sim/place-v0", "sim/obstacle-v0")
START = 40_000  # seed of the first episode
CLASS = "vla_stack.evaluation.vla_eval:Tasks"


def harness(policy: str, tasks: list[str], episodes: int, folder: Path) -> dict[str, Any]:
    """Successes by task, and what the harness said of the conventions."""
    serve = [str(BIN / "vla"), "serve", "--policy", policy, "--protocol", "vla-eval", "--endpoint", "ws://127.0.0.1:*"]
    server = subprocess.Popen(serve, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    endpoint = server.stdout.readline().split()[1]
    config = {
        "server": {"url": endpoint},
        "output_dir": str(folder),
        "benchmarks": [
            {
                "benchmark": CLASS,
                "episodes_per_task": episodes,
                "params": {"tasks": tasks, "seed": START},
                "recording": {"record_step": False},
            }
        ],
    }
    (folder / "tasks.yaml").write_text(yaml.safe_dump(config))
    try:
        command = [str(BIN / "vla-eval"), "run", "--no-docker", "--yes", "-c", str(folder / "tasks.yaml"), "-v"]
        ran = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=os.environ)
    finally:
        server.terminate()
        server.wait()
    said = ran.stdout + ran.stderr
    if ran.returncode:
        raise SystemExit(said[-4000:])
    (file,) = [f for f in folder.rglob("*.json") if "benchmark" in f.read_text()[:4000]]
    result = json.loads(file.read_text())
    by_task = {t["task"]: [bool(e["metrics"]["success"]) for e in t["episodes"]] for t in result["tasks"]}
    return {"outcomes": by_task, "mismatches": said.count("Spec mismatch"), "passed": "Spec validation passed" in said}


def ours(policy: str, task: str, episodes: int) -> list[bool]:
    """Outcomes under `vla eval --mode sync`."""
    from vla_stack.evaluation.evaluate import evaluate
    from vla_stack.policies.chunk_policy import load_policy
    from vla_stack.runtime.executor import ExecutorConfig

    result = evaluate(load_policy(policy, frozen=True), task, episodes, START, ExecutorConfig(mode="sync"))
    return [bool(o) for o in result.outcomes]


def main(args: argparse.Namespace) -> int:
    arms = {"shipped": list(SHIPPED)} | ({args.metaworld: args.tasks} if args.metaworld else {})
    rows: list[dict[str, Any]] = []
    mismatches, passed = 0, True
    for policy, tasks in arms.items():
        with tempfile.TemporaryDirectory() as folder:
            found = harness(policy, tasks, args.episodes, Path(folder))
        mismatches, passed = mismatches + found["mismatches"], passed and found["passed"]
        for task in tasks:
            theirs, mine = found["outcomes"][task], ours(policy, task, args.episodes)
            rows.append({"task": task, "vla-eval": theirs, "vla eval": mine})
            print(f"{task:<28} vla-eval {sum(theirs)}, vla eval {sum(mine)} of {args.episodes}", flush=True)
    checks = [Check("conventions that the harness finds different", mismatches, 0, "<=")]
    checks += [Check("conventions compared", float(passed), 1)]
    checks += [Check(f"{r['task']}: successes under vla-eval", sum(r["vla-eval"])) for r in rows]
    apart = max(abs(sum(r["vla-eval"]) - sum(r["vla eval"])) for r in rows) / args.episodes
    checks += [Check("largest difference to vla eval, share of episodes", round(apart, 3), 0.1, "<=")]
    data = {"episodes": args.episodes, "observes": "pictures", "rows": rows}
    write("vla_eval", checks, data, seeds=[START], path=args.out or RESULTS / "vla_eval.json")
    return 0


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("--episodes", type=int, default=50, help="of each task (default: %(default)s)")
    arguments.add_argument("--metaworld", metavar="RUN", help="a policy of the recipe metaworld")
    arguments.add_argument(
        "--tasks", nargs="+", default=["metaworld/drawer-open-v3"], help="of it (default: %(default)s)"
    )
    arguments.add_argument("--out", type=Path, help="another file than docs/results/vla_eval.json")
    sys.exit(main(arguments.parse_args()))

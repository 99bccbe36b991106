"""How the shipped policy holds up where only the pictures change, beside the one that shipped before augmentation.

    git worktree add ../before 71abb01
    python tools/reproduce/robustness.py --before ../before/vla_stack/assets/policies/native_multitask

60 paired episodes a row on scenes that training never saw: the same starts and the same noise of the policy, what is
executed included; asynchronous execution with one step (100 ms) of delay under the virtual clock. A row that has been
run is kept in ``--out``, so the command goes on where it was stopped; rows of the policy before are adopted from the
published file where ``--before`` is not given.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from results import RESULTS, Check, parser, write
from vla_stack.data.layout import write_json
from vla_stack.evaluation.evaluate import evaluate
from vla_stack.evaluation.pictures import CHANGES, Changed
from vla_stack.policies.chunk_policy import ChunkPolicy, load_policy
from vla_stack.policies.directory import resolve_policy
from vla_stack.rollout.latency import Latency
from vla_stack.runtime.executor import ExecutorConfig
from vla_stack.statistics import success_interval

TASKS = ("pick", "place")
EPISODES, SEED, DELAY = 60, 30_000, 1
BOUND = 57 / 60  # of pick, in every row
WORLD = "randomisation 2"  # of the simulator: colours, light, camera and dynamics
ROWS = {  # as published -> change of the pictures
    "as trained": "",
    "40 % darker": "darker",
    "40 % brighter": "brighter",
    "warmer by 15 %": "warmer",
    "half of it in shadow": "shadow",
    "12 px patch": "patch",
    "shifted by 3 px": "shifted",
    WORLD: "",
}


def row(policy: ChunkPolicy, task: str, name: str) -> list[bool]:
    """Outcome of each episode."""
    seen = Changed(policy, CHANGES[ROWS[name]]) if ROWS[name] else policy
    result = evaluate(
        seen,
        f"sim/{task}-v0",
        EPISODES,
        SEED,
        ExecutorConfig(mode="naive"),
        latency=Latency(DELAY / policy.spec.robot.rate_hz),
        env_options={"randomisation": 2} if name == WORLD else None,
    )
    return [bool(outcome) for outcome in result.outcomes]


def main() -> int:
    p = parser(__doc__)
    p.add_argument("--before", type=Path, help="directory of the policy that shipped before")
    p.add_argument("--policy", default="shipped", help="the policy (shipped)")
    p.add_argument("--tasks", nargs="+", default=TASKS, choices=TASKS)
    p.add_argument("--out", type=Path, default=Path("outputs/robustness"), help="folder of finished rows")
    args = p.parse_args()
    torch.set_num_threads(1)
    published = RESULTS / "robustness.json"
    rows: dict[str, dict[str, dict[str, list[bool]]]] = {}
    if published.exists():
        rows = {arm: r for arm, r in json.loads(published.read_text())["data"]["rows"].items() if arm == "before"}
    args.out.mkdir(parents=True, exist_ok=True)
    for arm, source in (("shipped", args.policy), ("before", args.before)):
        if source is None:
            continue
        policy = load_policy(resolve_policy(str(source)))
        for task in args.tasks:
            for name in ROWS:
                which = policy.spec.model_version[:12]  # rows of another policy are not this one's
                file = args.out / f"{arm}-{which}-{task}-{name.replace(' ', '_')}.json"
                if not file.exists():
                    write_json(file, row(policy, task, name))
                outcomes = json.loads(file.read_text())
                rows.setdefault(arm, {}).setdefault(task, {})[name] = outcomes
                print(f"{arm:<8} {task:<6} {name:<22} {sum(outcomes)} of {len(outcomes)}", flush=True)
    checks = []
    for task in args.tasks:
        for name in ROWS:
            now = rows["shipped"][task][name]
            bound = BOUND if task == "pick" else None
            interval = success_interval(sum(now), len(now))
            checks.append(Check(f"{task}, {name}: success", float(np.mean(now)), bound, interval=interval))
            if before := rows.get("before", {}).get(task, {}).get(name):
                interval = success_interval(sum(before), len(before))
                checks.append(Check(f"{task}, {name}: of the policy before", float(np.mean(before)), interval=interval))
    write("robustness", checks, {"episodes": EPISODES, "rows": rows}, seeds=[SEED])
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The shipped policy on the tasks it has learnt, and with the wrong object instructed.

    python tools/reproduce/shipped.py

100 episodes a task on scenes that training never saw, asynchronous execution with one step (100 ms) of delay under the
virtual clock. With another colour instructed, success on the scene's own target must fall to chance: the language is
what the policy obeys.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from results import Check, parser, write
from vla_stack.evaluation.evaluate import evaluate
from vla_stack.policies.chunk_policy import load_policy
from vla_stack.policies.directory import resolve_policy
from vla_stack.rollout.latency import Latency
from vla_stack.runtime.executor import ExecutorConfig
from vla_stack.statistics import success_interval

TASKS = ("pick", "place", "obstacle")
EPISODES, SEED, DELAY = 100, 20_000, 1


def run(policy, task: str, instruct: str | None = None):
    return evaluate(
        policy,
        f"sim/{task}-v0",
        EPISODES,
        SEED,
        ExecutorConfig(mode="naive"),
        latency=Latency(DELAY / policy.spec.robot.rate_hz),
        instruct=instruct,
    )


def main() -> int:
    parser(__doc__).parse_args()
    torch.set_num_threads(1)
    policy = load_policy(resolve_policy("shipped"))
    checks, data, rates = [], {}, []
    for task in TASKS:
        result = run(policy, task)
        rates.append(float(result.outcomes.mean()))
        checks.append(Check(f"{task}: success", rates[-1], interval=success_interval(result.successes, EPISODES)))
        data[task] = [e.to_json() for e in result.episodes]
        print(checks[-1].name, rates[-1], flush=True)
    checks.insert(0, Check("mean success over the tasks", float(np.mean(rates)), 0.85))
    for task in TASKS[:2]:
        result = run(policy, task, "swap")
        own, told = float(result.outcomes.mean()), np.mean([bool(e.instructed_success) for e in result.episodes])
        interval = success_interval(result.successes, EPISODES)
        checks.append(Check(f"{task}, other colour named: success on the original", own, 1 / 3, "<=", interval))
        checks.append(Check(f"{task}, other colour named: success on the named one", float(told)))
        data[f"{task}, swapped"] = [e.to_json() for e in result.episodes]
    write("shipped", checks, data, seeds=[SEED])
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""From how many of a policy's failures does the expert still do the task?

    python tools/bench/corrections.py [--policy generalist] [--tasks slot shelf] [--episodes 50]

`vla collect --policy` lets a policy act and records what the expert would do (DAgger). What the expert cannot put right
from there it cannot teach either: labels of such states say to press on, and a policy that has learnt them does. The
file names the starts of what is lost, to look at. With ``--tasks`` or another policy nothing is written.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import gymnasium as gym

import sim
from vla_stack.evaluation.evaluate import evaluate
from vla_stack.policies.chunk_policy import load_policy
from vla_stack.policies.directory import resolve_policy
from vla_stack.rollout.engine import ChunkPolicy
from vla_stack.statistics import wilson

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from results import Check, parser, write
from tasks import TASKS

POLICY = "generalist"
SEED = 50_000
LEFT = 150  # control steps that the expert has after the policy's own time; it needs 20 to 40 for a whole task


@dataclass(frozen=True)
class Found:
    """Of a task: episodes that the policy had not done in time, and the seeds of what the expert could not mend."""

    failed: int
    lost: tuple[int, ...]


def corrected(policy: ChunkPolicy, task: str, episodes: int) -> Found:
    """The policy's episodes from seeds that training never saw, and the expert's end of those it had not done."""
    name = f"sim/{task}-v0"
    result = evaluate(policy, name, episodes, SEED, num_envs=episodes)
    limit = sim.TASKS[task].max_episode_steps + LEFT
    env, failed, lost = gym.make(name, cameras=(), max_episode_steps=limit), 0, []
    for record in result.episodes:
        if record.success:
            continue
        failed += 1
        env.reset(seed=record.seed)
        ended = False
        for action in record.actions:
            _, _, ended, _, info = env.step(action)
        expert = sim.make_expert(env)
        for _ in range(0 if ended else LEFT):  # a wrong button is pressed for good
            _, _, ended, _, info = env.step(expert.act())
            if ended:
                break
        if not info["is_success"]:
            lost.append(record.seed)
    return Found(failed, tuple(lost))


def main() -> int:
    p = parser(__doc__)
    p.add_argument("--policy", default=POLICY, help="whose failures (%(default)s)")
    p.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS, help="all that it has learnt")
    p.add_argument("--episodes", type=int, default=50, help="of each task (%(default)s)")
    args = p.parse_args()
    policy, found = load_policy(args.policy, frozen=True), {}
    for task in args.tasks:
        found[task] = corrected(policy, task, args.episodes)
        print(f"{task}: {found[task].failed} of {args.episodes} failed, lost: {found[task].lost or 'none'}", flush=True)
    checks = [share("the expert puts right", list(found.values()), 0.9)]
    checks += [share(f"{task}: the expert puts right", [one]) for task, one in found.items() if one.failed]
    if args.policy == POLICY and args.tasks == list(TASKS):
        data = {"episodes": args.episodes, "found": {task: asdict(one) for task, one in found.items()}}
        write("corrections", checks, data, [SEED], inputs=[resolve_policy(args.policy)])
    return 0


def share(name: str, found: list[Found], bound: float | None = None) -> Check:
    failed, lost = sum(f.failed for f in found), sum(len(f.lost) for f in found)
    if not failed:
        return Check(name, 1.0, bound)
    why = "in the slot's scenes it does not take up what has fallen over; the others' are in the file, to look at"
    right = failed - lost
    return Check(name, right / failed, bound, interval=wilson(right, failed), why=why, over="starts")


if __name__ == "__main__":
    sys.exit(main())

"""``vla monitor``: fit what calls for help when a policy is about to fail."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from vla_stack.envs.making import check_id
from vla_stack.errors import UserError
from vla_stack.rollout.records import EpisodeRecord
from vla_stack.runtime.executor import MODES, ExecutorConfig
from vla_stack.statistics import success_interval
from vla_stack.verbs.arguments import count, device, share, whole

HELP = "Fit a failure monitor to a policy's successful rollouts, for `vla eval`, `vla run` and `vla console --monitor`."
EXAMPLES = (
    "vla monitor fit --policy runs/pick --env sim/pick-v0 --episodes 200 --out runs/pick/monitor.json",
    "vla eval --policy runs/pick --env sim/pick-v0 --monitor runs/pick/monitor.json    # does it call in time?",
    "vla run --robot sim --task pick --monitor runs/pick/monitor.json --record sentry --root data/alarms",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    a = parser.add_argument
    a("action", choices=("fit",))
    a("--policy", default="shipped", help="policy or run directory, or a shipped policy's name (default: %(default)s)")
    a("--embodiment", help="which robot it drives, where the policy was trained on several")
    a("--env", nargs="+", default=["sim/pick-v0"], help="where it succeeds (default: sim/pick-v0)")
    a(
        "--episodes",
        type=count,
        default=100,
        help="of each environment; successes count (default: %(default)s)",
    )
    a("--alpha", type=share, default=0.05, help="nominal rate of false alarms (default: %(default)s)")
    a("--seed", type=whole, default=50_000, help="seed of the first episode (default: %(default)s)")
    a("--mode", choices=MODES, default="naive", help="execution of chunks, as on the robot (default: naive)")
    a("--execute", type=count, help="actions executed of each chunk (default: the policy's own choice)")
    a("--num-envs", type=count, default=8, help="episodes that run at the same time (default: %(default)s)")
    a("--workers", type=whole, default=0, help="processes for the environments (default: none)")
    a("--device", default="cpu", type=device, help="where the policy runs (default: %(default)s)")
    a("--out", type=Path, default=Path("outputs/monitor.json"), help="the file (default: %(default)s)")


def main(args: argparse.Namespace) -> int:
    from vla_stack.policies.directory import resolve_policy

    path = resolve_policy(args.policy)  # before torch is loaded
    for env_id in args.env:
        check_id(env_id)
    from vla_stack.evaluation.evaluate import evaluate
    from vla_stack.evaluation.monitoring import Listening, Watched, fit, policy_features, watched
    from vla_stack.policies.chunk_policy import load_policy
    from vla_stack.policies.reading import find_device

    policy = load_policy(path, str(find_device(args.device)), args.embodiment, frozen=True)
    listening = Listening(policy, policy_features(policy))
    executor = ExecutorConfig(args.mode, args.execute)
    how = {"num_envs": args.num_envs, "workers": args.workers}
    episodes: list[Watched] = []
    rates = {}
    for env_id in args.env:
        with tqdm(total=args.episodes, desc=env_id, unit="ep", dynamic_ncols=True) as bar:
            on_episode = partial(_advance, bar)
            result = evaluate(listening, env_id, args.episodes, args.seed, executor, on_episode=on_episode, **how)
        rates[env_id] = result.rate_hz
        episodes += [watched(listening, e) for e in result.episodes]
        print(f"{env_id}: {success_interval(result.successes, len(result.episodes)).value:.0%} succeeded")
    if len(set(rates.values())) > 1:
        raise UserError(f"control rates differ: {rates}", "fit a monitor for each")
    about = {"env": args.env, "seed": args.seed, "mode": args.mode, "execute": args.execute}
    monitor = fit(episodes, 1 / rates[args.env[0]], args.alpha, policy.spec.model_version, **about)
    monitor.save(args.out)
    print(f"{args.out}: of {sum(e.success for e in episodes)} successes, nominal false alarms {args.alpha:.0%}")
    print(f"Next: vla eval --policy {args.policy} --monitor {args.out} --seed 0, and vla run --monitor {args.out}")
    return 0


def _advance(bar: Any, _: EpisodeRecord) -> None:
    bar.update()

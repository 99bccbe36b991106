"""``vla eval``: roll a policy out in simulation and report success with its interval."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import product
from pathlib import Path
from typing import Any

from tqdm import tqdm

from vla_stack.envs.making import is_benchmark, is_task
from vla_stack.evaluation.evaluate import describe, evaluate
from vla_stack.evaluation.metrics import frequency_averaged_score
from vla_stack.evaluation.provenance import provenance
from vla_stack.ray_cluster import cluster
from vla_stack.rollout.engine import ChunkPolicy
from vla_stack.rollout.latency import JITTERS, parse_latencies
from vla_stack.rollout.plan import Instruct
from vla_stack.rollout.records import EpisodeRecord, EvalResult, save_records
from vla_stack.runtime.executor import MODES, ExecutorConfig
from vla_stack.statistics import wilson
from vla_stack.verbs.arguments import device, whole

HELP = "Roll a policy out in simulation, under a virtual clock, and report success with its interval."
EXAMPLES = (
    "vla eval                                                  # the shipped policy on sim/pick-v0",
    "vla eval --policy runs/pick --env sim/pick-v0 sim/place-v0 --episodes 200",
    "vla eval --latency 0,100ms,300ms --mode sync naive rtc    # the same scenes in three modes at three delays",
    "vla eval --latency 200ms --jitter gamma --mode all        # every way in which the policy can be executed",
    "vla eval --mode all --execute 2 4 8                       # deciding more or less often; FAS is the mean over it",
    "vla eval --env imagined:shipped --episodes 20             # in a world model; docs/world_model.md",
    "vla eval --policy outputs/train/rl_wsrl-... --mode sync  # WSRL or EXPO, on the states that it was trained on",
    "vla eval --rollouts ray --workers 16                      # simulated by actors on Ray",
    "vla eval --swap-instruction                               # is the instruction really followed?",
    "vla eval --policy runs/metaworld --env metaworld/push-v3  # a benchmark: metaworld/<task>, aloha/transfer_cube,",
    "                                                          # aloha/insertion, libero/<suite>/<index of the task>",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    a = parser.add_argument
    a("--policy", default="shipped", help="policy or run directory, or a shipped policy's name (default: %(default)s)")
    a("--embodiment", help="which robot to drive, where the policy was trained on several")
    a("--env", nargs="+", action="extend", help="gymnasium ids or tasks of benchmarks (default: sim/pick-v0)")
    a("--episodes", type=_positive, default=100, help="episodes for each setting (default: %(default)s)")
    a("--seed", type=whole, default=1000, help="seed of the first episode (default: %(default)s)")
    a("--max-steps", type=_positive, help="control steps of an episode (default: the environment's own limit)")
    a("--mode", nargs="+", choices=("all", *MODES), default=["naive"], help="execution of chunks (default: naive)")
    a("--execute", nargs="+", type=_positive, help="actions executed of each chunk (default: the policy's own choice)")
    a("--latency", default="0ms", help="delays of the policy, e.g. 0,100ms,2ticks; milliseconds round up to ticks")
    a("--jitter", choices=JITTERS, default="none", help="of the delays (default: %(default)s)")
    a("--swap-instruction", action="store_true", help="also instruct another variant than the one that counts")
    a("--randomisation", type=int, choices=(0, 1, 2), default=0, help="level of the sim tasks (default: %(default)s)")
    a("--visuals", choices=("fast", "official"), help="benchmarks: without shadows and antialiasing, or with (fast)")
    a("--num-envs", type=_positive, default=8, help="episodes that run at the same time (default: %(default)s)")
    a("--workers", type=whole, help="processes for the environments; 0 for none (default: one a core)")
    a("--rollouts", choices=("local", "ray"), default="local", help="where the workers are (default: %(default)s)")
    a(
        "--device",
        default="cpu",
        type=device,
        help="where the policy runs: cpu, cuda, cuda:1, auto, ... (default: %(default)s)",
    )
    a("--videos", type=whole, default=3, help="films of each outcome and setting (default: %(default)s)")
    a("--out", type=Path, default=Path("outputs/eval"), help="directory of the report (default: %(default)s)")


def main(args: argparse.Namespace) -> int:
    from vla_stack.policies.shipped import resolve_policy

    resolve_policy(args.policy)  # before torch is loaded
    from vla_stack.policies.device import find_device

    args.device = str(find_device(args.device))  # first, and what a report says
    path, policy = _load(args.policy, args.device, args.embodiment)
    about = {"policy": f"{path} ({policy.spec.model_version[:12] or 'no version'})", "device": args.device}
    with cluster(_workers(args)) if args.rollouts == "ray" else nullcontext():  # one for all settings
        results = run_settings(policy, args, about)
    print(table(results))
    report = _report(results, args, f"Evaluation of {path.name}", about)
    print(f"\nReport: {report}   figures: {report.with_suffix('.json')}")
    return 0


def run_settings(policy: ChunkPolicy, args: argparse.Namespace, about: dict[str, Any]) -> list[EvalResult]:
    """Every environment in every mode at every latency, and with the wrong instruction where that is asked for.

    After each setting the records of those done are in ``report.json``, whatever ends the command before its report.
    """
    latencies = parse_latencies(args.latency, policy.spec.robot.rate_hz, args.jitter)
    instructs: tuple[Instruct, ...] = (None, "swap") if args.swap_instruction else (None,)
    modes = able_modes(policy) if "all" in args.mode else args.mode
    results: list[EvalResult] = []
    origin = provenance()
    for env_id in args.env or ["sim/pick-v0"]:
        options: dict[str, Any] = {}
        if args.randomisation and is_task(env_id):
            options["randomisation"] = args.randomisation
        if args.max_steps:
            options["max_episode_steps"] = args.max_steps
        if args.visuals and is_benchmark(env_id):
            options["visuals"] = args.visuals
        for mode, latency, instruct, execute in product(modes, latencies, instructs, args.execute or [None]):
            executor = ExecutorConfig(mode=mode, execute=execute)
            with _progress(f"{env_id}  {describe(executor, latency, instruct)}", args.episodes) as on_episode:
                result = evaluate(
                    policy,
                    env_id,
                    episodes=args.episodes,
                    seed=args.seed,
                    executor=executor,
                    latency=latency,
                    instruct=instruct,
                    num_envs=args.num_envs,
                    workers=_workers(args),
                    rollouts=args.rollouts,
                    env_options=options,
                    on_episode=on_episode,
                )
            results.append(result)
            save_records(results, args.out / "report.json", **origin, **about)
    return results


def able_modes(policy: ChunkPolicy) -> list[str]:
    """The execution modes that a policy can be run in."""
    absolute = policy.spec.robot.action_kind == "absolute"
    able = [*policy.spec.extras.get("continues", ()), *(["future_state"] if absolute else [])]
    return [mode for mode in MODES if mode in ("sync", "naive", "ensemble") or mode in able]


def table(results: Sequence[EvalResult]) -> str:
    """What was measured, one aligned line a setting, and the mean over settings with the right instruction."""
    names = [f"{r.name}  {r.label}" for r in results]
    width = max(map(len, names))
    scores = frequency_scores(results)
    heads = "  success   95 % interval   episodes   time to success   idle   seams"
    lines = [f"\n{'':<{width}}{heads}" + "   FAS" * any(s is not None for s in scores)]
    for name, r, score in zip(names, results, scores, strict=True):
        low, high = r.interval
        time = f"{r.seconds_to_success:.1f} s" if r.successes else "–"
        lines.append(
            f"{name:<{width}}  {r.success_rate:>6.0%}    {f'{low:.0%} – {high:.0%}':<13}   "
            f"{f'{r.successes}/{len(r.episodes)}':>8}   {time:>15}   {r.idle_fraction:>4.0%}   "
            + (f"{r.discontinuity:>5.1f}" if math.isfinite(r.discontinuity) else "    –")
            + (f"  {score:>4.2f}" if score is not None else "")
        )
        judged = [e.instructed_success for e in r.episodes if e.instructed_success is not None]
        if r.settings.get("instruct") and judged:
            lines.append(f"{'':<{width}}  {sum(judged) / len(judged):>6.0%}    of what was instructed")
    straight = [r.success_rate for r in results if not r.settings.get("instruct")]
    if len(straight) > 1:
        lines.append(f"{'mean':<{width}}  {sum(straight) / len(straight):>6.0%}")
    return "\n".join(lines)


def frequency_scores(results: Sequence[EvalResult]) -> list[float | None]:
    """Of each result the frequency-averaged score of its setting; None where that was run at one frequency alone."""

    def setting(r: EvalResult) -> tuple[Any, ...]:
        return (r.name, *(r.settings.get(k) for k in ("mode", "latency_s", "jitter", "instruct")))

    groups = [[other for other in results if setting(other) == setting(r)] for r in results]
    return [frequency_averaged_score(group) if len(group) > 1 else None for group in groups]


def _load(name: str, device: str, embodiment: str | None) -> tuple[Path, ChunkPolicy]:
    from vla_stack.policies.chunk_policy import load_policy
    from vla_stack.policies.shipped import resolve_policy

    path = resolve_policy(name)
    return path, load_policy(path, device, embodiment, frozen=True)


def _workers(args: argparse.Namespace) -> int:
    if args.workers is not None:
        return max(0, args.workers)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, args.num_envs, 16)


@contextmanager
def _progress(title: str, episodes: int) -> Iterator[Callable[[EpisodeRecord], None]]:
    """A progress bar with the success so far and its interval."""
    done = wins = 0
    with tqdm(total=episodes, desc=title, unit="ep", dynamic_ncols=True) as bar:

        def on_episode(record: EpisodeRecord) -> None:
            nonlocal done, wins
            done, wins = done + 1, wins + record.success
            low, high = wilson(wins, done)
            bar.set_postfix_str(f"success {wins}/{done} [{low:.0%} – {high:.0%}]", refresh=False)
            bar.update()

        yield on_episode


def _report(results: Sequence[EvalResult], args: argparse.Namespace, title: str, about: dict[str, Any]) -> Path:
    from vla_stack.evaluation.report import write_report
    from vla_stack.evaluation.video import film

    filmed = [film(r, args.out / "videos", args.videos) for r in tqdm(results, desc="films", leave=False)]
    return write_report(filmed, args.out / "report.html", title, about)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value

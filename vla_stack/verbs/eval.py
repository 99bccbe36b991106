"""``vla eval``: roll a policy out in simulation and report success with its interval."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from vla_stack.data.layout import write_json
from vla_stack.envs.making import IMAGINED, check_id, is_benchmark, is_task
from vla_stack.errors import UserError
from vla_stack.evaluation.evaluate import OnEpisode, describe, evaluate
from vla_stack.evaluation.metrics import frequency_averaged_score
from vla_stack.evaluation.monitoring import Listening, monitored, policy_features
from vla_stack.evaluation.provenance import provenance
from vla_stack.evaluation.suite import SUITES, Terms, run_suite, splits_of
from vla_stack.evaluation.suite import table as table_of_splits
from vla_stack.light_torch import import_torch
from vla_stack.ray_cluster import cluster
from vla_stack.rollout.engine import ChunkPolicy
from vla_stack.rollout.latency import JITTERS, parse_latencies
from vla_stack.rollout.plan import Instruct
from vla_stack.rollout.records import EpisodeRecord, EvalResult, save_records
from vla_stack.runtime.executor import MODES, ExecutorConfig
from vla_stack.runtime.monitor import Monitor
from vla_stack.statistics import success_interval
from vla_stack.verbs.arguments import device, given, positive, whole
from vla_stack.verbs.out_folder import out_folder, policy_name

if TYPE_CHECKING:
    from vla_stack.policies.chunk_policy import ChunkPolicy as LoadedPolicy
    from vla_stack.policies.continuation import Continuing

HELP = "Roll a policy out in simulation, under a virtual clock, and report success with its interval."
EXAMPLES = (
    "vla eval                                                  # the shipped policy on sim/pick-v0",
    "vla eval --policy runs/pick --env sim/pick-v0 sim/place-v0 --episodes 200",
    "vla eval --latency 0,100ms,300ms --mode sync naive rtc    # the same scenes in three modes at three delays",
    "vla eval --latency 200ms --jitter gamma --mode all        # every way in which the policy can be executed",
    "vla eval --mode all --execute 2 4 8                       # deciding more or less often; FAS is the mean over it",
    "vla eval --env imagined:shipped --episodes 20             # in a world model; docs/world_model.md",
    "vla eval --policy runs/wsrl --mode sync                    # WSRL or EXPO, on the states that it was trained on",
    "vla eval --rollouts ray --workers 16                      # simulated by actors on Ray",
    "vla eval --swap-instruction                               # is the instruction really followed?",
    "vla eval --suite shifts --env sim/pick-v0 sim/place-v0    # camera, light, ... each beside the same starts",
    "vla eval --suite shifts --splits camera distractors       # some of its splits",
    "vla eval --policy runs/metaworld --env metaworld/push-v3  # a benchmark: metaworld/<task>, aloha/transfer_cube,",
    "                                                          # aloha/insertion, libero/<suite>/<index of the task>",
    "vla eval --open-loop --data data/held_out --policy runs/pick    # error of its chunks; nothing moves",
)

OF_ROLLOUTS = (
    *("env", "suite", "mode", "latency", "jitter", "swap_instruction", "randomisation", "visuals", "max_steps"),
    *("schedule", "beta", "weak", "monitor", "videos", "num_envs", "workers", "rollouts", "starts"),
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
    a("--suite", choices=tuple(SUITES), help="run splits, each beside the same starts without its change")
    a("--splits", nargs="+", help="of the suite, or of the task's own (default: all)")
    a("--open-loop", action="store_true", help="roll nothing out: error of the chunks from those of a recorded dataset")
    a("--data", type=Path, help="open loop: the dataset, one that the policy was not trained on")
    a("--randomisation", type=int, choices=(0, 1, 2, 3), default=0, help="level of our tasks (default: %(default)s)")
    a("--starts", type=Path, metavar="DATASET", help="imagined: with whose first frames episodes begin")
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
    a(
        "--schedule",
        choices=("exp", "linear", "ones", "zeros"),
        default="exp",
        help="how firmly rtc, rtc_identity and bid hold to the plan, step by step (default: %(default)s, the paper's)",
    )
    a("--beta", type=positive, help="largest guidance weight of rtc and rtc_identity (default: the Euler steps)")
    a("--weak", metavar="POLICY", help="a weaker policy, an early checkpoint for instance, that bid keeps away from")
    a("--monitor", type=Path, metavar="FILE", help="of `vla monitor fit`: when it would have called for help")
    a("--videos", type=whole, default=3, help="films of each outcome and setting (default: %(default)s)")
    a(
        "--out",
        type=Path,
        help="directory of the report, which replaces one that is there (default: a new outputs/eval/POLICY-TIME)",
    )


def main(args: argparse.Namespace) -> int:
    from vla_stack.policies.directory import check_robot, resolve_policy

    check_suite(args)
    check_open_loop(args)
    check_robot(resolve_policy(args.policy), args.embodiment)  # before torch is loaded
    for env_id in args.env or ():
        check_id(env_id)
    if args.starts and not any(env_id.startswith(IMAGINED) for env_id in args.env or ()):
        raise UserError("--starts is of imagined episodes", "give --env imagined:RUN, or leave it out")
    args.out = out_folder(args.out, "outputs/eval", policy_name(args.policy))  # not after hours of episodes
    print(f"loading {args.policy}; results go to {args.out}", file=sys.stderr, flush=True)  # it may take a while
    import_torch()
    from vla_stack.policies.reading import find_device

    args.device = str(find_device(args.device))  # first, and what a report says
    path, policy = _load(args.policy, args.device, args.embodiment)
    policy.continuing = _continuing(policy, args)
    about = {"policy": f"{path} ({policy.spec.model_version[:12] or 'no version'})", "device": args.device}
    if args.open_loop:
        return without_moving(policy, path, args, about)
    with cluster(_workers(args)) if args.rollouts == "ray" else nullcontext():  # one for all settings
        if args.suite:
            return suite(policy, args, about)
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
    terms = continuing_terms(args)
    origin = provenance()
    monitor = Monitor.load(args.monitor) if args.monitor else None
    if monitor is not None:
        monitor.check(policy.spec.model_version, policy.spec.robot)  # before the first episode
    acting = policy if monitor is None else Listening(policy, policy_features(policy) if monitor.features else None)
    for env_id in args.env or ["sim/pick-v0"]:
        options: dict[str, Any] = {}
        if args.randomisation and is_task(env_id):
            options["randomisation"] = args.randomisation
        if args.max_steps:
            options["max_episode_steps"] = args.max_steps
        if args.visuals and is_benchmark(env_id):
            options["visuals"] = args.visuals
        if args.starts and env_id.startswith(IMAGINED):
            options["starts"] = str(args.starts)
        for mode, latency, instruct, execute in product(modes, latencies, instructs, args.execute or [None]):
            executor = ExecutorConfig(mode=mode, execute=execute)
            with _progress(f"{env_id}  {describe(executor, latency, instruct)}", args.episodes) as on_episode:
                result = evaluate(
                    acting,
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
            if terms and mode in policy.spec.extras.get("continues", ()):
                result = replace(result, label=f"{result.label}, {terms}", settings=result.settings | {"terms": terms})
            if monitor is not None and isinstance(acting, Listening):
                result = monitored(monitor, acting, result)
            results.append(result)
            save_records(results, args.out / "report.json", **origin, **about)
    return results


def continuing_terms(args: argparse.Namespace) -> str:
    """How a plan is continued, where that is not the default: part of a setting's name, so that none is another's."""
    beta, weak = f"beta {args.beta:g}" if args.beta else "", f"weak {policy_name(args.weak)}" if args.weak else ""
    return ", ".join(term for term in (args.schedule * (args.schedule != "exp"), beta, weak) if term)


def suite(policy: ChunkPolicy, args: argparse.Namespace, about: dict[str, Any]) -> int:
    """Splits of every environment beside their matched arms, as one table and as ``suite.json``."""
    executor = ExecutorConfig(mode=args.mode[0], execute=(args.execute or [None])[0])
    latency = parse_latencies(args.latency, policy.spec.robot.rate_hz, args.jitter)[0]
    limit = {"max_episode_steps": args.max_steps} if args.max_steps else {}
    names = args.splits or SUITES[args.suite]
    splits = {e: splits_of(e, names, own=not args.splits) for e in args.env or ["sim/pick-v0"]}

    def progress(title: str) -> AbstractContextManager[OnEpisode]:
        return _progress(title, args.episodes)

    continued = f"{args.schedule} {args.beta} {args.weak}"
    terms = Terms(args.episodes, args.seed, executor, latency, limit, continued=continued)
    how = {"num_envs": args.num_envs, "workers": _workers(args), "rollouts": args.rollouts}
    rows = run_suite(policy, splits, terms, args.out / "splits", progress, **how)
    settings = {"suite": args.suite, "mode": executor.mode, "latency_s": latency.mean_s, **asdict(terms)}
    found = {"settings": settings, "rows": [row.to_json() for row in rows]}
    write_json(args.out / "suite.json", {**provenance(), **about, **found})
    print(table_of_splits(rows))
    print(f"\nFigures: {args.out / 'suite.json'}; with --out {args.out} a split that is done is not run again")
    return 0


def check_suite(args: argparse.Namespace) -> None:
    """One setting for all splits, and no further randomisation; raises :class:`UserError`."""
    if args.splits and not args.suite:
        raise UserError("--splits are of a suite", f"give --suite {' or --suite '.join(SUITES)}")
    if not args.suite:
        return
    for option, values in (
        ("--mode", args.mode),
        ("--execute", args.execute or []),
        ("--latency", args.latency.split(",")),
    ):
        if len(values) > 1 or "all" in values:
            raise UserError(f"--suite runs one setting, {option} names several", "give one")
    for option in given(
        add_arguments, args, "randomisation", "visuals", "swap_instruction", "monitor", "videos", "starts"
    ):
        raise UserError(f"--suite and {option} do not go together", "leave one of them out")


def without_moving(policy: ChunkPolicy, path: Path, args: argparse.Namespace, about: dict[str, Any]) -> int:
    """Errors in recorded states, as a table, as ``open_loop.json`` and as a picture.

    Of the episodes that the policy's own training held out, where it did so with this dataset; else of all.
    """
    from vla_stack.data.dataset import open_dataset
    from vla_stack.evaluation.open_loop import open_loop, table
    from vla_stack.evaluation.plots import error_plot
    from vla_stack.training.validation import held_out_by

    dataset = open_dataset(args.data)
    held_out = held_out_by(path.parents[2], dataset) if len(path.parents) > 2 else None  # run/checkpoints/STEP/policy
    every = (args.execute or [None])[0]
    with tqdm(desc=str(args.data), unit=" chunks", dynamic_ncols=True) as bar:
        found = open_loop(policy, dataset, args.episodes, every, args.seed, bar.update, held_out)
    targets = {target: errors.to_json() for target, errors in found.items()}
    settings = {"data": str(args.data), "execute": every, "seed": args.seed, "held_out": held_out}
    write_json(args.out / "open_loop.json", {**provenance(), **about, "settings": settings, "targets": targets})
    (args.out / "open_loop.svg").write_text(error_plot(targets))
    print(table(found))
    print("\nof the episodes that its training held out" if held_out else "\nof all episodes, trained on or not")
    print(f"Figures: {args.out / 'open_loop.json'}   picture: {args.out / 'open_loop.svg'}")
    return 0


def check_open_loop(args: argparse.Namespace) -> None:
    """A dataset takes the place of environments; raises :class:`UserError`."""
    if args.open_loop != (args.data is not None):
        raise UserError("--open-loop and --data need each other", "vla eval --open-loop --data datasets/held_out")
    if not args.open_loop:
        return
    if args.execute and len(args.execute) > 1:
        raise UserError("--open-loop decides at one frequency, --execute names several", "give one")
    for option in given(add_arguments, args, *OF_ROLLOUTS):
        raise UserError(f"--open-loop rolls nothing out, {option} is of rollouts", "leave one of them out")


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
        lines += [f"{'':<{width}}  {note}" for note in r.notes]
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


def _load(name: str, device: str, embodiment: str | None) -> tuple[Path, LoadedPolicy]:
    from vla_stack.policies.chunk_policy import load_policy
    from vla_stack.policies.directory import resolve_policy

    path = resolve_policy(name)
    return path, load_policy(path, device, embodiment, frozen=True)


def _continuing(policy: LoadedPolicy, args: argparse.Namespace) -> Continuing:
    """What the modes that continue a plan leave open.

    Raises:
        UserError: The weaker policy's chunks are not of the policy's own actions and length.
    """
    from vla_stack.policies.continuation import Continuing

    if args.weak is None:
        return Continuing(args.schedule, args.beta)
    path, weak = _load(args.weak, args.device, args.embodiment)
    if (weak.spec.normalisation, weak.spec.horizon) != (policy.spec.normalisation, policy.spec.horizon):
        raise UserError(
            f"--weak: {path} has other statistics or another chunk length", "give a checkpoint of the same run"
        )
    return Continuing(args.schedule, args.beta, weak.policy)


def _workers(args: argparse.Namespace) -> int:
    if args.workers is not None:
        return max(0, args.workers)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    fitting = min(cores, args.num_envs, args.episodes, 16)
    # A single process beside this one would only be waited for.
    return fitting if fitting > 1 or args.rollouts == "ray" else 0


@contextmanager
def _progress(title: str, episodes: int) -> Iterator[Callable[[EpisodeRecord], None]]:
    """A progress bar with the success so far and its interval."""
    done = wins = 0
    with tqdm(total=episodes, desc=title, unit="ep", dynamic_ncols=True) as bar:

        def on_episode(record: EpisodeRecord) -> None:
            nonlocal done, wins
            done, wins = done + 1, wins + record.success
            low, high = success_interval(wins, done).interval
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

"""``vla compare``: which of several policies is better, on common starts, stopping as soon as that is known."""

from __future__ import annotations

import argparse
import math
import random
import re
import secrets
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from tqdm import tqdm

from vla_stack.errors import UserError
from vla_stack.evaluation.compare import Comparison, sentences
from vla_stack.verbs.arguments import count, device, given, positive, share, whole
from vla_stack.verbs.robot_arguments import add_execution_arguments, key_values

HELP = "Say which of several policies is better, on common starts, and stop as soon as that is known."
EXAMPLES = (
    "vla compare shipped runs/pick --env sim/pick-v0 --budget 200",
    "vla compare runs/a runs/b runs/c --env sim/place-v0          # several: a ranking with intervals as well",
    "vla compare runs/a runs/b --margin 0.05 --budget 1000        # 5 points matter; run again, it goes on",
    "vla compare tcp://gpu:5555 tcp://gpu:5556 --robot.type=so101_follower --robot.port=/dev/ttyACM0 \\\n"
    "      --task 'pick the cube' --seconds 30 --budget 30          # blind: order drawn, policy hidden, you score",
)
ROBOTS = ("robot_arg", "task", "limits", "seconds", "hold_s", "interpolate")  # options that nothing simulated takes
SIMULATED = ("env", "num_envs", "workers", "device")  # and those that a robot does not
BLOCK = 10  # simulated starts between looks; fewer leave environments idle


def add_arguments(parser: argparse.ArgumentParser) -> None:
    a = parser.add_argument
    a("policies", nargs="+", metavar="POLICY", help="two or more: policy or run directories, or shipped ones' names")
    a("--env", default="sim/pick-v0", help="where (default: %(default)s)")
    a("--budget", type=count, default=200, help="starts of each policy, at most (default: %(default)s)")
    a("--margin", type=share, default=0.1, help="difference of success that would matter (default: %(default)s)")
    a("--alpha", type=share, default=0.05, help="chance that a verdict is wrong, over all (default: %(default)s)")
    a("--seed", type=whole, default=1000, help="of the first start (default: %(default)s)")
    a("--num-envs", type=count, default=8, help="episodes that run at the same time (default: %(default)s)")
    a("--workers", type=whole, default=0, help="processes for the environments (default: none)")
    a("--device", default="cpu", type=device, help="where the policies run (default: %(default)s)")
    a("--robot", help="compare on a robot, as for `vla run`; policies are then endpoints of `vla serve`")
    a("--robot-arg", action="append", default=[], metavar="KEY=VALUE", help="argument of the driver; repeatable")
    a("--task", help="robot: the instruction; of the simulated one, the task")
    a("--limits", type=Path, metavar="FILE", help="limits of this robot; `vla robot check --write` makes one")
    a("--seconds", type=positive, help="robot: longest episode")
    add_execution_arguments(parser, "--mode")
    a("--out", type=Path, help="directory of comparison.json (default: outputs/compare/ENV-POLICY-POLICY)")


def main(args: argparse.Namespace) -> int:
    if len(args.policies) < 2:
        raise UserError(f"one policy alone ({args.policies[0]}) is compared with nothing", "name another one")
    if twice := [p for p in args.policies if args.policies.count(p) > 1]:
        raise UserError(f"{twice[0]} is named twice", "name different policies")
    check_place(args)
    comparison = Comparison(tuple(args.policies), args.margin, args.alpha)
    path = (args.out or Path("outputs/compare", name_of(args))) / "comparison.json"
    try:
        (on_robot if args.robot else simulated)(args, comparison, path)
    finally:
        if comparison.outcomes:
            comparison.save(path)
    print("\n".join(["", *sentences(comparison), "", f"Figures: {path}"]))
    if comparison.playing():
        print(f"The budget is used up; the same command with --budget {2 * args.budget} goes on.")
    return 0


def check_place(args: argparse.Namespace) -> None:
    """Refuse options of a robot in simulation, and the other way round: it would be ignored unnoticed."""
    for option in given(add_arguments, args, *(SIMULATED if args.robot else ROBOTS)):
        where, remedy = ("--robot", "leave one of them out") if args.robot else ("--env", "add --robot")
        if option == "--task":
            remedy = f"the simulated task is --env sim/{args.task}-v0; a robot needs --robot"
        raise UserError(f"{option} does nothing beside {where}", remedy)


def name_of(args: argparse.Namespace) -> str:
    """What a comparison is called: the same for the same command, so that it goes on where it ended."""
    parts = [args.robot or args.env, *args.policies]
    return "-".join(re.sub(r"[^\w.-]+", "_", part.rstrip("/").rpartition("/")[2]) for part in parts)


def simulated(args: argparse.Namespace, comparison: Comparison, path: Path) -> None:
    """Play in simulation: one engine a policy, open until the end."""
    from vla_stack.policies.directory import resolve_policy

    folders = [resolve_policy(name) for name in args.policies]  # before torch is loaded
    from vla_stack import envs
    from vla_stack.policies.chunk_policy import load_policy
    from vla_stack.policies.reading import find_device
    from vla_stack.rollout.agents import PolicyAgent
    from vla_stack.rollout.engine import Engine
    from vla_stack.rollout.plan import Plan, Start
    from vla_stack.runtime.executor import ExecutorConfig

    where = str(find_device(args.device))
    policies = {n: load_policy(f, where, frozen=True) for n, f in zip(args.policies, folders, strict=True)}
    comparison.about = {
        "env": args.env,
        "seed": args.seed,
        "mode": args.mode,
        "execute": args.execute,
        "policies": {name: policy.spec.model_version for name, policy in policies.items()},
    }
    comparison.resume(path)
    with ExitStack() as stack, tqdm(total=args.budget, unit="start", dynamic_ncols=True) as bar:
        engines: dict[str, Engine] = {}

        def play(comparison: Comparison, name: str, starts: Sequence[int]) -> None:
            policy = policies[name]
            if name not in engines:
                options = envs.options_for(args.env, policy.spec, {})
                how = ExecutorConfig(args.mode, args.execute)
                plan = Plan(args.env, options, policy.spec, PolicyAgent, executor=how)
                engines[name] = stack.enter_context(Engine(plan, args.num_envs, args.workers))
            for record in engines[name].run(policy, [Start(seed) for seed in starts]):
                comparison.note(name, record.seed, record.success)

        def on_block(used: int) -> None:
            comparison.save(path)
            bar.update(used - bar.n)

        comparison.run(play, range(args.seed, args.seed + args.budget), BLOCK, on_block)


def on_robot(args: argparse.Namespace, comparison: Comparison, path: Path) -> None:
    """Play on a robot, blind: the order of each start is drawn, and a person scores."""
    from vla_stack.verbs.holding import leave_holding

    key_values(args.robot_arg)
    unlike = [p for p in args.policies if "://" not in p]
    if unlike:
        raise UserError(
            f"{unlike[0]} is no endpoint of a policy server", "on a robot: `vla serve` each, give tcp://..."
        )
    versions = {name: version_of(name) for name in args.policies}  # another policy may be served there by now
    comparison.about = {
        "robot": args.robot,
        "robot arguments": sorted(args.robot_arg),
        "task": args.task,
        "limits": limits_of(args),
        "seed": args.seed,
        "seconds": args.seconds,
        "mode": args.mode,
        "execute": args.execute,
        "hold_s": args.hold_s,
        "interpolate": args.interpolate,
        "policies": versions,
    }
    comparison.resume(path)
    order = random.Random(secrets.randbits(64))
    print("Which policy drives is drawn anew at each start and not shown. Set the same scene for each of them.")
    try:
        for start in range(args.budget):
            missing = [name for name in comparison.playing() if comparison.missing(name, [start])]
            for turn, name in enumerate(order.sample(missing, len(missing))):
                title = f"start {start + 1} of at most {args.budget}, turn {turn + 1} of {len(missing)}"
                comparison.note(
                    name, start, scored(partial(drive, args, name, versions[name], args.seed + start), title)
                )
                comparison.save(path)
            if not comparison.playing():
                return
    finally:
        leave_holding(args, interrupted=False)


def version_of(server: str) -> str:
    """Which policy is served there; empty where that has no version.

    Raises:
        UserError: Nobody answers.
    """
    from vla_stack.verbs.run import served

    policy = served(server)
    return policy.model_version if policy is not None else ""


def limits_of(args: argparse.Namespace) -> Any:
    """What the limits file says, checked; None without one."""
    from vla_stack.verbs.robot_arguments import robot_limits

    return yaml.safe_load(args.limits.read_text()) if robot_limits(args) else None


def drive(args: argparse.Namespace, server: str, version: str, seed: int) -> None:
    """One episode of the policy behind a server.

    Raises:
        UserError: It is another one than when the comparison began.
    """
    from vla_stack.runtime.node import RobotNode
    from vla_stack.verbs.robot_arguments import driver_maker, execution, robot_safety
    from vla_stack.verbs.run import policy_options

    maker = driver_maker(args, **policy_options(args, server))
    with RobotNode(server, maker, execution(args, args.mode), robot_safety(args)) as node:
        if node.model_version != version:
            raise UserError(f"{server} serves another policy than when this began", "start it again with another --out")
        ticks = None if args.seconds is None else math.ceil(args.seconds * node.robot.rate_hz)
        node.run_episode(seed, ticks)


def scored(play: Callable[[], Any], title: str) -> bool:
    """Play until a person has said whether it succeeded.

    Raises:
        UserError: Nobody can answer.
    """
    from vla_stack.verbs.terminal import wait_for_scene

    while True:
        wait_for_scene(f"{title}: set the scene, then press Enter ")
        play()
        answer = ""
        while answer not in ("y", "n", "r"):
            try:
                answer = input("did it succeed? y, n, or r to repeat it ").strip().lower()
            except EOFError:
                raise UserError("nobody is at the keyboard to score", "run it in a terminal") from None
        if answer != "r":
            return answer == "y"

"""``vla run``: drive a robot, simulated or real, in real time against a policy server."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from vla_stack.errors import UserError
from vla_stack.runtime.monitor import Monitor, Watch
from vla_stack.runtime.node import RobotNode
from vla_stack.schema import PolicySpec
from vla_stack.serving.clients import open_client
from vla_stack.serving.endpoint import OPENPI_SCHEMES, OpenpiAddress
from vla_stack.serving.pictures import Pictures
from vla_stack.statistics import success_interval
from vla_stack.verbs.arguments import count, existing, positive, whole
from vla_stack.verbs.holding import leave_holding
from vla_stack.verbs.openpi_arguments import add_openpi_arguments, read_token, renamed_keys
from vla_stack.verbs.out_folder import out_folder
from vla_stack.verbs.robot_arguments import (
    add_execution_arguments,
    add_robot_arguments,
    capabilities,
    driver_maker,
    execution,
    key_values,
    robot_safety,
)
from vla_stack.verbs.run_session import Session, first_seed, log_opener, outcome, recording_opener
from vla_stack.verbs.terminal import Keys, wait_for_scene

HELP = "Run a robot (simulated or real) in real time against a policy server."
EXAMPLES = (
    "vla run --robot sim --task pick --episodes 50 --mode naive",
    "vla run --robot sim --task pick --mode sync --record-video 4",
    "vla run --robot sim --task pick --episodes 20 --record episodic --root data/runs    # each episode into a dataset",
    "vla run --robot sim --task pick --record sentry --root data/odd --last 5    # 5 s around stops, stalls and limits",
    "vla run --robot sim --task pick --monitor monitor.json --rearm ask    # hold and ask when it is about to fail",
    "vla run --robot sim --task pick --log run.mcap    # then open it in Foxglove, or `vla data import` it",
    "vla run --robot.type=so101_follower --robot.port=/dev/ttyACM0 --robot.id=arm --limits limits.yaml \\\n"
    "      --server tcp://gpu:5555 --task 'pick the cube' --seconds 30",
    "vla run --robot sim --server ws://gpu:8000 --keys front=observation/image --mode naive   # an openpi server",
    "vla run --robot.type=so101_follower --robot.port=/dev/ttyACM0 --robot.id=arm --mode rtc --interpolate 4",
    "vla run --robot.type=so101_follower --robot.port=/dev/ttyACM0 --robot.id=arm --dry-run --seconds 5",
)
KEEPING = ("episodic", "sentry", "highlight")
REAL_TIME = 0.99  # an episode that was simulated slower than this measures the computer, not the policy


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_robot_arguments(parser)
    add = parser.add_argument
    add(
        "--server",
        default="tcp://127.0.0.1:5555",
        help="endpoint of `vla serve`, or ws:// of an openpi server (default: %(default)s)",
    )
    add_openpi_arguments(parser)
    add("--tls", type=existing, metavar="CERT", help="openpi: certificate of a wss:// server that no authority signed")
    add(
        "--pictures",
        default="auto",
        metavar="FORM",
        help="how pictures are sent: camera (as it gives them), raw (as the policy reads them), jpeg or jpeg:QUALITY "
        "(that, compressed); auto: camera on this machine, else what the link, measured once, is faster with "
        "(default: %(default)s)",
    )
    add("--episodes", type=count, default=1, help="how many (default: %(default)s)")
    add(
        "--seed",
        type=whole,
        help="of the first episode; the next one takes the next (default: 0; with --record as many as --root holds)",
    )
    add("--seconds", type=positive, help="longest episode (default: until the task says that it is over)")
    add_execution_arguments(parser, "--mode")
    add("--workspace", action="append", default=[], metavar="DIM=LOW:HIGH", help="narrower limits; repeatable")
    add(
        "--rearm",
        choices=("auto", "ask"),
        help="after a STOP: go on, or wait for Enter (default: auto where the robot is simulated)",
    )
    add("--dry-run", action="store_true", help="print commands, send none to the robot")
    add("--log", type=Path, metavar="FILE.mcap", help="write states, commands, chunks, pictures, events; for Foxglove")
    add("--record", choices=KEEPING, help="into --root: every episode, seconds around events, or around the key k")
    add("--root", type=Path, help="with --record: LeRobotDataset to write (created, or appended to)")
    add("--last", type=positive, default=10.0, help="seconds kept before and after an event (default: %(default)g)")
    add("--monitor", type=Path, metavar="FILE", help="of `vla monitor fit`: hold and ask before the policy fails")
    add("--record-video", type=whole, default=0, metavar="N", help="film the first N episodes")
    add("--out", type=Path, help="records, summary and films (default: a new outputs/run/ROBOT-TIME)")


def main(args: argparse.Namespace) -> int:
    signal.signal(signal.SIGTERM, _interrupt)
    key_values(args.robot_arg)
    open_log, open_recording = log_opener(args.log), recording_opener(args)
    args.seed = first_seed(args)
    how, safety = execution(args, args.mode, args.seed), robot_safety(args)
    monitor = Monitor.load(args.monitor) if args.monitor else None
    can, pictures = capabilities(args), Pictures.parse(args.pictures)
    asks = (args.rearm or ("auto" if can.simulated else "ask")) == "ask"
    server, keys = server_of(args), Keys()
    session = Session(args, keys, asks)
    args.out = out_folder(args.out, "outputs/run", args.robot)
    node = RobotNode(
        server,
        driver_maker(args, args.dry_run, **policy_options(args, server)),
        how,
        replace(safety, workspace={**safety.workspace, **dict(_box(text) for text in args.workspace)}),
        rearm=keys.entered if asks else _yes,
        on_state=session.tell,
        on_beat=session.beat,
        pictures=pictures,
    )
    episodes: list[dict[str, Any]] = []
    start, interrupted = time.monotonic(), False
    with contextlib.ExitStack() as stack:
        stack.enter_context(node)
        if monitor is not None:
            monitor.check(node.model_version, node.robot)
            session.watch = Watch(monitor)
        session.log = stack.enter_context(open_log(node.robot)) if open_log else None
        session.recording = stack.enter_context(open_recording(node)) if open_recording else None
        print(f"{node.robot.name} at {node.robot.rate_hz:g} Hz, {args.mode}, policy {node.model_version[:12]}")
        print(node.guard.value, flush=True)
        try:
            for i in range(args.episodes):
                if not can.simulated:
                    wait_for_scene(f"episode {i + 1} of {args.episodes}: set the scene, then press Enter ")
                episodes.append(session.drive(node, i))
                _save(args, node, episodes, time.monotonic() - start)
                print(_line(episodes, args.episodes), flush=True)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            session.close()
            if episodes:
                print(_closing(args.out, episodes))
    if not args.dry_run:
        leave_holding(args, interrupted)
    return 130 if interrupted else 0


def policy_options(args: argparse.Namespace, server: str | OpenpiAddress) -> dict[str, Any]:
    """Arguments of the driver that follow from the policy: its pictures and rate, a simulation's commands too."""
    like = capabilities(args).like
    policy = served(server)
    return like(policy.robot) if policy is not None else {}


def served(server: str | OpenpiAddress) -> PolicySpec | None:
    """The policy behind a server; None where that says nothing about it.

    Raises:
        UserError: It does not answer.
    """
    client = open_client(server)
    try:
        return client.hello(None)
    finally:
        client.close()


def server_of(args: argparse.Namespace) -> str | OpenpiAddress:
    """Where ``--server`` is, and what it has to be told."""
    if args.server.partition("://")[0] not in OPENPI_SCHEMES:
        return str(args.server)
    return OpenpiAddress(args.server, renamed_keys(args), args.token and read_token(args.token), args.tls)


def summarise(episodes: list[dict[str, Any]]) -> dict[str, Any]:
    """Success with its interval, of the episodes that were judged, and how well time was kept, over all of them."""
    judged = [e["success"] for e in episodes if e["success"] is not None]
    n, successes = len(judged), sum(judged)
    seconds = [e["duration_s"] for e in episodes if e["success"]]
    swaps = [(int(d), count) for e in episodes for d, count in e["delay_ticks"]["counts"].items()]
    return {
        "episodes": len(episodes),
        "judged": n,
        "successes": successes,
        "success_rate": successes / n if n else None,
        "interval_95": list(success_interval(successes, n).interval) if n else None,
        "median_seconds_to_success": statistics.median(seconds) if seconds else None,
        "idle_fraction": sum(e["idle_ticks"] for e in episodes) / max(1, sum(e["steps"] for e in episodes)),
        "delay_ticks_mean": sum(d * c for d, c in swaps) / max(1, sum(c for _, c in swaps)),
        "delay_ticks_max": max((d for d, _ in swaps), default=0),
        "overruns": sum(e["ticks"]["overrun"] for e in episodes),
        "stops": sum(e["ticks"].get("stop", 0) > 0 for e in episodes),
        "lateness_ms_p99_median": statistics.median(e["lateness_ms"]["p99"] for e in episodes),
        "lateness_ms_max": max(e["lateness_ms"]["max"] for e in episodes),
        "real_time_factor_min": min(e["real_time_factor"] for e in episodes),
        "slower_than_real_time": sum(e["real_time_factor"] < REAL_TIME for e in episodes),
    }


def _save(args: argparse.Namespace, node: RobotNode, episodes: list[dict[str, Any]], wall_s: float) -> None:
    """Write all records so far, complete or not at all: an interrupted run keeps what it has."""
    task = capabilities(args).task and (args.task or capabilities(args).task)
    name = f"{args.robot}/{task}-v0" if task else node.robot.name
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    records = {
        "name": name,
        "label": f"{args.mode}, real time",
        "rate_hz": node.robot.rate_hz,
        "stages": list(node.stages),
        "settings": settings | {"model_version": node.model_version, "events": dict(node.counters)},
        "wall_s": wall_s,
        "episodes": episodes,
    }
    for file, content in (("records.json", records), ("summary.json", summarise(episodes))):
        partial_file = args.out / (file + ".tmp")
        partial_file.write_text(json.dumps(content, indent=1) + "\n")
        os.replace(partial_file, args.out / file)


def _line(episodes: list[dict[str, Any]], total: int) -> str:
    e, s = episodes[-1], summarise(episodes)
    rate = ""
    if s["judged"]:
        low, high = s["interval_95"]
        rate = f" | {s['successes']}/{s['judged']} = {s['success_rate']:.0%} ({low:.0%} to {high:.0%})"
    slow = "" if e["real_time_factor"] >= REAL_TIME else f", only {e['real_time_factor']:.2f} of real time"
    return (
        f"[{len(episodes):>{len(str(total))}}/{total}] {outcome(e['success'])} in {e['duration_s']:4.1f} s, "
        f"idle {e['idle_ticks'] / max(1, e['steps']):.0%}, delay {e['delay_ticks']['mean']:.1f} steps{slow}"
        f"{rate} | {e['instruction']}"
    )


def _closing(out: Path, episodes: list[dict[str, Any]]) -> str:
    s = summarise(episodes)
    text, unknown = "", s["episodes"] - s["judged"]
    if s["judged"]:
        low, high = s["interval_95"]
        text = (
            f"{s['successes']} of {s['judged']} episodes succeeded: {s['success_rate']:.0%} "
            f"(95 % interval {low:.0%} to {high:.0%}); "
        )
    if unknown:
        text += f"{unknown} episodes not judged; "
    text += f"idle {s['idle_fraction']:.1%}, {s['overruns']} overruns. Records: {out / 'records.json'}"
    if s["slower_than_real_time"]:
        text += (
            f"\n{s['slower_than_real_time']} episodes ran slower than real time: this computer is too busy for them."
        )
    return text


def _box(text: str) -> tuple[str, tuple[float, float]]:
    try:
        name, _, bounds = text.partition("=")
        low, high = bounds.split(":")
        return name, (float(low), float(high))
    except ValueError:
        raise UserError(f"--workspace {text} cannot be read", "write DIM=LOW:HIGH, e.g. tcp_z.pos=0.02:0.3") from None


def _yes() -> bool:
    return True


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt

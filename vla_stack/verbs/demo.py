"""``vla demo``: the whole loop in one command, every stage a process of its own, just as a person would start them.

Demonstrations from the scripted expert, a policy trained from scratch, a policy server, a robot node that drives the
simulated arm in real time through it, and a report. A stage whose result is already there is not run again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import sim
from vla_stack.errors import UserError
from vla_stack.statistics import success_interval
from vla_stack.training.recipes import find_shipped
from vla_stack.verbs.arguments import count, existing, whole

HELP = "Collect demonstrations, train a policy, serve it, run it asynchronously on the simulated arm, write a report."
EXAMPLES = (
    "vla demo",
    "vla demo --task place --demonstrations 800 --out runs/demo_place",
    "vla demo --policy shipped --episodes 20      # skip collecting and training",
)
READY_TIMEOUT_S = 180.0
NOISE = 0.3  # on what the expert executes, never on what is learnt: shows the policy how to come back


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--task", default="pick", help="task of the native family (default: %(default)s)")
    parser.add_argument("--recipe", type=existing, help="training recipe (default: the task's own that ships)")
    parser.add_argument("--demonstrations", type=count, default=1000, help="expert episodes (default: %(default)s)")
    parser.add_argument("--steps", type=count, help="training steps (default: the recipe's)")
    parser.add_argument("--policy", help="run this policy instead of training one")
    parser.add_argument("--episodes", type=count, default=50, help="episodes to run (default: %(default)s)")
    parser.add_argument("--mode", default="naive", choices=("naive", "sync"), help="execution (default: %(default)s)")
    parser.add_argument("--seed", type=whole, default=0, help="of demonstrations, training and episodes")
    parser.add_argument("--out", type=Path, default=Path("outputs/demo"), help="directory (default: %(default)s)")


def main(args: argparse.Namespace) -> int:
    if args.task not in sim.TASKS:
        raise UserError(f"there is no task '{args.task}'", f"--task is one of {', '.join(sim.TASKS)}")
    start = time.monotonic()
    out: Path = args.out
    out.mkdir(parents=True, exist_ok=True)
    policy = args.policy or train(args, collect(args))
    summary = run(args, policy)
    report = write_report(args, out)
    low, high = success_interval(summary["successes"], summary["episodes"]).interval
    rate = summary["successes"] / summary["episodes"]
    print(
        f"\n{summary['successes']} of {summary['episodes']} asynchronous episodes succeeded: {rate:.0%} "
        f"(95 % interval {low:.0%} to {high:.0%}) after {(time.monotonic() - start) / 60:.1f} minutes.\n"
        f"Report with videos: {report}"
    )
    return 0


def collect(args: argparse.Namespace) -> Path:
    """Demonstrations of the scripted expert; the collector itself continues where it was stopped."""
    root = args.out / "data"
    stage(f"1/4  {args.demonstrations} demonstrations of '{args.task}'")
    vla(
        *("collect", "--task", args.task, "--episodes", args.demonstrations, "--root", root),
        *("--seed", args.seed, "--noise", NOISE),
    )
    return root


def train(args: argparse.Namespace, root: Path) -> Path:
    """A policy from scratch; an interrupted training continues."""
    run_dir = args.out / "train"
    policy = run_dir / "checkpoints" / "last" / "pretrained_model"
    stage("2/4  training from scratch")
    recipe = args.recipe or find_shipped(args.task)
    done = run_dir / "done"
    if done.exists():
        print(f"already there: {policy}")
        return policy
    if (run_dir / "recipe.yaml").exists():
        vla("train", "--resume", run_dir)
    else:
        steps = () if args.steps is None else (f"method.steps={args.steps}",)
        vla("train", recipe, f"data.root={root}", f"output_dir={run_dir}", f"seed={args.seed}", *steps)
    done.touch()
    return policy


def run(args: argparse.Namespace, policy: Path | str) -> dict:
    """Server and robot node as separate processes; the node drives the arm in real time."""
    stage(f"3/4  server and robot node, {args.episodes} asynchronous episodes in real time")
    out = args.out / "run"
    with server(policy, args.out / "server.log") as endpoint:
        vla(
            *("run", "--server", endpoint, "--robot", "sim", "--task", args.task, "--episodes", args.episodes),
            *("--seed", 100_000 + args.seed, "--mode", args.mode, "--out", out, "--record-video", 8),
        )
    return json.loads((out / "summary.json").read_text())


@contextlib.contextmanager
def server(policy: Path | str, log: Path, *options: str) -> Iterator[str]:
    """A policy server on a free loopback port for as long as the block lasts, given further ``options``; yields its
    endpoint.

    Raises:
        UserError: It did not become ready.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{s.getsockname()[1]}"
    with log.open("wb") as f:
        process = subprocess.Popen(
            [*VLA, "serve", "--policy", str(policy), "--endpoint", endpoint, "--threads", "1", *options],
            stdout=subprocess.PIPE,
            stderr=f,
        )
        try:
            wait_ready(process, log)
            yield endpoint
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def wait_ready(process: subprocess.Popen[bytes], log: Path) -> None:
    """Block until the server prints its READY line.

    Raises:
        UserError: It ended, or stayed silent for too long.
    """
    assert process.stdout is not None
    deadline = time.monotonic() + READY_TIMEOUT_S
    seen = b""
    while (left := deadline - time.monotonic()) > 0 and process.poll() is None:
        if not select.select([process.stdout], [], [], left)[0]:
            break
        seen += os.read(process.stdout.fileno(), 4096)
        if b"READY" in seen and seen.endswith(b"\n"):
            print(seen.decode(errors="replace").strip(), flush=True)
            return
    tail = log.read_text(errors="replace").strip().splitlines()[-3:]
    raise UserError(f"the policy server did not become ready: {' | '.join(tail) or 'no output'}", f"see {log}")


def write_report(args: argparse.Namespace, out: Path) -> Path:
    """One self-contained HTML page from the records of the robot node."""
    from vla_stack.evaluation.report import write_run_report

    stage("4/4  report")
    path = out / "report.html"
    write_run_report(out / "run", path)
    return path


VLA = (sys.executable, "-m", "vla_stack.cli")


def vla(*arguments: object) -> None:
    """Run a verb in a process of its own; its failure is ours, its last line says why."""
    command = [*VLA, *map(str, arguments)]
    print("$ vla " + " ".join(command[len(VLA) :]), flush=True)
    code = subprocess.run(command).returncode
    if code:
        raise UserError(f"`vla {arguments[0]}` ended with exit code {code}", "its own message is above")


def stage(title: str) -> None:
    print(f"\n\033[1m{title}\033[0m", flush=True)

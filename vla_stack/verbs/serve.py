"""``vla serve``: one policy directory behind one socket."""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from vla_stack.policies.shipped import resolve_policy
from vla_stack.schema import PolicySpec
from vla_stack.serving.server import PolicyServer, ServerConfig
from vla_stack.serving.worker import BATCHES, ChunkPolicy
from vla_stack.verbs.arguments import count, device, port

HELP = "Serve a policy to robots over ZeroMQ."
EXAMPLES = (
    "vla serve --policy outputs/pick",
    "vla serve --policy shipped --endpoint ipc:///tmp/vla.sock --metrics-port 9100 --threads 4",
    "vla export --policy outputs/pick --out outputs/pick-onnx && vla serve --policy outputs/pick-onnx --backend onnx",
    "vla serve --policy outputs/pick --log serve.jsonl   # kill -HUP: go over to the run's newest checkpoint",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--policy",
        default="shipped",
        help="LeRobot policy directory, a run directory, or the name of a shipped policy (default: %(default)s)",
    )
    parser.add_argument("--embodiment", help="which robot to drive, where the policy was trained on several")
    parser.add_argument(
        "--endpoint",
        default="tcp://127.0.0.1:5555",
        help="where to listen; off loopback `vla keys` are required (default: %(default)s)",
    )
    parser.add_argument("--metrics-port", type=port, help="loopback port of /metrics, /readyz, /healthz; 0 takes any")
    parser.add_argument(
        "--log", type=Path, metavar="FILE", help="append what was served to whom, one JSON object a line"
    )
    parser.add_argument(
        "--backend",
        choices=("torch", "compile", "onnx"),
        help="what computes: torch, torch compiled, or ONNX Runtime on a directory of `vla export` "
        "(default: onnx for such a directory, else torch)",
    )
    parser.add_argument(
        "--device", default="cpu", type=device, help="torch device: cpu, cuda, cuda:1, auto, ... (default: %(default)s)"
    )
    parser.add_argument(
        "--threads", type=count, default=os.cpu_count(), help="torch threads (default: all cores, %(default)s)"
    )


def main(args: argparse.Namespace) -> int:
    resolve_policy(args.policy)  # says at once what is wrong with it
    logging.basicConfig(level=logging.INFO, format="vla serve: %(message)s", stream=sys.stderr)

    def announce(policy: PolicySpec) -> None:
        gc.freeze()  # what is loaded stays: collecting garbage must not search it while a robot waits
        page = f" metrics={server.metrics_url}/metrics" if server.metrics_url else ""
        print(
            f"READY {server.endpoint} robot={policy.robot.name} horizon={policy.horizon} "
            f"model={policy.model_version}{page}",
            flush=True,
        )

    server = PolicyServer(
        # Resolved at each loading, links included: a run's newest checkpoint, and all files of the same one.
        lambda: load_directory(
            resolve_policy(args.policy).resolve(), args.device, args.threads, args.embodiment, args.backend
        ),
        args.endpoint,
        ServerConfig(metrics_port=args.metrics_port),
        on_ready=announce,
        log_file=args.log,
    )
    with handled(server):
        server.run()
    return 0


@contextlib.contextmanager
def handled(server: PolicyServer) -> Iterator[None]:
    """SIGINT and SIGTERM stop the server in here, SIGHUP has it load the policy anew; afterwards all is as before."""
    actions: dict[str, Callable[[], None]] = {"SIGINT": server.stop, "SIGTERM": server.stop, "SIGHUP": server.reload}
    numbers = {getattr(signal, name): act for name, act in actions.items() if hasattr(signal, name)}
    before = {number: signal.signal(number, lambda *_, act=act: act()) for number, act in numbers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def load_directory(
    path: Path, device: str, threads: int, embodiment: str | None = None, backend: str | None = None
) -> ChunkPolicy:
    """The policy in a LeRobot policy directory, with torch limited to ``threads`` threads. Imports torch."""
    import torch

    from vla_stack.policies.backends import load_with
    from vla_stack.policies.onnx_policy import MANIFEST

    torch.set_num_threads(threads)
    with contextlib.redirect_stdout(sys.stderr):  # LeRobot reports on stdout, where READY should be the only line
        backend = backend or ("onnx" if (path / MANIFEST).is_file() else "torch")
        return load_with(backend, path, device, embodiment, BATCHES)

"""``vla serve``: one policy directory behind one socket."""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vla_stack.errors import UserError
from vla_stack.light_torch import collecting_later, import_torch
from vla_stack.policies.directory import check_robot, resolve_policy
from vla_stack.policies.onnx_files import check_backend, default_backend
from vla_stack.schema import PolicySpec
from vla_stack.serving.pace import batch_sizes
from vla_stack.serving.server import PolicyServer, ServerConfig
from vla_stack.serving.worker import BATCHES, ChunkPolicy
from vla_stack.verbs.arguments import count, device, existing, port
from vla_stack.verbs.openpi_arguments import add_openpi_arguments, new_token, renamed_keys

if TYPE_CHECKING:
    from vla_stack.serving.websocket_server import WebsocketServer

log = logging.getLogger(__name__)

HELP = "Serve a policy to robots over ZeroMQ, or over the websocket protocol of openpi or vla-eval."
WEBSOCKET = "ws://127.0.0.1:8000"
FOLLOW_S = 1.0  # between two looks for another checkpoint
ENDPOINTS = {"vla": "tcp://127.0.0.1:5555", "openpi": WEBSOCKET, "vla-eval": WEBSOCKET}
EXAMPLES = (
    "vla serve --policy runs/pick",
    "vla serve --policy shipped --endpoint ipc:///tmp/vla.sock --metrics-port 9100 --threads 4",
    "vla export --policy runs/pick && vla serve --policy runs/pick    # its graph, twice as fast on a CPU",
    "vla serve --policy runs/pick --protocol openpi --keys front=observation/image",
    "vla serve --policy runs/pick --protocol vla-eval    # then, with vla-eval's harness: vla-eval run -c ...",
    "vla serve --protocol openpi --endpoint wss://0.0.0.0:8000 --token token.txt --tls cert.pem key.pem",
    "vla serve --policy runs/pick --log serve.jsonl   # kill -HUP: go over to the run's newest checkpoint",
    "vla serve --policy outputs/train/rl_robot --follow   # at once, whenever there is a newer one",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--policy",
        default="shipped",
        help="LeRobot policy directory, a run directory, or the name of a shipped policy (default: %(default)s)",
    )
    parser.add_argument(
        "--follow",
        action="store_true",
        help="go over to the run's newest checkpoint whenever there is another one; a robot, between two episodes",
    )
    parser.add_argument("--embodiment", help="which robot to drive, where the policy was trained on several")
    parser.add_argument(
        "--protocol",
        choices=tuple(ENDPOINTS),
        default="vla",
        help="ours, or the websocket protocol of openpi or of the vla-eval harness (default: %(default)s)",
    )
    parser.add_argument(
        "--endpoint",
        help="where to listen; off loopback `vla keys` are required, or --token and --tls "
        f"(default: {ENDPOINTS['vla']}, websockets: {WEBSOCKET})",
    )
    add_openpi_arguments(parser)
    parser.add_argument(
        "--tls",
        type=existing,
        nargs=2,
        metavar=("CERT", "KEY"),
        help="websockets: PEM files; the endpoint is then wss://",
    )
    parser.add_argument("--metrics-port", type=port, help="loopback port of /metrics, /readyz, /healthz; 0 takes any")
    parser.add_argument(
        "--log", type=Path, metavar="FILE", help="append what was served to whom, one JSON object a line"
    )
    parser.add_argument(
        "--backend",
        choices=("torch", "compile", "graph", "onnx"),
        help="what computes: torch, torch compiled, that as one CUDA graph, or ONNX Runtime on the graph of "
        "`vla export` (default: onnx on a CPU where there is such a graph, else torch)",
    )
    parser.add_argument(
        "--device", default="cpu", type=device, help="torch device: cpu, cuda, cuda:1, auto, ... (default: %(default)s)"
    )
    parser.add_argument(
        "--max-batch",
        type=count,
        default=8,
        help="robots computed together, at most; each power of two up to it is warmed up (default: %(default)s)",
    )
    parser.add_argument(
        "--max-sessions", type=count, default=64, help="robots at the same time, at most (default: %(default)s)"
    )
    parser.add_argument(
        "--threads", type=count, default=os.cpu_count(), help="that compute (default: all cores, %(default)s)"
    )


def main(args: argparse.Namespace) -> int:
    path = resolve_policy(args.policy)  # says at once what is wrong with it
    check_backend(args.backend, path)
    check_robot(path, args.embodiment)
    logging.basicConfig(level=logging.INFO, format="vla serve: %(message)s", stream=sys.stderr)

    def announce(policy: PolicySpec) -> None:
        gc.freeze()  # what is loaded stays: collecting garbage must not search it while a robot waits
        page = f" metrics={server.metrics_url}/metrics" if server.metrics_url else ""
        print(
            f"READY {server.endpoint} robot={policy.robot.name} horizon={policy.horizon} "
            f"model={policy.model_version}{page}",
            flush=True,
        )

    tried: list[tuple[Path, int]] = []

    def load() -> ChunkPolicy:
        # Resolved at each loading, links included: a run's newest checkpoint, and all files of the same one.
        path = resolve_policy(args.policy).resolve()
        tried.append(_edition(path))
        return load_directory(
            path, args.device, args.threads, args.embodiment, args.backend, batch_sizes(args.max_batch)
        )

    endpoint = args.endpoint or ENDPOINTS[args.protocol]
    config = ServerConfig(args.metrics_port, args.max_sessions, args.max_batch)
    server: PolicyServer | WebsocketServer
    if args.protocol != "vla":
        server = _websocket_server(args, load, endpoint, config, announce)
    else:
        server = PolicyServer(load, endpoint, config, on_ready=announce, log_file=args.log)
    with handled(server), following(args.policy, tried, server.reload) if args.follow else contextlib.nullcontext():
        server.run()
    return 0


def _edition(path: Path) -> tuple[Path, int]:
    """What tells a directory from one that takes its place: a learner that is stopped saves its checkpoint anew."""
    return path, path.stat().st_ino if path.exists() else 0


@contextlib.contextmanager
def following(policy: str, tried: Sequence[tuple[Path, int]], reload: Callable[[], None]) -> Iterator[None]:
    """In here another checkpoint than the one that was tried last is loaded once it is there."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(FOLLOW_S):
            with contextlib.suppress(UserError):  # there is none at the moment
                path = resolve_policy(policy).resolve()
                if tried and path.exists() and _edition(path) != tried[-1]:
                    reload()

    thread = threading.Thread(target=watch, name="vla-follow", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()


def _websocket_server(
    args: argparse.Namespace,
    load: Callable[[], ChunkPolicy],
    endpoint: str,
    config: ServerConfig,
    announce: Callable[[PolicySpec], None],
) -> WebsocketServer:
    try:
        from vla_stack.runtime.executor import default_execute
        from vla_stack.serving.openpi import Openpi
        from vla_stack.serving.vla_eval import VlaEval
        from vla_stack.serving.websocket_server import WebsocketServer
    except ImportError as e:
        raise UserError(f"--protocol {args.protocol} needs a package: {e}", 'pip install "vla-stack[openpi]"') from None
    keys = renamed_keys(args)
    dialect = Openpi(keys) if args.protocol == "openpi" else VlaEval(keys, default_execute)
    token = new_token(args.token) if args.token else None
    certificate = tuple(args.tls) if args.tls else None
    return WebsocketServer(load, dialect, endpoint, config, token, certificate, announce, args.log)


@contextlib.contextmanager
def handled(server: PolicyServer | WebsocketServer) -> Iterator[None]:
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
    path: Path,
    device: str,
    threads: int,
    embodiment: str | None = None,
    backend: str | None = None,
    sizes: tuple[int, ...] = BATCHES,
) -> ChunkPolicy:
    """The policy in a LeRobot policy directory, computed by ``threads`` threads. Imports torch where it is needed."""
    from vla_stack.policies.plain_policy import load_plain

    log.info("loading %s", path)  # which may take a while
    backend = backend or default_backend(path, device)
    if backend == "onnx" and device == "cpu" and embodiment is None and (plain := load_plain(path, threads)):
        return plain
    # Threads that spin while they wait take the robot's core: on a busy machine they took 12 s of CPU before READY.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import_torch()
    import torch

    from vla_stack.policies.backends import load_with
    from vla_stack.policies.modeling_vla import VlaPolicy

    torch.set_num_threads(threads)
    # LeRobot reports on stdout, where READY should be the only line.
    with contextlib.redirect_stdout(sys.stderr), collecting_later():
        policy = load_with(backend, path, device, embodiment, sizes)
    own = policy.policy
    native = isinstance(own, VlaPolicy) and own.unrolled is not None and not own.config.backbone
    if native and backend == "torch" and device == "cpu":
        log.info("its graph would take half the time: vla export --policy %s", path)
    return policy

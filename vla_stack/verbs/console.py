"""``vla console``: a robot node, a gateway and a page for the person who drives or supervises it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing as mp
import signal
import ssl
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vla_stack.console.access import LOOPBACK, Access, tls_context
from vla_stack.console.door import opened
from vla_stack.console.gateway import About, Gateway
from vla_stack.console.robot import RobotConfig, robot_process
from vla_stack.console.stopping import Certificate, stop_process
from vla_stack.data.layout import INFO, read_info
from vla_stack.data.pending import count_pending
from vla_stack.data.sidecar import read_facts
from vla_stack.errors import UserError
from vla_stack.intervention import MODES, Mode
from vla_stack.key_map import HELP as HELP_KEY
from vla_stack.key_map import help_line, left_out
from vla_stack.runtime.driver import Guard
from vla_stack.runtime.link import Link, Message, ignored_interrupts
from vla_stack.runtime.monitor import Monitor
from vla_stack.runtime.operator_client import OperatorClient
from vla_stack.schema import RobotSpec
from vla_stack.verbs.arguments import existing, port, positive, whole
from vla_stack.verbs.holding import leave_holding
from vla_stack.verbs.robot_arguments import (
    add_execution_arguments,
    add_robot_arguments,
    capabilities,
    driver_maker,
    execution,
    recorded_options,
    robot_safety,
)
from vla_stack.verbs.run import policy_options

HELP = "Drive or supervise a robot from a browser and record what it does: demonstrations, recoveries, corrections."
EXAMPLES = (
    "vla console --robot sim --task pick                        # demonstrations with the keyboard",
    "vla console --robot sim --task stack --mode rac --server tcp://127.0.0.1:5555 --root data/stack-rac",
    "vla console --robot.type=so101_follower --robot.port=/dev/ttyACM0 --task 'tidy up' --mode rac --execution rtc \\\n"
    "      --interpolate 4 --server tcp://gpu:5555",
    "vla console --robot lerobot --robot-arg robot_type=so101_follower --robot-arg port=/dev/ttyACM0 --task 'tidy up'",
    "vla console --robot sim --task pick --host 192.168.1.20     # also from a phone: TLS, self-made certificate",
)
START_TIMEOUT_S = 120.0
LAST_PORT = 65535


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_robot_arguments(parser)
    add = parser.add_argument
    add("--mode", choices=MODES, help="teleop: demonstrations; rac, hg_dagger: supervise a policy (default: teleop)")
    add("--server", help="endpoint of `vla serve`, for rac and hg_dagger")
    add_execution_arguments(parser, "--execution")
    add(
        "--root", type=Path, help="dataset to record into; continued if it exists (default: datasets/console-TASK-MODE)"
    )
    add(
        "--monitor",
        type=existing,
        metavar="FILE",
        help="of `vla monitor fit`: hold and call you before the policy fails",
    )
    add("--demos", type=Path, help="dataset whose states count as familiar (default: --root)")
    add("--seconds", type=positive, default=60.0, help="longest episode of policy or demonstration (%(default)g)")
    add("--iteration", type=whole, default=0, help="iteration of the loop that this is, for the records (%(default)s)")
    add("--quota", type=whole, default=0, help="human frames that this iteration is to have, to show how far it is")
    add("--seed", type=whole, help="of the first episode; the next one takes the next (one that --root has not had)")
    add(
        "--host", default="127.0.0.1", help="name or address to open it under; off this computer with TLS (%(default)s)"
    )
    add("--port", type=port, default=8765, help="of the page; the next one is the e-stop's (default: %(default)s)")
    add("--cert", type=Path, help="certificate, PEM; a self-signed one is made where none is given")
    add("--key", type=Path, help="its key, PEM")


def main(args: argparse.Namespace) -> int:
    mode: Mode = args.mode or "teleop"
    if (mode == "teleop") != (args.server is None):
        what = f"mode {mode} supervises a policy" if args.server is None else "mode teleop has no policy"
        raise UserError(what, "give --server and --mode rac or hg_dagger, or neither")
    if args.monitor and mode == "teleop":
        raise UserError("--monitor watches a policy, mode teleop has none", "leave it out")
    name = args.task or capabilities(args).task or args.robot
    root = args.root or Path("datasets") / f"console-{name}-{mode}".replace(" ", "-")
    tls: ssl.SSLContext | None = None
    if args.host not in LOOPBACK or args.cert:
        tls, fingerprint = tls_context(args.host, args.cert, args.key)
        print(f"certificate, SHA-256: {fingerprint}")
    if args.port == LAST_PORT:
        raise UserError(f"--port {args.port}: the e-stop needs the port after it", "give a smaller one")
    access = Access(args.host, args.port, tls is not None)
    signal.signal(signal.SIGTERM, _interrupt)
    with tempfile.TemporaryDirectory(prefix="vla-console-") as folder:
        config = RobotConfig(
            make_driver=driver_maker(args, **driver_options(args, root)),
            safety=robot_safety(args),
            mode=mode,
            server=args.server,
            endpoint=f"ipc://{folder}/operator",
            root=root,
            demos=args.demos or root,
            executor=execution(args, args.execution),
            seed=unused_seed(root) if args.seed is None else args.seed,
            seconds=args.seconds,
            iteration=args.iteration,
            quota=args.quota,
            monitor=Monitor.load(args.monitor) if args.monitor else None,
        )
        print("starting the robot ...", file=sys.stderr, flush=True)
        certificate = (args.cert, args.key) if tls else None
        with running(config) as robot, stop_line(access, args.host, certificate, config.endpoint) as stop:
            keys = f"{help_line('console')}, {HELP_KEY} on the page: all keys{left_out(robot.spec)}"
            print(f"{robot.guard.value}\nkeys: {keys}", flush=True)
            about = About(robot.spec, robot.stages, mode, root)
            gateway = Gateway(OperatorClient(config.endpoint), about, access, _print_address)
            with contextlib.suppress(KeyboardInterrupt):
                asyncio.run(serve(gateway, access, args.host, args.port, tls, (robot, stop)))
    print(_closing(root))
    leave_holding(args, interrupted=True)  # nothing else ends it
    return 0


def driver_options(args: argparse.Namespace, root: Path) -> dict[str, Any]:
    """Arguments of the driver: pictures and rate as the policy or the dataset has them, or for driving by hand."""
    can = capabilities(args)
    if args.server is not None:
        return {**can.unlimited, **policy_options(args, args.server)}
    return {**can.unlimited, **(recorded_options(args, root) or can.by_hand)}


def unused_seed(root: Path) -> int:
    """The first seed of a further session: a new one, so that it does not repeat the starts of those before."""
    if not (root / INFO).exists():
        return 0
    episodes = read_info(root)["total_episodes"] + count_pending(root)
    return max([episodes, *(row["seed"] + 1 for row in read_facts(root).values())])


@dataclass
class Child:
    """A process of the console that is ready; ``name`` is said of it in errors."""

    name: str
    link: Link
    ready: Message

    def check(self) -> None:
        """Raise :class:`UserError` where it has ended."""
        try:
            failed = [m["error"] for m in self.link.receive() if m["kind"] == "failed"]
        except EOFError:
            failed = [f"{self.name} ended"]
        if failed:
            raise UserError(failed[0])


@dataclass
class RunningRobot(Child):
    """A robot process that is ready."""

    @property
    def spec(self) -> RobotSpec:
        return RobotSpec.from_json(self.ready["robot"])

    @property
    def stages(self) -> tuple[str, ...]:
        return tuple(self.ready["stages"])

    @property
    def guard(self) -> Guard:
        return Guard[self.ready["guard"]]


@contextlib.contextmanager
def running(config: RobotConfig) -> Iterator[RunningRobot]:
    """A robot process for as long as the block lasts; its episodes are safe when this returns.

    Raises:
        UserError: It did not start.
    """
    with _child("the robot's process", robot_process, config) as child:
        yield RunningRobot(child.name, child.link, child.ready)


@contextlib.contextmanager
def stop_line(access: Access, host: str, certificate: Certificate | None, endpoint: str) -> Iterator[Child]:
    """The e-stop's process for as long as the block lasts, see :mod:`vla_stack.console.stopping`.

    Raises:
        UserError: It did not start, e.g. because its port is taken.
    """
    with _child("the e-stop's process", stop_process, access, host, certificate, endpoint) as child:
        yield child


@contextlib.contextmanager
def _child(name: str, main: Callable[..., None], *args: Any) -> Iterator[Child]:
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=main, args=(theirs, *args), name=main.__name__)
    with ignored_interrupts():
        process.start()
    theirs.close()
    link = Link(ours)
    try:
        yield Child(name, link, _ready(name, link))
    finally:
        link.close()
        process.join(30.0)
        if process.is_alive():
            process.kill()
            process.join()


def _ready(name: str, link: Link) -> Message:
    try:
        messages = link.receive(START_TIMEOUT_S)
    except EOFError:
        raise UserError(f"{name} ended while it started") from None
    if not messages:
        raise UserError(f"{name} was not ready within {START_TIMEOUT_S:g} s")
    if messages[0]["kind"] == "failed":
        raise UserError(messages[0]["error"])
    return messages[0]


async def serve(
    gateway: Gateway, access: Access, host: str, port: int, tls: ssl.SSLContext | None, children: Iterable[Child]
) -> None:
    """Print an address and serve until one of the processes ends or this is cancelled.

    Raises:
        UserError: The port is taken, or a process ended.
    """
    try:
        async with opened(gateway.app(), gateway.door, host, port, tls):
            _print_address(access.invite())
            while True:
                for child in children:
                    child.check()
                await asyncio.sleep(0.25)
    except OSError as e:
        raise UserError(f"{host}:{port} cannot be opened: {e.strerror}", "choose another --port") from None


def _closing(root: Path) -> str:
    if not (root / INFO).exists() or not (episodes := read_info(root)["total_episodes"]):
        return "nothing was recorded"
    return f"{root}: {episodes} episodes. Train on them: vla train pick data.root={root}"


def _print_address(address: str) -> None:
    print(f"open once, in one browser: {address}", flush=True)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt

"""What hostile peers can do to every socket of this project: policy server, robot service, operator channels, client.

    python tools/bench/attacks.py [--seconds 60] [name of a target ...]

Each row starts one end in a process of its own and measures what a peer that belongs there sees while nothing happens,
then under attack (``attackers.py``, in a third process at the lowest priority: it would otherwise take the robot's own
core): round trips, how long a newcomer waits for its first answer, memory, and whether the process lives. Without keys,
and with them: by a peer without keys, by one whose key is not listed, by an observer, and by a robot. All of it happens
on 127.0.0.1 and ends by itself.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from attackers import FAMILIES, Peer, rogue_server

from results import Check, parser, write
from vla_stack.runtime.operator_client import OperatorClient
from vla_stack.runtime.operator_messages import channel
from vla_stack.schema import Chunks, Dim, PolicySpec, RobotSpec
from vla_stack.serving.client import PolicyClient
from vla_stack.serving.curve import CurveKeys
from vla_stack.serving.dialer import Dialer
from vla_stack.serving.keys import KeyFolder, Role, client_keys

DIMS = (Dim("x.pos", "m", -1, 1, 0.5), Dim("gripper.pos", "ratio", 0, 1, kind="gripper"))
ROBOT = RobotSpec("bench/arm", DIMS, DIMS, (), 50.0)
IDLE_S, PATIENCE_S, EVERY_S = 2.0, 20.0, 0.01
NEWCOMER_EVERY_S = 0.5
Asking = tuple[Callable[[], None], Callable[[], None]]  # one round trip; leave
NOBODY, STRANGER, OBSERVER, MEMBER = "without keys", "unlisted key", "observer's key", "robot's key"


class NullPolicy:
    """A policy that takes no time."""

    spec = PolicySpec(ROBOT, 4, "-", "-")

    def infer(self, observations: Any, seeds: Any, continuations: Any = ()) -> Chunks:
        return Chunks(np.zeros((len(observations), 4, 2), np.float32))


class Arm:
    """A robot that does nothing."""

    spec, fault = ROBOT, None

    def read(self) -> Any: ...
    def hold(self) -> None: ...
    def stop(self) -> None: ...


# -- ends, each the main function of a process -------------------------------------------------------------------------


def serve_policy(pipe: Any, keys: KeyFolder | None) -> None:
    from vla_stack.serving.server import PolicyServer

    server = PolicyServer(
        lambda: NullPolicy(), "tcp://127.0.0.1:*", keys=keys, on_ready=lambda _: pipe.send(server.endpoint)
    )
    server.run()


def serve_robot(pipe: Any, keys: KeyFolder | None) -> None:
    from robot_drivers.remote_service import MAX_BYTES, serve_driver
    from vla_stack.runtime.limits import make_envelope
    from vla_stack.runtime.safety import SafetyConfig
    from vla_stack.serving.admission import Admission
    from vla_stack.serving.listener import Listener

    admission = Admission(keys) if keys else None
    listener = Listener("tcp://127.0.0.1:*", admission, MAX_BYTES)
    pipe.send(listener.endpoint)
    arm: Any = Arm()
    serve_driver(arm, make_envelope(ROBOT, SafetyConfig()), listener, lambda: True, admission=admission)


def serve_operator(pipe: Any, keys: KeyFolder | None) -> None:
    from vla_stack.runtime.link import Link
    from vla_stack.runtime.operator_port import OperatorPort

    control, theirs = mp.Pipe()
    stops, estop = mp.Pipe()
    endpoint = f"tcp://127.0.0.1:{20_000 + 5 * (os.getpid() % 2000)}"  # five in a row that no connection is given
    port = OperatorPort(theirs, estop, ROBOT, endpoint, keys)
    pipe.send(endpoint)
    links = Link(control), Link(stops)
    while True:
        for message in links[0].receive(0.01):
            if message["kind"] == "event":
                links[0].send("reply", id=message["id"], ok=True, error="", phase="auto", tick=7)
        links[1].receive()
        port.tell(alive=True)


# -- peers that belong there: one round trip, by a connection that is kept or by a new one -----------------------------


def ask_policy(endpoint: str, keys: KeyFolder | None, newcomer: bool) -> Asking:
    client = PolicyClient(endpoint, keys)
    client.hello(None if keys and newcomer else ROBOT, PATIENCE_S)  # one key drives one robot

    def ask() -> None:
        before, end = client.last_pong_ns, time.monotonic() + PATIENCE_S
        client.ping()
        while client.last_pong_ns == before:
            client.poll(50)
            if time.monotonic() > end:
                raise TimeoutError

    return ask, client.close


def ask_robot(endpoint: str, keys: KeyFolder | None, newcomer: bool) -> Asking:
    dialer = Dialer(endpoint, client_keys(endpoint, keys))
    return partial(_ask, dialer, msgpack.packb({"kind": "hello", "token": ""})), dialer.close


def _ask(dialer: Dialer, message: bytes) -> None:
    end, sent = time.monotonic() + PATIENCE_S, False
    while not dialer.receive(0.05 if sent else 0.002):
        sent = sent or dialer.send([message])
        if time.monotonic() > end:
            raise TimeoutError


def ask_events(endpoint: str, keys: KeyFolder | None, newcomer: bool) -> Asking:
    client = OperatorClient(endpoint, keys)

    def ask() -> None:
        client.call("acquire", PATIENCE_S)

    return ask, client.close


def ask_estop(endpoint: str, keys: KeyFolder | None, newcomer: bool) -> Asking:
    client = OperatorClient(endpoint, keys)
    return client.estop, client.close


def ask_state(endpoint: str, keys: KeyFolder | None, newcomer: bool) -> Asking:
    client = OperatorClient(endpoint, keys)

    def ask() -> None:
        before, end = client.state.get("t_sent_ns"), time.monotonic() + PATIENCE_S
        while client.state.get("t_sent_ns") == before:
            client.poll(20)
            if time.monotonic() > end:
                raise TimeoutError

    return ask, client.close


@dataclass(frozen=True)
class Target:
    """A socket.

    Attributes:
        serve: The process behind it.
        ask: How who belongs there uses it.
        channel: Of an operator's endpoint, empty elsewhere.
        every_s: Between two of its questions.
        member: Whose key it uses.
    """

    serve: Callable[[Any, KeyFolder | None], None]
    ask: Callable[[str, KeyFolder | None, bool], Asking]
    channel: str = ""
    every_s: float = EVERY_S
    member: str = "operator"


TARGETS = {
    "policy server": Target(serve_policy, ask_policy, member="robot"),
    "robot service": Target(serve_robot, ask_robot, every_s=0.12),
    "operator events": Target(serve_operator, ask_events, "event"),
    "operator e-stop": Target(serve_operator, ask_estop, "estop", 0.15),
    "operator state": Target(serve_operator, ask_state, "state"),
    "operator pictures": Target(serve_operator, ask_events, "video"),
    "operator hand": Target(serve_operator, ask_events, "teleop"),
}
KEYED = ("policy server", "operator events")  # every end admits by the same code


# -- one row -----------------------------------------------------------------------------------------------------------


def attack(family: str, port: int, keys: CurveKeys | None, seconds: float) -> None:
    """Main function of the attackers' process."""
    os.nice(19)
    FAMILIES[family](partial(Peer, port, keys), time.monotonic() + seconds)


def ask_for(ask: Callable[[], None], connect: Callable[[bool], Asking], seconds: float, every_s: float) -> Any:
    """Round trips [n] and first answers [m], seconds."""
    trips: list[float] = []
    admitted: list[float] = []
    end, due = time.monotonic() + seconds, 0.0
    while time.monotonic() < end:
        begun = time.monotonic()
        ask()
        trips.append(time.monotonic() - begun)
        if begun > due:
            due, begun = begun + NEWCOMER_EVERY_S, time.monotonic()
            newcomer, leave = connect(True)
            newcomer()
            admitted.append(time.monotonic() - begun)
            leave()
        time.sleep(every_s)
    return np.array(trips), np.array(admitted)


def resident_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def run(name: str, family: str, who: str, folder: Path | None, seconds: float) -> dict[str, Any]:
    target, context = TARGETS[name], mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target.serve, args=(theirs, folder and KeyFolder(folder / "server")), daemon=True)
    process.start()
    assert ours.poll(60.0)
    endpoint = ours.recv()
    keys = KeyFolder(folder / target.member) if folder else None
    if keys and folder:
        for peer in (STRANGER, OBSERVER, MEMBER):
            KeyFolder(folder / peer).trust(channel(endpoint, "teleop"), KeyFolder(folder / "server").identity().public)
        keys.trust(endpoint, KeyFolder(folder / "server").identity().public)
    address = channel(endpoint, target.channel) if target.channel else endpoint
    curve = client_keys(endpoint, KeyFolder(folder / who)) if folder and who != NOBODY else None
    assert process.pid is not None
    found: dict[str, Any] = {"target": name, "keys": bool(folder), "attack": family, "who": who}
    try:
        connect = partial(target.ask, endpoint, keys)
        ask, leave = connect(False)
        idle, admitted_idle = ask_for(ask, connect, IDLE_S, target.every_s)
        before = resident_mb(process.pid)
        port = int(address.rpartition(":")[2])
        attacker = context.Process(target=attack, args=(family, port, curve, seconds), daemon=True)
        attacker.start()
        trips, admitted = ask_for(ask, connect, seconds + 0.5, target.every_s)
        found |= {
            "idle_p99_ms": round(1e3 * float(np.quantile(idle, 0.99)), 2),
            "p99_ms": round(1e3 * float(np.quantile(trips, 0.99)), 2),
            "p50_ratio": round(float(np.median(trips) / np.median(idle)), 2),
            "admitted_ms": round(1e3 * float(admitted.max()), 1),
            "admitted_idle_ms": round(1e3 * float(admitted_idle.max()), 1),
            "memory_mb": round(resident_mb(process.pid) - before, 1),
        }
        leave()
        attacker.join(10.0)
        attacker.kill()
    except Exception as e:  # the process behind it ended, or does not answer any more
        found["wrong"] = repr(e)
    found["alive"] = process.is_alive()
    process.kill()
    process.join()
    return found


def make_keys(folder: Path) -> None:
    """Keys of a server and of its peers; the one that belongs there has every right that its target asks for."""
    server = KeyFolder(folder / "server")
    server.create("server")
    for name, role in (
        ("operator", Role.OPERATOR),
        ("robot", Role.ROBOT),
        (OBSERVER, Role.OBSERVER),
        (MEMBER, Role.ROBOT),
        (STRANGER, None),
    ):
        public = KeyFolder(folder / name).create(name).public
        if role is not None:
            server.allow(public, name, role)


# -- a server that attacks its client ----------------------------------------------------------------------------------


def poll_client(pipe: Any, endpoint: str) -> None:
    client = PolicyClient(endpoint)
    while not pipe.poll(0):
        client.poll(0)
        client.ping()
        time.sleep(0.02)


def run_client(seconds: float) -> dict[str, Any]:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(50)
        context = mp.get_context("spawn")
        ours, theirs = context.Pipe()
        endpoint = f"tcp://127.0.0.1:{listening.getsockname()[1]}"
        process = context.Process(target=poll_client, args=(theirs, endpoint), daemon=True)
        process.start()
        assert process.pid is not None
        rogue_server(listening, time.monotonic() + 3.0)
        before = resident_mb(process.pid)
        made = rogue_server(listening, time.monotonic() + seconds)
        found = {"target": "policy client", "keys": False, "attack": "rogue server", "who": NOBODY, "connections": made}
        found |= {"alive": process.is_alive(), "memory_mb": round(resident_mb(process.pid) - before, 1)}
        ours.send(None)
        process.join(5.0)
        return found


def main(args: argparse.Namespace) -> int:
    rows: list[dict[str, Any]] = []

    def note(row: dict[str, Any]) -> None:
        rows.append(row)
        shown = (f"{row.get(k, '-')!s:>10}" for k in ("idle_p99_ms", "p99_ms", "admitted_ms", "memory_mb"))
        where = f"{row['target']}{', keyed' if row['keys'] else ''}"
        print(f"{where:<24}{row['attack']:<22}{row['who']:<16}{row['alive']!s:<6}", *shown, flush=True)

    print(f"{'target':<24}{'attack':<22}{'by a peer':<16}{'alive':<6}   idle p99        p99  newcomer     +MB")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_keys(folder)
        for target in TARGETS:
            if args.targets and target not in args.targets:
                continue
            for family in FAMILIES:
                note(run(target, family, NOBODY, None, args.seconds))
            for who in (NOBODY, STRANGER, OBSERVER, MEMBER) if target in KEYED else ():
                for family in FAMILIES:
                    note(run(target, family, who, folder, args.seconds))
        if not args.targets:
            note(run_client(args.seconds))
    write("attacks", checks(rows), {"seconds": args.seconds, "rows": rows}, path=args.out)
    return 0


def checks(rows: list[dict[str, Any]]) -> list[Check]:
    """The claims; a round trip's p99 has the machine's own noise in it, so rows within a millisecond count as equal."""
    measured = [row for row in rows if "p99_ms" in row]
    late = [row for row in measured if row["p99_ms"] > max(2 * row["idle_p99_ms"], row["idle_p99_ms"] + 1.0)]
    return [
        Check("processes that ended under attack", sum(not row["alive"] for row in rows), 0, "<="),
        Check("peers that belong there and got no answer", sum("wrong" in row for row in rows), 0, "<="),
        Check("resident memory under attack, MB more", max(row.get("memory_mb", 0.0) for row in rows), 64, "<="),
        Check("longest wait of a newcomer, ms", max((row["admitted_ms"] for row in measured), default=0), 1000, "<="),
        Check(
            "rows whose p99 of round trips more than doubled",
            len(late),
            0,
            "<=",
            why="attackers and both ends share two cores: " + "; ".join(f"{r['target']}, {r['attack']}" for r in late),
        ),
        Check("rows", len(rows)),
    ]


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("targets", nargs="*", help=f"of {', '.join(TARGETS)}")
    arguments.add_argument("--seconds", type=float, default=60.0, help="of each attack (default: %(default)g)")
    arguments.add_argument("--out", type=Path, help="another file than docs/results/attacks.json")
    sys.exit(main(arguments.parse_args()))

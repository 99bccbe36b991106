"""What hostile peers can do to every socket of this project: policy server, robot service, operator channels, the
console's gateway, client.

    python tools/bench/attacks.py [--seconds 60] [--long] [name of a target ...]

Each row starts one end (``attack_targets.py``) in a process of its own and measures what a peer that belongs there sees
under attack: round trips, how long a newcomer waits for its first answer, memory, and whether the process lives. The
first row of an end is the same measurement, as long, while nothing happens. The attackers (``attackers.py``;
``pages.py`` for the gateway) are a third process. They and the honest peer are other machines in life, so the end that
is attacked has a core for itself, and attackers run on the other where the honest peer leaves it to them. Without keys,
and with them: by a peer without keys, by one whose key is not listed, by an observer, and by a robot; at the gateway by
pages with a session and by connections without. All of it happens on 127.0.0.1 and ends by itself.

A row whose round trips take longer than they may is measured again, at most twice, and its best counts: an attack that
delays somebody does so every time, what else a machine happens to do does not. A process that ends or falls silent does
so for good.

It takes an hour and three quarters on a machine that does nothing else. The result file is written after each row, and
rows that it has of the same code and length are kept: the command can be stopped and given again.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import pages
from attack_targets import GATEWAY, TARGETS, Asking
from attackers import FAMILIES, Peer, rogue_server

from freshness import still_true
from results import RESULTS, Check, parser, write
from vla_stack.runtime.operator_messages import channel
from vla_stack.serving.client import PolicyClient
from vla_stack.serving.curve import CurveKeys
from vla_stack.serving.keys import KeyFolder, Role, client_keys

LONG_S = 600.0
SETTLE_S = 2.0  # until an end that has just begun is measured
NEWCOMER_EVERY_S = 0.5
STARTING_S = 1.0  # of a process of attackers
TIMES = 3  # that a row is measured at most
CORES = list(range(os.cpu_count() or 1))
NOTHING, NO_ONE = "nothing", "nobody"  # the row that attacks are compared with
NOBODY, STRANGER, OBSERVER, MEMBER = "without keys", "unlisted key", "observer's key", "robot's key"
OUTSIDE, INSIDE = "without a session", "with sessions"


KEYED = ("policy server", "operator events")  # every end admits by the same code
CLIENT_ROW = ("policy client", "rogue server", NOBODY, False)


def attackers(name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Families of attacks against a target, and who attacks it where there are no keys."""
    return (tuple(pages.FAMILIES), (OUTSIDE, INSIDE)) if name == GATEWAY else (tuple(FAMILIES), (NOBODY,))


# -- one row -----------------------------------------------------------------------------------------------------------


def attack(family: str, port: int, keys: CurveKeys | None, seconds: float) -> None:
    """What attackers do where no page is attacked."""
    FAMILIES[family](partial(Peer, port, keys), time.monotonic() + seconds)


@contextmanager
def first_core() -> Iterator[None]:
    """Processes that are started here have the first core, and this one the others; all have the same where there is
    one.
    """
    os.sched_setaffinity(0, CORES[:1])
    yield
    os.sched_setaffinity(0, CORES[1:] or CORES)


def when_idle(work: Callable[..., Any], *args: Any) -> None:
    """Main function of the attackers' process: on a core that nobody else wants at the moment."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    work(*args)


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
    with first_core():
        process.start()
    assert ours.poll(60.0)
    endpoint = ours.recv()
    keys = KeyFolder(folder / target.member) if folder else None
    if keys and folder:
        for peer in (STRANGER, OBSERVER, MEMBER):
            KeyFolder(folder / peer).trust(channel(endpoint, "teleop"), KeyFolder(folder / "server").identity().public)
        keys.trust(endpoint, KeyFolder(folder / "server").identity().public)
    curve = client_keys(endpoint, KeyFolder(folder / who)) if folder and who not in (NOBODY, NO_ONE) else None
    assert process.pid is not None
    found: dict[str, Any] = {"target": name, "keys": bool(folder), "attack": family, "who": who}
    try:
        connect = partial(target.ask, endpoint, keys)
        ask, leave = connect(False)
        ask_for(ask, connect, SETTLE_S, target.every_s)
        before = resident_mb(process.pid)
        if name == GATEWAY:
            work: Any = (pages.attack, family, endpoint, who == INSIDE, time.monotonic() + seconds + STARTING_S)
        else:
            address = channel(endpoint, target.channel) if target.channel else endpoint
            work = (attack, family, int(address.rpartition(":")[2]), curve, seconds)
        attacker = context.Process(target=when_idle, args=work, daemon=True)
        if family != NOTHING:
            attacker.start()
        trips, admitted = ask_for(ask, connect, seconds + 0.5, target.every_s)
        found |= {
            "p50_ms": round(1e3 * float(np.median(trips)), 2),
            "p99_ms": round(1e3 * float(np.quantile(trips, 0.99)), 2),
            "admitted_ms": round(1e3 * float(admitted.max()), 1),
            "memory_mb": round(resident_mb(process.pid) - before, 1),
        }
        leave()
        if family != NOTHING:
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


def all_rows() -> list[tuple[str, str, str, bool]]:
    """Target, attack, who attacks, and whether there are keys, of every row."""
    rows = []
    for target in TARGETS:
        families, nobody = attackers(target)
        rows.append((target, NOTHING, NO_ONE, False))
        rows += [(target, family, who, False) for who in nobody for family in families]
        if target in KEYED:
            rows.append((target, NOTHING, NO_ONE, True))
            rows += [(target, family, who, True) for who in (NOBODY, STRANGER, OBSERVER, MEMBER) for family in FAMILIES]
    return [*rows, CLIENT_ROW]


def main(args: argparse.Namespace) -> int:
    seconds, out = LONG_S if args.long else args.seconds, args.out or RESULTS / "attacks.json"
    before = still_true(out)
    rows: list[dict[str, Any]] = before["rows"] if before.get("seconds") == seconds else []
    done = {(row["target"], row["attack"], row["who"], row["keys"]) for row in rows}
    wanted = [row for row in all_rows() if row not in done and (not args.targets or row[0] in args.targets)]

    def note(row: dict[str, Any]) -> None:
        rows.append(row)
        shown = (f"{row.get(k, '-')!s:>10}" for k in ("p50_ms", "p99_ms", "admitted_ms", "memory_mb"))
        where = f"{row['target']}{', keyed' if row['keys'] else ''}"
        print(f"{where:<24}{row['attack']:<22}{row['who']:<16}{row['alive']!s:<6}", *shown, flush=True)

    print(f"{'target':<24}{'attack':<22}{'by a peer':<16}{'alive':<6}        p50        p99  newcomer       +MB")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_keys(folder)
        for row in wanted:
            target, family, who, keyed = row
            keys = folder if keyed else None
            if row == CLIENT_ROW:
                note(run_client(seconds))
            else:
                note(best(rows, partial(run, target, family, who, keys, seconds)))
            write("attacks", checks(rows), {"seconds": seconds, "rows": rows}, path=out)
    return 0


def best(rows: list[dict[str, Any]], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A new row, measured again where it is :func:`late`; a failure is not measured again."""
    found = [measure()]
    while late(found[-1], rows) and len(found) < TIMES:
        found.append(measure())
    row = min(found, key=lambda row: row.get("p99_ms", 0.0))
    return row | {
        "memory_mb": max(r.get("memory_mb", 0.0) for r in found),
        "p99_ms_of_all": [r.get("p99_ms") for r in found],
    }


def late(row: dict[str, Any], rows: list[dict[str, Any]]) -> bool:
    """Whether round trips took over twice as long as those of the idle row; within a millisecond, which is the
    machine's own noise, rows count as equal.
    """
    end = (row["target"], row["keys"], NOTHING)
    idle = next(r.get("p99_ms", 0.0) for r in [*rows, row] if (r["target"], r["keys"], r["attack"]) == end)
    return row.get("p99_ms", 0.0) > max(2 * idle, idle + 1.0)


def checks(rows: list[dict[str, Any]]) -> list[Check]:
    """The claims."""
    measured = [row for row in rows if "p99_ms" in row]
    too_late = [row for row in measured if late(row, rows)]
    return [
        Check("processes that ended under attack", sum(not row["alive"] for row in rows), 0, "<="),
        Check("peers that belong there and got no answer", sum("wrong" in row for row in rows), 0, "<="),
        Check("resident memory under attack, MB more", max(row.get("memory_mb", 0.0) for row in rows), 64, "<="),
        Check("longest wait of a newcomer, ms", max((row["admitted_ms"] for row in measured), default=0), 1000, "<="),
        Check(
            "rows whose p99 of round trips more than doubled",
            len(too_late),
            0,
            "<=",
            why="; ".join(f"{r['target']}, {r['attack']}" for r in too_late),
        ),
        Check("rows", len(rows), len(all_rows())),
    ]


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("targets", nargs="*", help=f"of {', '.join(TARGETS)}")
    arguments.add_argument("--seconds", type=float, default=60.0, help="of each attack (default: %(default)g)")
    arguments.add_argument("--long", action="store_true", help=f"{LONG_S:g} s of each")
    arguments.add_argument("--out", type=Path, help="another file than docs/results/attacks.json")
    sys.exit(main(arguments.parse_args()))

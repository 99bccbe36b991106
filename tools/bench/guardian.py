"""What a robot does when node, control process or policy server is killed, stopped, crashes, hangs or locks up.

    python tools/bench/guardian.py [--repeats 20] [part of a row's name ...]

Two emulated robots with LeRobot's drivers: an SO-101 that swings, and a LeKiwi whose base drives ahead. Each row does
one harm while the robot moves, and the robot is judged by what its servos were told on the bus:

- *rest*: when the last wheel was told to stand still, and the arm to stay where it was. For the control process from
  the harm on. For node and server from the last command that meant to move on (by more than a degree): the robot may
  follow a plan that it has, up to its end, and has to stand still then. An arm rests from its last goal on, as it stays
  there: 0 ms; a wheel has to be told.
- *torque off*: how often a servo was told to let go.
- *travel*: path of the base from the harm on, m; farthest turn of a joint, degrees.

Processes are forked from one that has LeRobot loaded already; nothing else differs from ``vla run``.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing as mp
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from guardian_robot import EXECUTE, GIL_S, RATE_HZ, HarmedRobot, harm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from freshness import still_true
from results import RESULTS, Check, parser, write
from robot_drivers.feetech_protocol import signed
from robot_drivers.feetech_servo import REGISTERS
from robot_drivers.so101_emulator import Emulator
from vla_stack.runtime import node as node_module
from vla_stack.runtime.executor import ExecutorConfig
from vla_stack.runtime.node import RobotNode

HERE = Path(__file__).resolve().parent
REST_MS = 150.0
STEADY_S, WAIT_S, STARTS = 0.4, 120.0, 20
STILL_TICKS = 12  # about a degree: goals that differ by less are the same; the arm is where its goal is, within four
TORQUE, GOAL, SPEED = (REGISTERS[name].address for name in ("torque_enable", "goal", "goal_velocity"))
ARM_IDS, WHEEL_IDS = range(1, 7), range(7, 10)
SIGNALS = {"kill -9": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP, "SEGV": signal.SIGSEGV}
WINDOW_S = {"gil": GIL_S + 1.5}  # the command that an owner may send when it wakes counts
HARMS = (*SIGNALS, "gil", "hang", "exception")
PLACES = ("control process", "node", "server")
NAMES = {"gil": f"{GIL_S} s with the interpreter locked"}


@dataclass(frozen=True)
class Row:
    robot: str
    place: str
    how: str

    @property
    def name(self) -> str:
        return f"{self.robot}: {self.place}, {NAMES.get(self.how, self.how)}"


ROWS = tuple(Row(robot, place, how) for robot in ("SO-101", "LeKiwi") for place in PLACES for how in HARMS)


class NotMoving(RuntimeError):
    """The robot could not be started; on a crowded computer a bus may be too slow for its first reading."""


class Rig:
    """One emulated robot and a policy server, for all of its rows."""

    def __init__(self, robot: str, folder: Path, stack: ExitStack) -> None:
        self.robot, self.folder = robot, folder
        self.arm = stack.enter_context(Emulator(folder / "arm", image_size=0, base=robot == "LeKiwi", seed=1))
        kind = "lekiwi" if robot == "LeKiwi" else "so101_follower"
        options = {"robot_type": kind, "rate_hz": RATE_HZ, "cameras": {}, **self.arm.device()}
        self.make = partial(HarmedRobot, folder, **options)
        driver = self.make()
        driver.connect()
        (folder / "spec.json").write_text(json.dumps(driver.spec.to_json()))
        driver.disconnect()
        self._server: subprocess.Popen[str] | None = None
        stack.callback(self.end_server)

    def server(self) -> str:
        """Endpoint of a server that runs."""
        if self._server is None:
            arguments = [str(self.folder), str(self.folder / "spec.json"), "tcp://127.0.0.1:*"]
            command = [sys.executable, str(HERE / "guardian_robot.py"), *arguments]
            self._server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            assert self._server.stdout is not None
            self._endpoint = self._server.stdout.readline().strip()
        return self._endpoint

    def end_server(self) -> None:
        if self._server is not None:
            self._server.kill()
            self._server.wait()
            self._server = None

    def run(self, row: Row) -> dict[str, Any]:
        """Do the harm of a row once; what the servos were told, and how far the robot came.

        Raises:
            NotMoving: There was nothing to harm.
        """
        self.arm.reset(0)
        pids = {"server": 0}
        endpoint = self.server()
        assert self._server is not None
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            drive(endpoint, self.make, self.folder, writer)
        os.close(writer)
        try:
            if not (control := _line(reader)):
                raise NotMoving(row.name)
            pids = {"control process": int(control), "node": child, "server": self._server.pid}
            if _line(reader) != "moving":
                raise NotMoving(row.name)
            time.sleep(STEADY_S + np.random.default_rng().uniform(0, 0.1))
            before = self._under_way(row)
            harmed_ns = self._signal(pids[row.place], SIGNALS[row.how]) if row.how in SIGNALS else self._order(row)
            time.sleep(WINDOW_S.get(row.how, 1.5))
            after, written = self.arm.status(), self.arm.written()
        finally:
            for pid in (child, pids.get("control process", 0)):
                if pid:
                    os.kill(pid, signal.SIGKILL) if _lives(pid) else None
            os.waitpid(child, 0)
            os.close(reader)
            if row.place == "server":
                self.end_server()
            for order in (*PLACES, "taken"):
                (self.folder / order).unlink(missing_ok=True)
            self._wait_for_rest()
        return judge(row, harmed_ns, written, before, after)

    def _under_way(self, row: Row) -> Any:
        """The emulator's status at a moment at which the robot moves."""
        before, end = self.arm.status(), time.monotonic() + 2 * STEADY_S
        while time.monotonic() < end:
            time.sleep(0.05)
            status = self.arm.status()
            turned = np.rad2deg(np.abs(np.subtract(status["angles"]["follower"], before["angles"]["follower"])).max())
            if status["velocity"][0] > 0.2 if row.robot == "LeKiwi" else turned > 1.0:
                return status
            before = status
        raise NotMoving(row.name)

    def _signal(self, pid: int, number: int) -> int:
        """Send it; when. In real-time priority, or a crowded computer might come between the clock and the signal."""
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
        now = time.monotonic_ns()
        os.kill(pid, number)
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        return now

    def _order(self, row: Row) -> int:
        """Ask a process to harm itself; when it began to."""
        (self.folder / "order").write_text(row.how)
        (self.folder / "order").rename(self.folder / row.place)
        end = time.monotonic() + WAIT_S
        while not (self.folder / "taken").exists():
            if time.monotonic() > end:
                raise RuntimeError(f"the {row.place} did not take its order")
            time.sleep(0.002)
        return int((self.folder / "taken").read_text())

    def _wait_for_rest(self) -> None:
        """Until the guardian of a process that was killed just now is done with the bus."""
        end, count = time.monotonic() + WAIT_S, -1
        while time.monotonic() < end:
            time.sleep(0.3)
            before, count = count, len(self.arm.written()) + sum(self.arm.status()["bus"]["follower"].values())
            if count == before:
                return
        raise RuntimeError("somebody still uses the bus")


def drive(endpoint: str, make: Any, folder: Path, writer: int) -> None:
    """Main of the node's process, forked; never returns."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what is done on purpose need not be told
    fork = mp.get_context("fork")
    node_module.mp.get_context = lambda method=None: fork  # type: ignore[assignment]
    moving = 0

    def seen(_: Any) -> None:
        nonlocal moving
        moving += 1
        if moving == 5:
            os.write(writer, b"moving\n")
        harm(folder, "node")

    try:
        with RobotNode(endpoint, make, ExecutorConfig(execute=EXECUTE), rearm=lambda: False) as node:
            assert node._process is not None
            os.write(writer, f"{node._process.pid}\n".encode())
            node.run_episode(0, on_observation=lambda obs: seen(obs) if node.counters["chunks"] else None)
    finally:
        os._exit(0)


def judge(
    row: Row, harmed_ns: int, written: list[tuple[int, int, int, bytes, int]], before: Any, after: Any
) -> dict[str, Any]:
    """When the robot was told to rest, ms after the harm or after the last command that meant motion, and the rest."""
    rest_ns, last_ns, held = (_base_rest if row.robot == "LeKiwi" else _arm_rest)(written)
    if row.robot == "SO-101" and row.place == "control process":
        rest_ns, held = _told_to_stay(written, harmed_ns)
    since = harmed_ns if row.place == "control process" else max(harmed_ns, last_ns)
    turned = np.abs(np.subtract(after["angles"]["follower"], before["angles"]["follower"])).max()
    travel = after["path_m"] - before["path_m"] if row.robot == "LeKiwi" else float(np.rad2deg(turned))
    let_go = sum(
        at <= TORQUE < at + len(data) and not data[TORQUE - at] for t, _, at, data, _ in written if t >= harmed_ns
    )
    return {
        "row": row.name,
        "rest_ms": max(0.0, (rest_ns - since) * 1e-6) if held else float("inf"),
        "torque_off": let_go + (after["limp_s"]["follower"] > before["limp_s"]["follower"]),
        "travel": travel,
    }


def _base_rest(written: list[tuple[int, int, int, bytes, int]]) -> tuple[int, int, bool]:
    """When wheels were told to stand still for good, when told to turn last, and whether they were at all."""
    told = [(t, int.from_bytes(data, "little")) for t, i, at, data, _ in written if at == SPEED and i in WHEEL_IDS]
    last = max((t for t, speed in told if signed(speed, 15)), default=0)
    rest = [t for t, _ in told if t > last]
    return (min(rest) if rest else 0), last, bool(rest)


def _told_to_stay(written: list[tuple[int, int, int, bytes, int]], since_ns: int) -> tuple[int, bool]:
    """When all goals were set to where the joints were, and whether they were."""
    told: dict[int, list[int]] = {}
    for t, i, at, data, position in written:
        if at == GOAL and i in ARM_IDS and t >= since_ns:
            told.setdefault(t, []).append(abs(int.from_bytes(data[:2], "little") - position))
    at_rest = [t for t, away in told.items() if max(away) <= STILL_TICKS]
    return min(at_rest, default=0), bool(at_rest)


def _arm_rest(written: list[tuple[int, int, int, bytes, int]]) -> tuple[int, int, bool]:
    """When goals came to stay for good, when they changed before, and whether the arm is where they are."""
    goals = [
        (t, i, int.from_bytes(data[:2], "little"), position)
        for t, i, at, data, position in written
        if at == GOAL and i in ARM_IDS
    ]
    final = {i: goal for _, i, goal, _ in goals}
    where = {i: position for _, i, _, position in goals}
    moved = [t for t, i, goal, _ in goals if abs(goal - final[i]) > STILL_TICKS]
    last = max(moved, default=0)
    rest = min((t for t, *_ in goals if t > last), default=last)
    joints = [i for i in final if i != max(ARM_IDS)]  # the gripper may press on something
    return rest, last, all(abs(final[i] - where[i]) <= 4 * STILL_TICKS for i in joints)


def _line(fd: int) -> str:
    text, end = b"", time.monotonic() + WAIT_S
    while not text.endswith(b"\n") and (left := end - time.monotonic()) > 0:
        if select.select([fd], [], [], left)[0]:
            if not (byte := os.read(fd, 1)):
                break
            text += byte
    return text.decode().strip()


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def main() -> int:
    p = parser(__doc__)
    p.add_argument("--repeats", type=int, default=20, help="of each row (default: %(default)s)")
    p.add_argument(
        "names", nargs="*", metavar="name", help="parts of rows' names (default: all, and a file is written)"
    )
    args = p.parse_args()
    rows = [row for row in ROWS if not args.names or any(name in row.name for name in args.names)]
    warnings.filterwarnings("ignore", message=".*use of fork.*")
    before = {} if args.names else still_true(RESULTS / "guardian.json")  # repeats of the same code count
    found: dict[str, list[dict[str, Any]]] = before.get("rows") or {row.name: [] for row in rows}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        rigs: dict[str, Rig] = {}
        for robot in dict.fromkeys(row.robot for row in rows):
            (Path(folder) / robot).mkdir()
            rigs[robot] = Rig(robot, Path(folder) / robot, stack)
        for repeat in range(before.get("repeats", 0), args.repeats):
            for row in rows:
                seen = started(rigs[row.robot], row)
                found[row.name].append(seen)
                unit = "m" if row.robot == "LeKiwi" else "degrees"
                figures = f"rest after {seen['rest_ms']:6.1f} ms, {seen['travel']:7.3f} {unit}"
                print(f"{row.name:<58} {figures}, torque off {seen['torque_off']}", flush=True)
            if not args.names:  # it takes long: what there is stays if it is interrupted
                write("guardian", summary(found), {"repeats": repeat + 1, "rate_hz": RATE_HZ, "rows": found})
    return 0


def started(rig: Rig, row: Row) -> dict[str, Any]:
    for _ in range(STARTS - 1):
        try:
            return rig.run(row)
        except NotMoving:
            rig.end_server()
    return rig.run(row)


def summary(found: dict[str, list[dict[str, Any]]]) -> list[Check]:
    """p99 of the time to rest over all repeats of a place and robot, with the median distance, and of each row."""
    checks = []
    for robot in ("SO-101", "LeKiwi"):
        for place in PLACES:
            rows = [seen for name, many in found.items() if name.startswith(f"{robot}: {place}") for seen in many]
            rest = np.array([seen["rest_ms"] for seen in rows])
            late = [f"{seen['row']}: {seen['rest_ms']:.0f} ms" for seen in rows if seen["rest_ms"] > REST_MS]
            p99 = float(np.quantile(rest, 0.99))
            checks.append(Check(f"{robot}, {place}: ms to rest, p99", p99, REST_MS, "<=", why="; ".join(late)))
            checks.append(Check(f"{robot}, {place}: ms to rest, median", float(np.median(rest))))
            off = float(sum(seen["torque_off"] for seen in rows))
            checks.append(Check(f"{robot}, {place}: torque off", off, 0, "<=", why="a servo was told to let go"))
            unit = "m" if robot == "LeKiwi" else "degrees"
            farthest = max(seen["travel"] for seen in rows)
            checks.append(Check(f"{robot}, {place}: farthest travel, {unit}", farthest))
    return checks


if __name__ == "__main__":
    sys.exit(main())

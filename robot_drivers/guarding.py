"""The driver's side of its guardian: starts it, feeds its heartbeat, says whether it had to act."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from robot_drivers import guardian
from vla_stack.errors import UserError

START_S = 20.0
PATIENCE_NS = 100_000_000  # of a control loop that beats while it waits, too; the robot is at rest 50 ms after it


@dataclass(frozen=True)
class GuardedBus:
    """What the guardian has to know of a bus; see :class:`robot_drivers.guardian.GuardianBus`."""

    port: str
    baud: int
    positions: list[int]
    velocities: list[int]
    present: int
    goal: int
    speed: int


class Guarding:
    """One guardian process and the memory that is shared with it. Called by whoever drives.

    Args:
        name: Of the robot, for messages.
        buses: What it brings to rest.
        patience_s: Longest silence after a command of an owner that does not :meth:`beat` on its own.

    Raises:
        UserError: The guardian does not start.
    """

    def __init__(self, name: str, buses: list[GuardedBus], patience_s: float) -> None:
        self._plan = json.dumps({"name": name, "buses": [asdict(bus) for bus in buses]})
        self._buses = [guardian.GuardianBus(**asdict(bus)) for bus in buses]  # for this process, see brake()
        self._fd = os.memfd_create("guardian")
        os.ftruncate(self._fd, guardian.WORDS * 8)
        self._words = memoryview(mmap.mmap(self._fd, guardian.WORDS * 8)).cast("Q")
        self._words[guardian.PATIENCE_NS] = round(patience_s * 1e9)
        self._start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def trips(self) -> int:
        """How often the guardian had to act."""
        return int(self._words[guardian.TRIPS])

    @property
    def tripped(self) -> bool:
        """It had to act, and goes on until :meth:`rest` takes note of that."""
        return bool(self._words[guardian.NOTED] != self._words[guardian.TRIPS])

    @property
    def trouble(self) -> str:
        """Why no command may be sent before the robot is stopped and re-armed; empty where all is well."""
        if self.tripped:
            silent_s = self._words[guardian.SILENT_NS] * 1e-9
            return f"the guardian brought it to rest: the process that drives it was silent for {silent_s:.2f} s"
        if self._process.poll() is not None:
            return f"its guardian has ended (exit code {self._process.returncode})"
        return ""

    def moving(self) -> None:
        """A command is about to be sent: from now on silence counts."""
        self._words[guardian.BEATS] += 1
        self._words[guardian.STATE] = guardian.MOVING

    def beat(self, strict: bool = True) -> None:
        """The owner is alive; ``strict`` where it says so while it waits too, so that 0.1 s of silence is too long."""
        self._words[guardian.BEATS] += 1
        if strict:
            self._words[guardian.PATIENCE_NS] = min(self._words[guardian.PATIENCE_NS], PATIENCE_NS)

    def rest(self) -> None:
        """The robot was told to stand still: silence is fine, what happened is noted, a dead guardian replaced."""
        self._words[guardian.NOTED] = self._words[guardian.TRIPS]
        self._words[guardian.STATE] = guardian.RESTING
        if self._process.poll() is not None:
            self._start()

    def brake(self) -> bool:
        """Command rest once from here, as the guardian does: zero velocities first. Whether the buses confirm it."""
        for bus in self._buses:
            bus.forget()
        return all([bus.rest() for bus in self._buses])

    def end(self) -> None:
        """The robot stands still and nobody drives it any more; may be called twice."""
        self._words[guardian.STATE] = guardian.FAREWELL
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _start(self) -> None:
        self._words[guardian.READY] = 0
        command = [
            sys.executable,
            "-I",
            "-S",
            str(Path(guardian.__file__)),
            str(os.getpid()),
            str(self._fd),
            self._plan,
        ]
        # A session of its own: Ctrl-C, and whatever ends the owner's process group, does not reach it.
        self._process = subprocess.Popen(
            command, pass_fds=[self._fd], start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        deadline = time.monotonic() + START_S
        while not self._words[guardian.READY]:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise UserError("the guardian of the robot's bus does not start", "look at what it says above")
            time.sleep(0.001)

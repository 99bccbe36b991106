"""Brings a robot to rest when the process that drives it dies, hangs or is stopped. A program of its own.

    python -I -S guardian.py OWNER_PID MEMORY_FD PLAN_JSON        # started by robot_drivers/guarding.py

It imports the standard library alone, nothing of this tree: what it guards against may be a fault in any of it. Its
memory is pinned and it asks for real-time priority where the system allows both. It reads no clock of its owner's: a
counter in shared memory is its heartbeat, and only that it changes counts.

**When it acts.** The owner is gone without a farewell (``pidfd``: noticed at once), or is moving the robot and has not
beaten for its patience (0.1 s under a control loop): hung, stopped, starved, or with its interpreter locked.

**What it does.** Velocities are commanded to zero, positions to where they are. Torque is never touched. Each command
is read back and repeated until the bus confirms it.

**Two processes on one bus.** The guardian opens the port when it acts, not before, and closes it afterwards; a serial
port can be opened twice. It neither stops nor kills its owner: a tick that is late on a busy computer must not end an
episode and its recording. Instead it counts a *trip* before it writes. The owner looks at that count before each
command and sends none until it has taken note of it, which is a STOP that somebody re-arms. A command that had passed
that look when the owner stalled may still come out when the owner wakes, one; so as long as the owner has not taken
note, the guardian repeats itself whenever its patience is over. Frames have checksums, so what two voices spoil on the
wire is nothing for a motor; the guardian tries again.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import select
import sys
import termios
import time
from typing import Any

# Words of 64 bits in the shared memory; who writes them.
BEATS, STATE, PATIENCE_NS, NOTED = range(4)  # the owner; NOTED is the last trip that it has taken note of
TRIPS, READY, RESTED_NS, SILENT_NS = range(4, 8)  # the guardian; the monotonic time of the last confirmed rest
WORDS = 8
RESTING, MOVING, FAREWELL = range(3)

LOOK_MS = 5  # between two looks at the heartbeat
ANSWER_S = 0.02  # longest wait for the answers to one question
GIVE_UP_S = 30.0  # after the owner's death, for a bus that does not answer
HEADER, BROADCAST, SYNC_READ, SYNC_WRITE = b"\xff\xff", 0xFE, 0x82, 0x83
MCL_CURRENT = 1


class GuardianBus:
    """The guardian's own handle to a Feetech bus (protocol 0: STS and SMS servos).

    Args:
        port: Path of the serial port.
        baud: Its speed.
        positions, velocities: Ids of the motors in either mode.
        present, goal, speed: Addresses of the two-byte registers Present_Position, Goal_Position and Goal_Velocity.
    """

    def __init__(
        self, port: str, baud: int, positions: list[int], velocities: list[int], present: int, goal: int, speed: int
    ) -> None:
        self._port, self._baud = port, getattr(termios, f"B{baud}")
        self._positions, self._velocities = positions, velocities
        self._present, self._goal, self._speed = present, goal, speed
        self._held: dict[int, bytes] = {}

    def forget(self) -> None:
        """The robot has moved since: the next rest is wherever it is then."""
        self._held = {}

    def rest(self) -> bool:
        """Command rest once; whether the bus confirms all of it. The positions are those of the first time."""
        try:
            fd = self._open()
        except OSError:
            return False
        try:
            zero = dict.fromkeys(self._velocities, b"\0\0")
            if zero:  # needs no answer, so it comes first
                self._write(fd, self._speed, zero)
            missing = [i for i in self._positions if i not in self._held]
            if missing:
                self._held |= self._read(fd, self._present, missing)
            if self._held:
                self._write(fd, self._goal, self._held)
            return (
                self._read(fd, self._speed, self._velocities) == zero
                and len(self._held) == len(self._positions)
                and self._read(fd, self._goal, self._positions) == self._held
            )
        except (OSError, termios.error):
            return False
        finally:
            os.close(fd)

    def _open(self) -> int:
        fd = os.open(self._port, os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK)
        try:
            control = termios.CS8 | termios.CREAD | termios.CLOCAL
            cc = termios.tcgetattr(fd)[6]
            termios.tcsetattr(fd, termios.TCSANOW, [0, 0, control, 0, self._baud, self._baud, cc])
            termios.tcflush(fd, termios.TCIFLUSH)
        except termios.error as e:
            os.close(fd)
            raise OSError(str(e)) from None
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _write(self, fd: int, address: int, values: dict[int, bytes]) -> None:
        data = b"".join(bytes((i,)) + value for i, value in values.items())
        os.write(fd, frame(BROADCAST, SYNC_WRITE, bytes((address, 2)) + data))

    def _read(self, fd: int, address: int, ids: list[int]) -> dict[int, bytes]:
        """Two bytes of each motor that answers in time."""
        if not ids:
            return {}
        os.write(fd, frame(BROADCAST, SYNC_READ, bytes((address, 2, *ids))))
        seen, end = b"", time.monotonic() + ANSWER_S
        found: dict[int, bytes] = {}
        while len(found) < len(ids) and (left := end - time.monotonic()) > 0:
            if select.select([fd], [], [], left)[0]:
                seen += os.read(fd, 256)
                found = {i: value for i, value in answers(seen) if i in ids}
        return found


def frame(motor: int, instruction: int, parameters: bytes) -> bytes:
    """An instruction as it goes over the wire."""
    body = bytes((motor, len(parameters) + 2, instruction)) + parameters
    return HEADER + body + bytes((~sum(body) & 0xFF,))


def answers(data: bytes) -> list[tuple[int, bytes]]:
    """Id and value of each whole status with two bytes of parameters; a frame is FF FF id 4 error low high checksum."""
    found = []
    for at in range(len(data) - 7):
        body = data[at + 2 : at + 7]
        if data[at : at + 2] == HEADER and body[1] == 4 and ~sum(body) & 0xFF == data[at + 7]:
            found.append((body[0], body[3:5]))
    return found


def watch(owner: int, words: Any, buses: list[GuardianBus], name: str) -> None:
    """Guard until the owner says farewell, or is gone and the robot at rest."""
    pidfd = os.pidfd_open(owner)
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    beats, since = words[BEATS], time.monotonic_ns()
    words[READY] = 1
    while True:
        gone = bool(poller.poll(LOOK_MS))
        now = time.monotonic_ns()
        if words[STATE] == FAREWELL:
            return
        if gone:
            words[SILENT_NS] = now - since
            words[TRIPS] += 1
            last_words(words, buses, name)
            return
        noted = words[NOTED] == words[TRIPS]
        if words[STATE] == RESTING or (noted and words[BEATS] != beats):
            since = now
        beats = words[BEATS]
        if now - since > words[PATIENCE_NS]:
            if noted:  # not a repetition
                words[SILENT_NS] = now - since
                words[TRIPS] += 1
                for bus in buses:
                    bus.forget()
            if all([bus.rest() for bus in buses]):
                words[RESTED_NS] = time.monotonic_ns()
            since = time.monotonic_ns()


def last_words(words: Any, buses: list[GuardianBus], name: str) -> None:
    """The owner is gone: rest, again and again until the bus confirms it."""
    end = time.monotonic() + GIVE_UP_S
    for bus in buses:
        bus.forget()
    while time.monotonic() < end:
        if all([bus.rest() for bus in buses]):
            words[RESTED_NS] = time.monotonic_ns()
            text = "velocities are zero, positions and torque are held (vla robot release lets go)"
            break
        time.sleep(LOOK_MS * 1e-3)
    else:
        text = "ITS BUS DOES NOT ANSWER: use its power switch"
    with contextlib.suppress(OSError):
        os.write(2, f"guardian of {name}: the process that drove it is gone; {text}\n".encode())


def main() -> None:
    owner, fd, plan = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    buses = [GuardianBus(**bus) for bus in plan["buses"]]
    words = memoryview(mmap.mmap(fd, WORDS * 8)).cast("Q")
    with contextlib.suppress(OSError, AttributeError):  # not every user may, not every system can
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(2))
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mlockall(MCL_CURRENT)
    if os.getppid() == owner:  # else it has ended while this program started
        watch(owner, words, buses, plan["name"])


if __name__ == "__main__":
    main()

"""A Feetech bus without servos: a pseudo-terminal that answers as they would, faults of cable and adapter included.

A serial driver opens :attr:`FeetechBus.path`, a link that stays the same when the adapter is unplugged and plugged in
again, as a udev rule would have it. Answers come after the time that the bytes take on the wire at 1 Mbit/s, what the
adapter adds, and the servo's own return delay.
"""

from __future__ import annotations

import heapq
import os
import random
import time
import tty
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from robot_drivers.feetech_protocol import (
    ACTION,
    BROADCAST,
    PING,
    READ,
    REG_WRITE,
    SYNC_READ,
    SYNC_WRITE,
    WRITE,
    Packet,
    Parser,
    encode,
)
from robot_drivers.feetech_servo import Servo

JOURNAL = 4096  # writes that are remembered
BYTE_NS = 10_000  # ten bits at 1 Mbit/s
TURNAROUND_NS = 20_000  # from an instruction's last byte to the first of its status, return delay aside


@dataclass
class Line:
    """How good the cable is.

    Attributes:
        latency_s: What adapter and host add to each answer; a share of a half is random.
        loss: Probability that a frame is lost, either way.
        corruption: Probability that a status arrives with a flipped bit.
    """

    latency_s: float = 0.0005
    loss: float = 0.0
    corruption: float = 0.0


class FeetechBus:
    """The servos of one arm behind one port. Used by one thread.

    Args:
        servos: They answer to their registers' id.
        path: Link to the pseudo-terminal; its folder must exist.
        seed: Of latency, loss and corruption.

    Attributes:
        line: May be changed at any time.
        powered: Whether the servos have power; without it none answers.
        counters: Instructions by name, frames lost and corrupted.
        written: The newest writes that servos have obeyed: monotonic ns, servo, address, bytes, position then.
    """

    def __init__(self, servos: Sequence[Servo], path: Path, seed: int = 0) -> None:
        self.servos, self.path = list(servos), path
        self.line, self.powered = Line(), True
        self.counters: Counter[str] = Counter()
        self.written: deque[tuple[int, int, int, bytes, int]] = deque(maxlen=JOURNAL)
        self._random = random.Random(seed)
        self._parser = Parser()
        self._pending: list[tuple[int, int, bytes]] = []  # (due time in ns, order, frame)
        self._sent = 0
        self._deferred: dict[int, tuple[int, bytes]] = {}  # what REG_WRITE keeps for ACTION
        self._ends: tuple[int, int] | None = None

    def plug(self) -> None:
        """Make the port appear."""
        if self._ends is not None:
            return
        ours, theirs = os.openpty()  # their end stays open here too, or a driver that closes it would hang us up
        tty.setraw(theirs)
        os.set_blocking(ours, False)
        new = self.path.with_name(self.path.name + ".new")
        new.unlink(missing_ok=True)
        new.symlink_to(os.ttyname(theirs))
        new.replace(self.path)
        self._ends, self._parser, self._pending = (ours, theirs), Parser(), []

    def unplug(self) -> None:
        """Make the port vanish, open or not; the servos keep their power."""
        if self._ends is None:
            return
        self.path.unlink(missing_ok=True)
        for end in self._ends:
            os.close(end)
        self._ends = None

    def fileno(self) -> int | None:
        """What becomes readable with an instruction; None while unplugged."""
        return None if self._ends is None else self._ends[0]

    @property
    def due_ns(self) -> int | None:
        """Monotonic time of the next answer; None where none is waiting."""
        return self._pending[0][0] if self._pending else None

    def receive(self) -> None:
        """Take the instructions that have come and obey them; answers are sent by :meth:`send`."""
        if self._ends is None:
            return
        try:
            data = os.read(self._ends[0], 4096)
        except (BlockingIOError, OSError):  # EIO: nobody has the port open
            return
        now = time.monotonic_ns()
        for packet in self._parser.feed(data):
            if self._random.random() < self.line.loss:
                self.counters["lost"] += 1
            elif self.powered:
                self._obey(packet, now)

    def send(self) -> None:
        """Send the answers that are due."""
        while self._pending and self._pending[0][0] <= time.monotonic_ns():
            frame = heapq.heappop(self._pending)[2]
            if self._ends is not None:
                try:
                    os.write(self._ends[0], frame)
                except OSError:  # nobody reads: a real adapter drops them too
                    self.counters["dropped"] += 1

    def _obey(self, packet: Packet, now: int) -> None:
        names = {PING: "ping", READ: "read", WRITE: "write", REG_WRITE: "reg write", ACTION: "action"}
        names |= {SYNC_READ: "sync read", SYNC_WRITE: "sync write"}
        self.counters[names.get(packet.instruction, "unknown")] += 1
        data = packet.parameters
        addressed = [s for s in self.servos if packet.id in (s["id"], BROADCAST)]
        wire = (len(data) + 6) * BYTE_NS
        latency = self.line.latency_s * (0.75 + 0.5 * self._random.random())
        at = now + wire + int(latency * 1e9)
        if packet.instruction == SYNC_READ and len(data) >= 2:
            for servo_id in data[2:]:
                for servo in self.servos:
                    if servo["id"] == servo_id:
                        at = self._answer(servo, servo.read(data[0], data[1]), at)
        elif packet.instruction == SYNC_WRITE and len(data) >= 2:
            size = data[1]
            for i in range(2, len(data) - size, size + 1):
                for servo in self.servos:
                    if servo["id"] == data[i]:
                        self._write(servo, data[0], data[i + 1 : i + 1 + size], now)
        elif packet.instruction == PING:
            for servo in addressed:
                at = self._answer(servo, b"", at)
        elif packet.instruction == READ and len(data) == 2 and packet.id != BROADCAST:
            for servo in addressed:
                at = self._answer(servo, servo.read(data[0], data[1]), at)
        elif packet.instruction in (WRITE, REG_WRITE) and data:
            for servo in addressed:
                if packet.instruction == WRITE:
                    self._write(servo, data[0], data[1:], now)
                else:
                    self._deferred[servo["id"]] = (data[0], data[1:])
                if packet.id != BROADCAST and servo["response_level"]:
                    at = self._answer(servo, b"", at)
        elif packet.instruction == ACTION:
            for servo in addressed:
                if (deferred := self._deferred.pop(servo["id"], None)) is not None:
                    self._write(servo, *deferred, now)

    def _write(self, servo: Servo, address: int, data: bytes, now: int) -> None:
        self.written.append((now, servo["id"], address, bytes(data), servo["position"]))
        servo.write(address, data)

    def _answer(self, servo: Servo, parameters: bytes, at: int) -> int:
        """Queue a status; returns when its last byte is on the wire."""
        frame = encode(servo["id"], servo.errors, parameters)
        at += TURNAROUND_NS + servo["return_delay"] * 2_000 + len(frame) * BYTE_NS
        if self._random.random() < self.line.loss:
            self.counters["lost"] += 1
            return at
        if self._random.random() < self.line.corruption:
            self.counters["corrupted"] += 1
            spoilt = bytearray(frame)
            spoilt[-1] ^= 1 << self._random.randrange(8)
            frame = bytes(spoilt)
        self._sent += 1
        heapq.heappush(self._pending, (at, self._sent, frame))
        return at

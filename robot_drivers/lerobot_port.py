"""The serial ports below a LeRobot device, as their SDK leaves them and as a control loop needs them.

Feetech's and Dynamixel's SDKs spin on an empty port until an answer comes. On a busy computer the scheduler takes the
processor away from who spins, for tens of milliseconds; back on it, the SDK looks at the clock before it looks at the
port, and calls an answer late that lies there. Who sleeps until bytes come is woken with them. They also wait tens of
milliseconds for what comes after three or never, which is longer than a control loop can.

A serial port can be opened twice, and two programs that drive one arm throw it to and fro. So a port is claimed for as
long as it is open. The guardian, which acts when its owner does not, and who lets an arm go open it all the same.

They also forget nothing: answers to an attempt that was given up are taken for those to the next request, LeRobot's
own retries included, and from then on every reading is one request old.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from vla_stack.errors import UserError

ATTEMPTS = 3  # of a reading
WAIT_S = 0.002  # longest sleep before the SDK looks at its clock again
ANSWER_S = 0.008  # longest wait of a control loop for an answer, its time on the wire aside, where the bus is no slower
QUIET_S, SILENCE_S = 0.005, 0.03  # a line on which nothing came for this long is silent; the longest wait for that


def arms(device: Any) -> dict[str, Any]:
    """Prefix of its features' names -> device with motors; two of them in a bimanual one, otherwise itself."""
    if hasattr(device, "left_arm") and hasattr(device, "right_arm"):
        return {"left_": device.left_arm, "right_": device.right_arm}
    return {"": device}


def buses(device: Any) -> dict[str, Any]:
    """Prefix, as of :func:`arms`, -> LeRobot's motor bus; without what is driven by other means."""
    found = {prefix: getattr(arm, "bus", None) for prefix, arm in arms(device).items()}
    return {prefix: bus for prefix, bus in found.items() if hasattr(bus, "motors")}


class Patience:
    """Replaces the waiting of one port's SDK.

    Attributes:
        answer_s: Longest wait for an answer beyond its time on the wire, seconds; None is the SDK's own.
        until_s: Monotonic time at which every wait ends.
        heard_s: Monotonic time at which bytes came last.
    """

    def __init__(self, port: Any) -> None:
        self.answer_s: float | None = None
        self.until_s, self.heard_s = math.inf, 0.0
        self._port, self._begin, self._is_over = port, port.setPacketTimeout, port.isPacketTimeout
        port.readPort, port.setPacketTimeout, port.isPacketTimeout = self.read, self.begin, self.is_over
        port.patience = self

    def read(self, length: int) -> bytes:
        """Up to ``length`` bytes; sleeps until they come, but not for long."""
        serial = self._port.ser
        if serial.timeout != WAIT_S:  # opened anew
            serial.timeout = WAIT_S
        data: bytes = serial.read(length)
        if data:
            self.heard_s = time.monotonic()
        return data

    def begin(self, length: int) -> None:
        """An answer of ``length`` bytes is due from now on."""
        self._begin(length)
        if self.answer_s is not None:
            self._port.packet_timeout = self._port.tx_time_per_byte * (length + 3) + self.answer_s * 1000

    def is_over(self) -> bool:
        """Whether nothing is to be waited for: an answer that lies there is not late, whatever the clock says."""
        return bool(self._is_over() or time.monotonic() > self.until_s) and not self._port.ser.in_waiting


def prepare(device: Any) -> None:
    """Let a LeRobot device sleep, not spin, while it waits for an answer, and leave retries to :func:`insist`.

    From now on its ports open for this program alone: ``UserError`` where another has one.
    """
    for arm in arms(device).values():
        if hasattr(getattr(arm, "config", None), "num_read_retries"):
            arm.config.num_read_retries = 0
    for port in _ports(device):
        if hasattr(port, "readPort") and not hasattr(port, "patience"):
            Patience(port)
        if hasattr(port, "setupPort"):
            port.setupPort = partial(_set_up, port, port.setupPort)


@contextlib.contextmanager
def shared(bus: Any) -> Iterator[None]:
    """Inside, a bus can be opened beside a program that drives it."""
    bus.port_handler.shared = True
    try:
        yield
    finally:
        bus.port_handler.shared = False


def _set_up(port: Any, set_up: Callable[[int], bool], baud: int) -> bool:
    """Open a port as its SDK does, and claim it; the kernel lets go of the claim when the port is closed."""
    done = set_up(baud)
    if not getattr(port, "shared", False):
        fd = port.ser.fileno()
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = _owner(os.fstat(fd))
            port.closePort()
            raise UserError(
                f"{port.port_name} is in use by {owner}", "end that program: two fight over one arm"
            ) from None
    return done


def _owner(port: os.stat_result) -> str:
    """Who has claimed a port, as far as the system says."""
    file = f"{os.major(port.st_dev):02x}:{os.minor(port.st_dev):02x}:{port.st_ino}"
    with contextlib.suppress(OSError):  # Linux alone has such a list
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()
            if words[1:2] == ["FLOCK"] and words[5:6] == [file] and int(words[4]) > 0:  # 0: in another container
                return f"process {words[4]}"
    return "another program"


def hasten(device: Any, read: Callable[[], Any]) -> None:
    """Wait for answers no longer than this bus makes one wait, now that the device is connected.

    Adapters differ: some collect bytes for 16 ms before they pass them on. So ``read``, an exchange, is timed.

    Raises:
        ConnectionError: The bus spoils every reading.
    """
    if not _patiences(device):
        return
    took_s = math.inf
    for _ in range(ATTEMPTS):
        insist(device, read)
        began = time.monotonic()
        with contextlib.suppress(ConnectionError):
            read()
            took_s = min(took_s, time.monotonic() - began)
    for patience in _patiences(device):
        patience.answer_s = max(ANSWER_S, 2 * took_s) if math.isfinite(took_s) else None


@contextlib.contextmanager
def unhurried(device: Any) -> Iterator[None]:
    """Inside, the SDK is as patient as it was made: a motor that writes to its permanent memory answers late."""
    before = [(patience, patience.answer_s) for patience in _patiences(device)]
    for patience, _ in before:
        patience.answer_s = None
    try:
        yield
    finally:
        for patience, answer_s in before:
            patience.answer_s = answer_s


def insist[T](device: Any, call: Callable[[], T], budget_s: float = math.inf) -> T:
    """What ``call`` says; one that the bus spoils is tried again, once the remains of the attempt are forgotten.

    Args:
        device: Whose bus it uses.
        call: One exchange.
        budget_s: After this many seconds no attempt goes on but the first.

    Raises:
        ConnectionError: Each attempt failed.
    """
    end = time.monotonic() + budget_s
    try:
        for _ in range(ATTEMPTS - 1):
            try:
                return call()
            except ConnectionError:
                silence(device)
                if time.monotonic() >= end:
                    raise
            for patience in _patiences(device):
                patience.until_s = end
        return call()
    finally:
        for patience in _patiences(device):
            patience.until_s = math.inf


def silence(device: Any) -> None:
    """Let answers that are under way arrive, and forget them."""
    for port in _ports(device):
        serial, patience = getattr(port, "ser", None), getattr(port, "patience", None)
        with contextlib.suppress(Exception):  # a port that is gone has nothing to say: the next exchange finds out
            if serial is None or not serial.is_open:
                continue
            now = time.monotonic()
            end, heard = now + SILENCE_S, patience.heard_s if patience is not None else now
            while now < end:
                if serial.in_waiting:
                    serial.reset_input_buffer()
                    heard = now
                elif now - heard >= QUIET_S:
                    break
                time.sleep(max(0.0001, heard + QUIET_S - now))
                now = time.monotonic()
            serial.reset_input_buffer()


def one_line(error: Exception) -> str:
    """What an error of LeRobot or of an SDK says, for people."""
    return " ".join(str(error).split()) or type(error).__name__


def _ports(device: Any) -> list[Any]:
    found = [getattr(getattr(arm, "bus", None), "port_handler", None) for arm in arms(device).values()]
    return [port for port in found if port is not None]


def _patiences(device: Any) -> list[Patience]:
    return [port.patience for port in _ports(device) if hasattr(port, "patience")]

"""The serial port below a LeRobot device, as its SDK leaves it and as a control loop needs it.

Feetech's and Dynamixel's SDKs spin on an empty port until an answer comes. On a busy computer the scheduler takes the
processor away from who spins, for tens of milliseconds; back on it, the SDK looks at the clock before it looks at the
port, and calls an answer late that lies there. Who sleeps until bytes come is woken with them.

They also forget nothing: answers to an attempt that was given up are taken for those to the next request, LeRobot's
own retries included, and from then on every reading is one request old.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

ATTEMPTS = 3  # of a reading
WAIT_S = 0.005  # longest sleep before the SDK looks at its clock again
QUIET_S, SILENCE_S = 0.005, 0.03  # a line on which nothing came for this long is silent; the longest wait for that


def prepare(device: Any) -> None:
    """Let a LeRobot device sleep, not spin, while it waits for an answer, and leave retries to :func:`insist`."""
    if hasattr(getattr(device, "config", None), "num_read_retries"):
        device.config.num_read_retries = 0
    port = _port(device)
    if not hasattr(port, "readPort"):
        return

    def read(length: int) -> Any:
        if port.ser.timeout != WAIT_S:  # opened anew
            port.ser.timeout = WAIT_S
        return port.ser.read(length)

    port.readPort = read


def insist[T](device: Any, call: Callable[[], T]) -> T:
    """What ``call`` says; one that the bus spoils is tried again, once the remains of the attempt are forgotten.

    Raises:
        ConnectionError: Each attempt failed.
    """
    for _ in range(ATTEMPTS - 1):
        try:
            return call()
        except ConnectionError:
            silence(device)
    return call()


def silence(device: Any) -> None:
    """Let answers that are under way arrive, and forget them."""
    serial = getattr(_port(device), "ser", None)
    with contextlib.suppress(Exception):  # a port that is gone has nothing to say: the next exchange finds out
        if serial is not None and serial.is_open:
            end = time.monotonic() + SILENCE_S
            while time.monotonic() < end:
                serial.reset_input_buffer()
                time.sleep(QUIET_S)
                if not serial.in_waiting:
                    return
            serial.reset_input_buffer()


def _port(device: Any) -> Any:
    return getattr(getattr(device, "bus", None), "port_handler", None)

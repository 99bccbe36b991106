"""A robot that is read and never commanded: what would be sent is printed instead."""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from vla_stack.runtime.driver import Driver


def dry_run(driver: Driver, every_s: float = 0.5) -> Driver:
    """The same driver with its commands replaced: ``write`` prints, ``hold`` and ``stop`` do nothing.

    Args:
        driver: The robot; it is changed and returned, so that it stays what it is otherwise (episodic, self-checking).
        every_s: Seconds between printed commands.
    """
    count, printed = 0, -every_s
    measure = driver.read
    newest = None

    def read():  # type: ignore[no-untyped-def]
        nonlocal newest
        newest = measure()
        return newest

    def write(action: NDArray[np.float32]) -> NDArray[np.float32]:
        nonlocal count, printed
        count += 1
        if time.monotonic() - printed >= every_s:
            printed = time.monotonic()
            dims = driver.spec.action
            at = action if newest is None else newest.state[: len(dims)]
            terms = (f"{d.name} {a:+.3f} ({a - m:+.3f}) {d.unit}" for d, a, m in zip(dims, action, at, strict=True))
            print(f"dry run, command {count}: {', '.join(terms)}", flush=True)
        return action

    driver.read, driver.write = read, write  # type: ignore[method-assign]
    driver.hold = driver.stop = lambda: None  # type: ignore[method-assign]
    return driver

"""How well our control loop keeps time on an SO-101, beside LeRobot's own loop on the same emulated arm.

    python tools/bench/driver.py [seconds per cell]

For 30, 60 and 100 Hz: the achieved rate, how late ticks begin, and the time of a reading and of a command, with
unmodified SO-101 drivers on both sides, joints alone. LeRobot's loop is the one of its own scripts: observe, act, then
sleep for what is left of the period. Ours runs to absolute deadlines. The two take turns, so that they share what else
the machine does.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from results import Check, parser, write
from robot_drivers import make_driver
from robot_drivers.so101_emulator import Emulator
from vla_stack.runtime.clock import RealClock

RATES = (30.0, 60.0, 100.0)
ROUNDS = 3


def ours(driver: Any, rate: float, seconds: float) -> dict[str, Any]:
    """Sense and act at absolute deadlines, as the control loop does."""
    clock, dt_ns = RealClock(), round(1e9 / rate)
    log = Log(rate)
    start = clock.now_ns()
    k = 0
    while k < seconds * rate:
        clock.sleep_until_ns(start + k * dt_ns)
        begin = time.perf_counter_ns()
        obs = driver.read()
        read = time.perf_counter_ns()
        driver.write(obs.state[:6])
        log.add(begin, read, time.perf_counter_ns())
        k = max(k + 1, (clock.now_ns() - start) // dt_ns)
    return log.summary()


def theirs(robot: Any, rate: float, seconds: float) -> dict[str, Any]:
    """Observe and act, then LeRobot's sleep for the rest of the period."""
    from lerobot.utils.robot_utils import precise_sleep

    log = Log(rate)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        begin = time.perf_counter_ns()
        observation = robot.get_observation()
        read = time.perf_counter_ns()
        robot.send_action(observation)
        written = time.perf_counter_ns()
        log.add(begin, read, written)
        precise_sleep(max(1 / rate - (time.perf_counter_ns() - begin) * 1e-9, 0.0))
    return log.summary()


class Log:
    """Begin of each tick, end of its reading and of its command, nanoseconds."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._rows: list[tuple[int, int, int]] = []

    def add(self, begin: int, read: int, written: int) -> None:
        self._rows.append((begin, read, written))

    def summary(self) -> dict[str, Any]:
        """Rate in Hz; lateness against the ideal grid from the first tick on, and times of a call, in ms."""
        begin, read, written = np.array(self._rows, np.int64).T
        ticks = np.arange(len(begin)) if len(begin) < 2 else np.round((begin - begin[0]) * 1e-9 * self._rate)
        grid = (begin - begin[0]) * 1e-6 - np.maximum(ticks, 0) * 1e3 / self._rate
        drift = (begin - begin[0]) * 1e-6 - np.arange(len(begin)) * 1e3 / self._rate
        return {
            "rate_hz": float((len(begin) - 1) / ((begin[-1] - begin[0]) * 1e-9)),
            "jitter_ms_p99": float(np.quantile(np.abs(grid), 0.99)),
            "behind_ms_end": float(drift[-1]),
            "read_ms": quantiles((read - begin) * 1e-6),
            "write_ms": quantiles((written - read) * 1e-6),
        }


def quantiles(x: Any) -> dict[str, float]:
    return {"p50": float(np.median(x)), "p99": float(np.quantile(x, 0.99)), "max": float(np.max(x))}


def main() -> int:
    from lerobot.robots.so_follower import SO101Follower, SO101FollowerConfig

    p = parser(__doc__)
    p.add_argument("seconds", type=float, nargs="?", default=4.0, help="of a cell (default: %(default)g)")
    seconds = p.parse_args().seconds
    data: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, Emulator(Path(folder), image_size=0) as arm:
        device = arm.device()
        for rate in RATES:
            cells: dict[str, list[dict[str, Any]]] = {"ours": [], "lerobot": []}
            for _ in range(ROUNDS):
                driver = make_driver("lerobot", robot_type="so101_follower", rate_hz=rate, **device)
                driver.connect()
                cells["ours"].append(ours(driver, rate, seconds))
                driver.disconnect()
                robot = SO101Follower(
                    SO101FollowerConfig(**device | {"calibration_dir": Path(device["calibration_dir"])})
                )
                robot.connect(calibrate=False)
                cells["lerobot"].append(theirs(robot, rate, seconds))
                robot.disconnect()
            data[f"{rate:g}"] = cells
            print(rate, {who: round(mean(runs, "rate_hz"), 2) for who, runs in cells.items()}, flush=True)
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    why = f"{load:.0f} processes wanted the {cores} cores meanwhile" if load > 1.5 * cores else ""
    checks = []
    for rate in RATES:
        cells = data[f"{rate:g}"]
        share = {who: mean(runs, "rate_hz") / rate for who, runs in cells.items()}
        behind = {who: mean(runs, "behind_ms_end") / seconds for who, runs in cells.items()}
        checks += [
            Check(f"{rate:g} Hz: achieved share of the rate", share["ours"], 0.99, why=why),
            Check(f"{rate:g} Hz: LeRobot's loop", share["lerobot"]),
            Check(f"{rate:g} Hz: ms behind after a second", behind["ours"], 2.0, "<=", why=why),
            Check(f"{rate:g} Hz: LeRobot's loop, ms behind after a second", behind["lerobot"]),
        ]
        for call in ("read_ms", "write_ms"):
            p50 = {who: float(np.median([r[call]["p50"] for r in runs])) for who, runs in cells.items()}
            checks.append(Check(f"{rate:g} Hz: {call[:-3]}, ms", p50["ours"]))
            checks.append(Check(f"{rate:g} Hz: {call[:-3]} by LeRobot alone, ms", p50["lerobot"]))
    write("driver", checks, data)
    return 0


def mean(runs: list[dict[str, Any]], key: str) -> float:
    return float(np.mean([r[key] for r in runs]))


if __name__ == "__main__":
    sys.exit(main())

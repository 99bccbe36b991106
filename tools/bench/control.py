"""What the control loop waits for: its clock's lateness, and handing two 640x480 pictures to another process.

    python tools/bench/control.py

Lateness: the real control loop in a process of its own, a robot without hardware, beside one busy process, at 10 to
200 Hz. Hand-over: time that the writer spends, a pipe of bytes against shared-memory slots, to a reader that is busy
for 20 ms with each observation.
"""

from __future__ import annotations

import multiprocessing as mp
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from vla_stack.runtime.clock import RealClock
from vla_stack.runtime.control import ControlLoop
from vla_stack.runtime.executor import Executor, ExecutorConfig, Request, State
from vla_stack.runtime.link import Link, ObservationSlots
from vla_stack.runtime.safety import SafetyEnvelope
from vla_stack.schema import ActionChunk, Camera, Dim, Observation, PolicySpec, RobotSpec

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from results import Check, write

HORIZON, SECONDS, READER_S = 16, 6.0, 0.02
CAMERAS = (Camera("front", 480, 640), Camera("wrist", 480, 640))


def robot(rate_hz: float) -> RobotSpec:
    dims = tuple(Dim(f"joint_{i}.pos", "rad", -3.0, 3.0, 2.0) for i in range(7))
    return RobotSpec("bench/arm", dims, dims, CAMERAS, rate_hz)


def observation(spec: RobotSpec) -> Observation:
    images = {c.name: np.zeros((c.height, c.width, 3), np.uint8) for c in spec.cameras}
    return Observation(np.zeros(7, np.float32), images, "task", 0, time.monotonic_ns())


class Still:
    """A robot without hardware and, at once, a policy server without latency."""

    def __init__(self, rate_hz: float) -> None:
        self.spec, self._chunks = robot(rate_hz), []
        self._obs = observation(self.spec)

    def read(self) -> Observation:
        return Observation(self._obs.state, self._obs.images, "task", 0, time.monotonic_ns())

    def write(self, action: Any) -> Any:
        return action

    def hold(self) -> None: ...

    def stop(self) -> None: ...

    def offer(self, obs: Observation, request: Request | None) -> None:
        if request is not None:
            actions = np.zeros((HORIZON, 7), np.float32)
            self._chunks.append(ActionChunk(actions, request.origin, request.k_obs, request.rid, request.epoch))

    def receive(self) -> list[ActionChunk]:
        chunks, self._chunks = self._chunks, []
        return chunks

    def announce(self, k: int, state: State, why: str) -> None: ...


def loop(rate_hz: float, connection: Any) -> None:
    still = Still(rate_hz)
    executor = Executor(still.spec, PolicySpec(still.spec, HORIZON), ExecutorConfig())
    control = ControlLoop(still, executor, SafetyEnvelope(still.spec), RealClock(), still)  # type: ignore[arg-type]
    log = control.run(seed=0, max_ticks=round(SECONDS * rate_hz))
    late_ms = np.array(log.late_ns) * 1e-6
    connection.send({"late_ms": late_ms.tolist(), "overruns": log.overruns})


def spin() -> None:
    while True:
        pass


def lateness(context: Any, rate_hz: float) -> dict[str, float]:
    ours, theirs = context.Pipe()
    process = context.Process(target=loop, args=(rate_hz, theirs))
    process.start()
    result = ours.recv()
    process.join()
    late = np.array(result["late_ms"])
    p50, p99 = np.quantile(late, [0.5, 0.99])
    return {
        "rate_hz": rate_hz,
        "p50_ms": float(p50),
        "p99_ms": float(p99),
        "max_ms": float(late.max()),
        "last_ms": float(late[-1]),
        "overruns": result["overruns"],
    }


def reader(connection: Any, spec: RobotSpec, slots_name: str | None) -> None:
    link = Link(connection)
    slots = ObservationSlots(spec, slots_name) if slots_name else None
    try:
        while True:
            for message in link.receive(3600.0):
                if slots is not None:
                    slots.get(message)
                    link.send("free", slot=message["slot"])
                until = time.monotonic() + READER_S
                while time.monotonic() < until:
                    pass
    except EOFError:
        pass
    finally:
        if slots is not None:
            slots.close()


def hand_over(context: Any, rate_hz: float, shared: bool) -> dict[str, Any]:
    spec = robot(rate_hz)
    ours, theirs = context.Pipe()
    slots = ObservationSlots(spec) if shared else None
    process = context.Process(target=reader, args=(theirs, spec, slots.name if slots else None))
    process.start()
    theirs.close()
    link, obs, clock = Link(ours), observation(spec), RealClock()
    time.sleep(1.0)  # the reader has to start
    spent, skipped, t_0 = [], 0, clock.now_ns()
    for k in range(round(SECONDS * rate_hz)):
        clock.sleep_until_ns(t_0 + round(k * 1e9 / rate_hz))
        start = time.monotonic_ns()
        if slots is None:
            pictures = {name: image.tobytes() for name, image in obs.images.items()}
            link.send("observation", state=obs.state.tobytes(), **pictures)
        else:
            for message in link.receive():
                slots.free(message["slot"])
            note = slots.put(obs)
            skipped += note is None
            if note is not None:
                link.post("observation", **note)
        spent.append((time.monotonic_ns() - start) * 1e-6)
    link.close()
    process.join()
    if slots is not None:
        slots.close()
    p50, p99 = np.quantile(spent, [0.5, 0.99])
    return {
        "rate_hz": rate_hz,
        "way": "shared memory" if shared else "pipe",
        "p50_ms": float(p50),
        "p99_ms": float(p99),
        "max_ms": float(max(spent)),
        "skipped": skipped,
    }


def main() -> int:
    context = mp.get_context("spawn")
    busy = context.Process(target=spin, daemon=True)
    busy.start()
    late = [lateness(context, rate) for rate in (10.0, 50.0, 100.0, 200.0)]
    busy.kill()
    ways = [hand_over(context, rate, shared) for rate in (10.0, 100.0) for shared in (False, True)]
    for row in (*late, *ways):
        print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()})
    pipe, memory = ways[2], ways[3]
    write(
        "control",
        [
            Check("lateness at 10 Hz beside a busy process, p99, ms", late[0]["p99_ms"], 15.0, "<="),
            Check("ticks missed at 10 Hz", late[0]["overruns"], 0, "<="),
            Check(
                "hand-over of two 640x480 pictures at 100 Hz, p99, pipe / shared memory",
                pipe["p99_ms"] / memory["p99_ms"],
                1.0,
            ),
        ],
        {"lateness": late, "hand_over": ways},
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

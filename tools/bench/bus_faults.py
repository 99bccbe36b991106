"""What happens to a robot when its bus, motors or cameras fail: one row a fault, on the emulated SO-101.

    python tools/bench/bus_faults.py [name of a row ...]

Each row: LeRobot's unmodified SO-101 driver in the control process of a robot node, a policy that swings the arm, a
recording of every control step. After two seconds the fault begins, after a few more it is mended, and re-arming is
automatic. A row holds where the robot stood still (HOLD or STOP) with a message that names the cause, or went on where
retries cover the fault; where it moved again after the repair; and where the recorded dataset has every frame.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from results import Check, parser, write
from robot_drivers import make_driver
from robot_drivers.so101_emulator import Emulator
from vla_stack.data.dataset import open_dataset
from vla_stack.data.integrity import check
from vla_stack.data.recorder import EpisodeRecorder
from vla_stack.runtime.frames import Frame
from vla_stack.runtime.node import RobotNode
from vla_stack.schema import Chunks, PolicySpec, RobotSpec
from vla_stack.serving.server import PolicyServer

RATE_HZ, HORIZON = 10.0, 10
BEFORE_S, FAULT_S, AFTER_S = 2.0, 3.0, 6.0
LAST_TICKS = 10  # the robot must move in the last second again


@dataclass(frozen=True)
class Row:
    """A fault: its name here and in the emulator, its value, what it may lead to, a word of its message."""

    name: str
    fault: str
    value: Any
    ends: tuple[str, ...]
    says: str
    seconds: float = FAULT_S


ROWS = (
    Row("1 frame in 100 is lost", "loss", 0.01, ("run", "hold", "stop"), ""),
    Row("1 frame in 5 is lost", "loss", 0.2, ("hold", "stop"), "answer"),
    Row("1 status in 20 is corrupt", "corruption", 0.05, ("run", "hold"), ""),
    Row("every second status is corrupt", "corruption", 0.5, ("hold", "stop"), "so_follower"),
    Row("adapter unplugged and plugged in", "unplug", None, ("stop",), "reconnect"),
    Row("servos without power", "power", None, ("hold", "stop"), "so_follower"),
    Row("servo frozen", "freeze", 0, ("stop",), "shoulder_pan"),
    Row("servo overloaded", "overload", 1, ("stop",), "shoulder_lift", 5.0),
    Row("servo too hot", "heat", 2, ("stop",), "temperature"),
    Row("camera unplugged", "camera", "wrist", ("hold", "stop"), "camera"),
)


class Swing:
    """A policy that swings the arm about where it is at rest: a task for the bus, not for a brain."""

    def __init__(self, robot: RobotSpec) -> None:
        self.spec = PolicySpec(robot, HORIZON, model_version="swing")

    def infer(self, observations: Any, seeds: Any, continuations: Any = ()) -> Chunks:
        t = (np.array([o.step for o in observations])[:, None] + np.arange(HORIZON)) / RATE_HZ
        actions = np.zeros((*t.shape, 6), np.float32)
        actions[:] = (0.0, 0.1, -0.2, 1.4, 0.0, 0.5)
        actions[..., 0] += 0.5 * np.sin(2 * np.pi * t / 4.0)
        actions[..., 1] += 0.2 * np.sin(2 * np.pi * t / 3.0)
        return Chunks(actions)


class Rig:
    """An emulated arm and a node that drives it, for all rows: each begins where the one before has recovered."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self.arm = stack.enter_context(Emulator(folder / "arm", seed=1))
        fields = {**self.arm.device(), "cameras": self.arm.cameras, "rate_hz": RATE_HZ, "task": "swing"}
        maker = partial(make_driver, "lerobot", robot_type="so101_follower", **fields)
        self._spec = describe(maker)
        server = PolicyServer(lambda: Swing(self._spec), "tcp://127.0.0.1:*")
        thread = threading.Thread(target=server.run)
        thread.start()
        stack.callback(thread.join)
        stack.callback(server.stop)
        self._states: list[tuple[int, str, str]] = []
        self._node = stack.enter_context(
            RobotNode(server.endpoint, maker, rearm=lambda: True, on_state=lambda *state: self._states.append(state))
        )

    def run(self, row: Row) -> dict[str, Any]:
        """Do it; what was seen."""
        self._states.clear()
        self.arm.reset(0)
        frames: list[Frame] = []
        harm = threading.Thread(target=do_harm, args=(self.arm, row))
        harm.start()
        ticks = round((BEFORE_S + row.seconds + AFTER_S) * RATE_HZ)
        episode = self._node.run_episode(0, ticks, on_frame=frames.append)
        harm.join()
        recorded, problems = save(self._folder / row.fault / str(row.value), self._spec, frames)
        began = round(BEFORE_S * RATE_HZ) - 1
        during = [state for state in self._states if state[0] >= began]
        after_fault = {s for _, s, _ in during} & {"hold", "stop"}
        return {
            "name": row.name,
            "reaction": "stop" if "stop" in after_fault else "hold" if after_fault else "run",
            "reaction_ticks": next((k - began for k, s, _ in during if s != "run"), None),
            "messages": sorted({why for _, s, why in during if s in after_fault and why}),
            "moves_again": bool((episode.rids[-LAST_TICKS:] >= 0).mean() > 0.5),
            "frames": len(frames),
            "recorded": recorded,
            "problems": problems,
            "states": list(self._states),
            "ticks": episode.summary["ticks"],
        }


def do_harm(arm: Emulator, row: Row) -> None:
    time.sleep(BEFORE_S)
    arm.inject(row.fault, row.value)
    time.sleep(row.seconds)
    arm.mend()


def describe(maker: Any) -> RobotSpec:
    """The robot's description, by connecting to it once."""
    driver = maker()
    driver.connect()
    try:
        return driver.spec
    finally:
        driver.disconnect()


def save(root: Path, spec: RobotSpec, frames: list[Frame]) -> tuple[int, list[str]]:
    """Record the frames; how many the dataset has, and what is wrong with it."""
    with EpisodeRecorder(root, spec) as recorder:
        for frame in frames:
            recorder.add_frame(frame.obs, frame.action)
        recorder.save_episode(success=True)
    return int(open_dataset(root).num_frames), check(root)


def verdict(row: Row, seen: dict[str, Any]) -> str:
    """What falls short; empty where nothing does."""
    wrong = []
    if seen["reaction"] not in row.ends:
        wrong.append(f"it ended in {seen['reaction']}")
    if seen["reaction"] != "run" and not any(row.says in text for text in seen["messages"]):
        wrong.append(f"its message does not name '{row.says}': {seen['messages']}")
    if not seen["moves_again"]:
        wrong.append("it does not move again after the repair")
    if seen["recorded"] != seen["frames"] or seen["problems"]:
        wrong.append(f"{seen['recorded']} of {seen['frames']} frames recorded, {seen['problems']}")
    return "; ".join(wrong)


def main() -> int:
    p = parser(__doc__)
    p.add_argument(
        "rows", nargs="*", metavar="row", help="names of rows (default: all, and the result file is written)"
    )
    chosen = p.parse_args().rows
    if unknown := set(chosen) - {row.name for row in ROWS}:
        p.error(f"no row {', '.join(sorted(unknown))}; there are: {', '.join(row.name for row in ROWS)}")
    checks, data = [], []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        rig = Rig(Path(folder), stack)
        for row in ROWS:
            if chosen and row.name not in chosen:
                continue
            seen = rig.run(row)
            wrong = verdict(row, seen)
            print(row.name, "|", seen["reaction"], "|", *seen["messages"], "|", wrong or "holds", flush=True)
            checks.append(Check(row.name, float(not wrong), 1.0, why=wrong))
            data.append(seen)
    if not chosen:
        write("bus_faults", checks, data, seeds=[1])
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The robots, the policies and the harm of ``guardian.py``: what runs in the processes that are harmed."""

from __future__ import annotations

import argparse
import ctypes
import json
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np

from robot_drivers.lerobot_robot import LeRobotRobot
from vla_stack.schema import Chunks, Observation, PolicySpec, RobotSpec
from vla_stack.serving.server import PolicyServer

RATE_HZ, HORIZON, EXECUTE = 30.0, 9, 3
SPEED = 0.3  # m/s of the base
GIL_S = 5
FOREVER_S = 3600.0


def harm(folder: Path, who: str) -> None:
    """What a file ``folder/who`` asks for, once: ``gil``, ``hang`` or ``exception``; ``folder/taken`` says when."""
    order = folder / who
    if not order.exists():
        return
    how = order.read_text()
    order.unlink()
    (folder / "taking").write_text(str(time.monotonic_ns()))
    (folder / "taking").rename(folder / "taken")
    if how == "gil":
        ctypes.PyDLL(None).sleep(GIL_S)  # a call into C that keeps the interpreter's lock
    elif how == "hang":
        time.sleep(FOREVER_S)
    else:
        raise RuntimeError("on purpose")


class HarmedRobot(LeRobotRobot):
    """A LeRobot robot whose control process can be harmed from within, as it reads."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(**options)
        self._folder = folder

    def read(self) -> Observation:
        harm(self._folder, "control process")
        return super().read()


class Moving:
    """A policy that keeps a robot moving: an arm swings, a base drives ahead while its arm stays where it is."""

    def __init__(self, robot: RobotSpec, folder: Path) -> None:
        self.spec = PolicySpec(robot, HORIZON, model_version="moving")
        self._folder, self._broken = folder, False
        self._base = np.flatnonzero([d.name == "x.vel" for d in robot.action])

    def infer(self, observations: Any, seeds: Any, continuations: Any = ()) -> Chunks:
        try:
            if self._broken:
                raise RuntimeError("still")
            harm(self._folder, "server")
        except RuntimeError:
            self._broken = True  # an answer that fails once is asked for again
            raise
        dims = len(self.spec.robot.action)
        actions = np.repeat(np.stack([o.state[:dims] for o in observations])[:, None], HORIZON, axis=1)
        if len(self._base):
            actions[..., self._base] = SPEED
            return Chunks(actions.astype(np.float32))
        t = (np.array([o.step for o in observations])[:, None] + np.arange(HORIZON)) / RATE_HZ
        actions[..., :6] = (0.0, 0.1, -0.2, 1.4, 0.0, 0.5)
        actions[..., 0] += 0.6 * np.sin(2 * np.pi * t / 3.0)
        return Chunks(actions.astype(np.float32))


def serve(folder: Path, robot: dict[str, Any], endpoint: str) -> None:
    """Main of the server's process; prints its endpoint."""
    spec = RobotSpec.from_json(robot)
    server = PolicyServer(lambda: Moving(spec, folder), endpoint, on_ready=lambda _: print(server.endpoint, flush=True))
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    server.run()


if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("folder", type=Path, help="of the files that ask for harm")
    p.add_argument("robot", type=Path, help="description of the robot, JSON")
    p.add_argument("endpoint")
    args = p.parse_args()
    serve(args.folder, json.loads(args.robot.read_text()), args.endpoint)

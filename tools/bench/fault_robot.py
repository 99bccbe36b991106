"""A robot whose every command says where it comes from, the policy that writes that into it, and their judge.

Action (5): ``sway.pos`` (m) has limits that the policy ignores; the others are labels: the control step that the action
was made for, the step of its observation, the episode and the number of the model. The robot writes down each command
that reaches it, and nothing else is believed.

    python tools/bench/fault_robot.py DIRECTORY vla-serve-arguments...     # serves the policy of DIRECTORY/config.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vla_stack.runtime.driver import Capabilities
from vla_stack.schema import Camera, Chunks, Dim, Observation, PolicySpec, RobotSpec

RATE, HORIZON = 20.0, 20
LOW, HIGH, MAX_RATE = -0.5, 0.5, 2.0
LABELS = ("tick.pos", "seen.pos", "episode.pos", "model.pos")
DIMS = (Dim("sway.pos", "m", LOW, HIGH, MAX_RATE), *(Dim(name, "1") for name in LABELS))
SPEC = RobotSpec("bench/labels", DIMS, DIMS, (Camera("front", 48, 64),), RATE)
EPISODE, WRITE, STOP = 0.0, 1.0, 2.0  # kinds of journal rows
MAX_AGE = HORIZON  # control steps from an observation to the last action that may rest on it


class Numbers:
    """Labels its actions. ``config.json`` in its directory says how; files named ``nan`` and ``stall`` break it."""

    def __init__(self, directory: Path) -> None:
        self._directory, config = directory, json.loads((directory / "config.json").read_text())
        self._model, self._latency_s, self._served = config["model"], config["latency_s"], 0
        self.spec = PolicySpec(SPEC, HORIZON, config["normalisation"], f"model {self._model}")

    def infer(self, observations: Sequence[Observation], seeds: Sequence[int]) -> Chunks:
        time.sleep(self._latency_s)
        while (self._directory / "stall").exists():
            time.sleep(0.02)
        steps = np.array([o.step for o in observations])[:, None] + np.arange(HORIZON)
        seen = np.repeat([[o.step] for o in observations], HORIZON, 1)
        episode = np.repeat([[o.state[3]] for o in observations], HORIZON, 1)
        sway = 0.9 * np.sin(2 * np.pi * steps / 40)
        if (self._directory / "nan").exists():
            sway[:] = np.nan
        actions = np.stack([sway, steps, seen, episode, np.full(steps.shape, self._model)], -1)
        return Chunks(actions.astype(np.float32))


class LabelRobot:
    """Goes at once where it is sent. Its journal, float64 rows, is ``directory/journal``; files named ``freeze`` and
    ``wall`` stop its camera and its notion of the time of day."""

    spec = SPEC
    stages = ()
    capabilities = Capabilities()

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._journal = (directory / "journal").open("ab", buffering=0)
        self._episode, self._at = 0, np.zeros(len(DIMS), np.float32)
        self._last: Observation | None = None
        if (directory / "wall").exists():
            jump_wall_clock()

    def connect(self) -> None: ...

    def disconnect(self) -> None: ...

    def reset(self, seed: int) -> str:
        self._episode += 1
        self._at = np.array([0, -1, -1, self._episode, 0], np.float32)
        self._note(EPISODE, self._at)
        return "count"

    def status(self) -> dict[str, Any]:
        return {"is_success": False, "done": False}

    def read(self) -> Observation:
        if self._last is None or not (self._directory / "freeze").exists():
            state = self._at.copy()
            state[3] = self._episode
            pictures = {"front": np.zeros((48, 64, 3), np.uint8)}
            self._last = Observation(state, pictures, "count", 0, time.monotonic_ns())
        return self._last

    def write(self, action: NDArray[np.float32]) -> NDArray[np.float32]:
        self._note(WRITE, action)
        self._at = action.copy()
        return action

    def hold(self) -> None: ...

    def stop(self) -> None:
        self._note(STOP, self._at)

    def _note(self, kind: float, action: NDArray[np.float32]) -> None:
        self._journal.write(np.array([time.monotonic(), kind, self._episode, *action], np.float64).tobytes())


@dataclass
class Verdict:
    """What a journal shows: commands, how many of them were outside a limit, how many rest on what is over."""

    commands: int
    outside: int
    stale: int
    models: dict[int, list[int]]  # by episode, in order


def judge(directory: Path) -> Verdict:
    """Read a robot's journal.

    Outside: not finite, beyond a position limit, or further from the command before it than the rate allows. Stale:
    made for another episode, for an earlier step than the command before it, or from an observation that is too old.
    """
    rows = np.fromfile(directory / "journal").reshape(-1, 3 + len(DIMS))
    outside = stale = commands = 0
    models: dict[int, list[int]] = {}
    for before, row in itertools.pairwise(rows):
        _, kind, episode, sway, tick, seen, label, model = row
        if kind != WRITE:
            continue
        commands += 1
        inside = LOW <= sway <= HIGH and abs(sway - before[3]) <= MAX_RATE / RATE * (1 + 1e-6)
        outside += not (np.isfinite(row).all() and inside)
        stale += label != episode or tick < before[4] or tick - seen > MAX_AGE
        if tick >= 0 and [int(model)] != models.setdefault(int(episode), [])[-1:]:
            models[int(episode)].append(int(model))
    return Verdict(commands, int(outside), int(stale), models)


def jump_wall_clock() -> None:
    """From now on, the time of day of this process is an hour early and an hour late by turns."""
    true, turn = time.time, itertools.cycle((-3600.0, 3600.0))
    time.time = lambda: true() + next(turn)


def main(directory: Path, arguments: list[str]) -> int:
    from vla_stack import cli
    from vla_stack.serving import wire
    from vla_stack.verbs import serve

    config = json.loads((directory / "config.json").read_text())
    wire.VERSION = config.get("wire", wire.VERSION)
    if (directory / "wall").exists():
        jump_wall_clock()
    serve.load_directory = lambda path, *_: Numbers(path)  # type: ignore[assignment, misc, return-value]
    return cli.main(["serve", "--policy", str(directory), *arguments])


if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("directory", type=Path, help="of config.json")
    known, rest = p.parse_known_args()
    sys.exit(main(known.directory, rest))

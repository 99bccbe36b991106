"""Recording while a robot runs: control steps missed for its sake, and what a kill -9 of the run takes.

    python tools/bench/run_recording.py [kills]

A robot at 20 Hz without hardware, its policy served by another process. First, episodes in turns without a recorder
and with one that takes two control steps for each frame. Then runs that record every episode and are killed at random
moments; each noted an episode in a journal of its own once the recording of it had returned.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from fault_robot import RATE, LabelRobot, Numbers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from results import Check, parser, write
from vla_stack.data.layout import INFO, read_info
from vla_stack.runtime.frames import Frame
from vla_stack.runtime.node import RobotNode
from vla_stack.statistics import mean_interval

# What writes pictures and tables is imported where it is used: the control process imports this module again.

TURNS, TICKS, SLOW_S = 10, 60, 2 / RATE
KILLED_TICKS, KILLS_PER_DATASET, PATIENCE_S = 10, 10, 120.0
CONTEXT = multiprocessing.get_context("forkserver")  # imports are shared, so that a start costs little
SHARED = ["vla_stack.console.run_recording", "vla_stack.runtime.node", "vla_stack.serving.server", "pandas"]


def serve(endpoint: str, folder: Path) -> None:
    """The policy's process."""
    from vla_stack.serving.server import PolicyServer

    PolicyServer(lambda: Numbers(folder), endpoint).run()


def missed(endpoint: str, folder: Path) -> tuple[list[int], list[int], Any]:
    """Control steps missed in each episode without and with a slow recorder, and frames recorded and lost."""
    from vla_stack.console.run_recording import RunRecording

    plain, slow = [], []
    with (
        RobotNode(endpoint, partial(LabelRobot, folder), rearm=lambda: True) as node,
        RunRecording(folder / "slow", node.robot, node.joints) as recording,
    ):

        def late(frame: Frame) -> None:
            time.sleep(SLOW_S)
            recording.frame(frame)

        for turn in range(TURNS):
            plain.append(node.run_episode(turn, TICKS).summary["ticks"]["overrun"])
            recording.begin(turn)
            slow.append(node.run_episode(turn, TICKS, on_frame=late).summary["ticks"]["overrun"])
            recording.end(success=False)
            print(f"missed {plain[-1]} without, {slow[-1]} with the recorder", flush=True)
        return plain, slow, dict(recording.counts)


def run_for_ever(endpoint: str, folder: Path, root: Path, journal: Path) -> None:
    """The run that is killed."""
    from vla_stack.console.run_recording import RunRecording

    with (
        RobotNode(endpoint, partial(LabelRobot, folder), rearm=lambda: True) as node,
        RunRecording(root, node.robot, node.joints) as recording,
        journal.open("a") as notes,
    ):
        for seed in itertools.count():
            recording.begin(seed)
            node.run_episode(seed, KILLED_TICKS, on_frame=recording.frame)
            if recording.end(success=False):
                notes.write(f"{seed}\n")
                notes.flush()
                os.fsync(notes.fileno())


def killed(kills: int, endpoint: str, folder: Path) -> tuple[int, int, int]:
    """Kill runs; episodes of the journals, those that are in no dataset, and datasets that have more than one extra."""
    rng = np.random.default_rng(0)
    promised = lost = odd = 0
    for number in range(-(-kills // KILLS_PER_DATASET)):
        root, journal = folder / f"data-{number}", folder / f"journal-{number}"
        here = min(KILLS_PER_DATASET, kills - number * KILLS_PER_DATASET)
        for kill in range(here):
            before = _lines(journal)
            child = CONTEXT.Process(target=run_for_ever, args=(endpoint, folder, root, journal))
            child.start()
            deadline = time.monotonic() + PATIENCE_S
            while _lines(journal) == before:
                if not child.is_alive() or time.monotonic() > deadline:
                    raise RuntimeError("a run recorded nothing")
                time.sleep(0.01)
            time.sleep(rng.uniform(0.0, 2 * KILLED_TICKS / RATE))
            assert child.pid is not None
            os.kill(child.pid, signal.SIGKILL)
            child.join()
            counted = read_info(root)["total_episodes"] if (root / INFO).exists() else 0
            print(f"dataset {number}, kill {kill}: {_lines(journal)} in the journal, {counted} in it", flush=True)
        promised += _lines(journal)
        lost += max(0, _lines(journal) - counted)
        odd += counted > _lines(journal) + here
    return promised, lost, odd


def _lines(file: Path) -> int:
    return len(file.read_text().split()) if file.exists() else 0


def main() -> int:
    p = parser(__doc__)
    p.add_argument("kills", type=int, nargs="?", default=50, help="default: %(default)d")
    kills = p.parse_args().kills
    CONTEXT.set_forkserver_preload(SHARED)
    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp)
        (folder / "config.json").write_text(json.dumps({"model": 1, "latency_s": 0.05, "normalisation": "one"}))
        endpoint = f"ipc://{folder}/policy"
        server = CONTEXT.Process(target=serve, args=(endpoint, folder), daemon=True)
        server.start()
        try:
            plain, slow, counts = missed(endpoint, folder)
            promised, lost, odd = killed(kills, endpoint, folder)
        finally:
            server.terminate()
    more = mean_interval(np.subtract(slow, plain), "pairs of episodes")
    why = "the machine was busy with other work: steps were missed without a recorder as well"
    checks = [
        Check("steps missed without a recorder", sum(plain)),
        Check("steps missed with a slow recorder", sum(slow), 0, "<=", why=why),
        Check("more missed an episode with the recorder than without, lower end", more.low, 0, "<=", interval=more),
        Check("frames that the slow recorder lost", counts.get("lost_frames", 0)),
        Check("runs killed", kills, 50),
        Check("episodes recorded by runs that were killed", promised),
        Check("of these lost", lost, 0, "<="),
        Check("datasets with more episodes than runs began", odd, 0, "<="),
    ]
    write("run_recording", checks, {"without": plain, "with": slow, "recorded": counts}, seeds=[0])
    return 0


if __name__ == "__main__":
    sys.exit(main())

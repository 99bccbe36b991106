"""Kill -9 a recording at random moments, half of them while it commits an episode; nothing committed may be lost.

    python tools/bench/crash_recording.py [kills]

A child records made-up episodes as fast as it can and notes each one in a journal of its own after ``save_episode``
has returned. After every kill LeRobot's own loader must open the dataset, ``vla data repair`` being allowed if it does
not, every episode of the journal must be there, and the next child must be able to record on.
``tools/bench/crash.py`` calls :func:`recording` and writes the results of recording and training together.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from results import Check, parser, write
from vla_stack.data.dataset import open_dataset
from vla_stack.data.integrity import repair
from vla_stack.data.layout import INFO, STAGING, read_info
from vla_stack.data.loader import ChunkLoader
from vla_stack.data.recorder import EpisodeRecorder
from vla_stack.schema import Camera, Dim, Observation, RobotSpec

SIDE, MAX_LENGTH, KILLS_PER_DATASET = 64, 30, 10
DIMS = tuple(Dim(f"joint_{i}.pos", "rad") for i in range(7))
SPEC = RobotSpec("bench/arm", DIMS, DIMS, (Camera("front", SIDE, SIDE), Camera("wrist", SIDE, SIDE)), 10.0)
CONTEXT = multiprocessing.get_context("forkserver")  # imports are shared, so that a start costs milliseconds


@dataclass(frozen=True)
class Kill:
    """One kill -9 and what it left.

    Attributes:
        dataset: Number of the dataset.
        image_mode: How it stores pictures.
        aim: ``any`` moment, or ``commit``: a random moment of a ``save_episode``.
        committing: Whether it did hit a ``save_episode``.
        journal: Episodes whose ``save_episode`` had returned.
        episodes: Episodes that the dataset counts.
        leftovers: Whether an unfinished episode's files were left.
        opened: Whether LeRobot's loader opened it as it was; None if there was nothing to open yet.
    """

    dataset: int
    image_mode: str
    aim: str
    committing: bool
    journal: int
    episodes: int
    leftovers: bool
    opened: bool | None


def steps(episode: int) -> Iterator[tuple[Observation, np.ndarray]]:
    """The frames of an episode, a function of its number."""
    rng = np.random.default_rng(episode)
    y, x = np.mgrid[:SIDE, :SIDE]
    for k in range(int(rng.integers(1, MAX_LENGTH))):
        image = np.stack([3 * x + k, 3 * y + episode, x + y], -1).astype(np.uint8)
        state, action = rng.normal(size=(2, 7)).astype(np.float32)
        yield Observation(state, {"front": image, "wrist": image[::-1]}, "make it up", k, 10**8 * k), action


def record_for_ever(root: Path, journal: Path, image_mode: Any, phase: Synchronized, commits: Synchronized) -> None:
    """The child. ``phase`` is 0 while it starts, 1 while it adds frames, 2 while it commits."""
    with EpisodeRecorder(root, SPEC, image_mode) as recorder, journal.open("a") as notes:
        while True:
            phase.value = 1
            episode = recorder.num_episodes
            for obs, action in steps(episode):
                recorder.add_frame(obs, action)
            phase.value = 2
            recorder.save_episode(success=True)
            phase.value = 1
            notes.write(f"{episode}\n")
            notes.flush()
            os.fsync(notes.fileno())
            commits.value += 1


def attack(root: Path, journal: Path, image_mode: str, aim: str, rng: np.random.Generator) -> bool:
    """Start a child, kill it at a random moment of one of its first episodes; whether that hit a commit.

    Moments are drawn from the durations that the child shows, so that they are as random on a slow machine.
    """
    phase, commits = CONTEXT.Value("i", 0), CONTEXT.Value("i", 0)
    args = (root, journal, image_mode, phase, commits)
    child = CONTEXT.Process(target=record_for_ever, args=args, daemon=True)
    child.start()

    def wait(reached: Callable[[], bool]) -> float:
        begin = time.monotonic()
        while child.is_alive() and not reached():
            time.sleep(0.0002)
        return time.monotonic() - begin

    wait(lambda: phase.value > 0)  # starting up is not recording
    episode_s = wait(lambda: commits.value > 0)
    target = int(rng.integers(1, 6))
    wait(lambda: commits.value >= target)
    if aim == "commit":
        wait(lambda: phase.value == 2)
        episode_s /= 2  # of the order of a commit
    end = time.monotonic() + rng.uniform(0.0, episode_s)
    wait(lambda: time.monotonic() >= end)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    committing = phase.value == 2
    child.join()
    if child.exitcode != -signal.SIGKILL:
        raise RuntimeError(f"the recording ended by itself with exit code {child.exitcode}")
    return committing


def lerobot_opens(root: Path, episodes: int) -> bool:
    """Whether LeRobot's loader opens a dataset, counts its episodes and decodes its last frame."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    try:
        dataset = LeRobotDataset("local/crash", root=root, video_backend="pyav")
        return dataset.num_episodes == episodes and len(dataset[len(dataset) - 1]["action"]) == 7
    except Exception as e:  # whatever it is, the dataset does not open
        print(f"LeRobot does not open {root}: {e!r}", flush=True)
        return False


def wrong_episodes(root: Path) -> int:
    """Episodes of a dataset that are not bit for bit what was recorded (pictures: within the codec's error)."""
    data = open_dataset(root)
    loader = ChunkLoader(data, 1, 1, progress=False)
    tolerance = 0 if data.features["observation.images.front"]["dtype"] == "image" else 16
    wrong = 0
    for episode, (start, end) in enumerate(zip(data.episode_from, data.episode_to, strict=True)):
        batch = loader.gather(np.arange(start, end))
        frames = list(steps(episode))
        same = len(frames) == end - start
        for i, (obs, action) in enumerate(frames if same else ()):
            pictures = batch["observation.images.wrist"][i].astype(int) - obs.images["wrist"]
            same &= bool((batch["action"][i, 0] == action).all() and (batch["observation.state"][i] == obs.state).all())
            same &= bool(np.abs(pictures).mean() <= tolerance)
        wrong += not same
    return wrong


def recording(kills: int = 60, seed: int = 0) -> tuple[list[Check], dict[str, Any]]:
    """Kill recordings.

    Returns:
        Checks and data for a result file.
    """
    rng = np.random.default_rng(seed)
    CONTEXT.set_forkserver_preload(["crash_recording", "pandas"])
    hits: list[Kill] = []
    lost = unopened = wrong = recorded = 0
    with tempfile.TemporaryDirectory() as tmp:
        for number in range(-(-kills // KILLS_PER_DATASET)):
            mode = ("video", "image")[number % 2]
            root, journal = Path(tmp) / f"data-{number}", Path(tmp) / f"journal-{number}"
            for i in range(min(KILLS_PER_DATASET, kills - len(hits))):
                aim = ("any", "commit")[i % 2]
                committing = attack(root, journal, mode, aim, rng)
                promised = [int(line) for line in journal.read_text().split()] if journal.exists() else []
                counted = read_info(root)["total_episodes"] if (root / INFO).exists() else 0
                opened = lerobot_opens(root, counted) if counted else None
                if opened is False:
                    repair(root)
                    unopened += not lerobot_opens(root, read_info(root)["total_episodes"])
                lost += len(set(promised) - set(range(counted)))
                leftovers = any(p.name != "lock" for p in (root / STAGING).glob("*"))
                hits.append(Kill(number, mode, aim, committing, len(promised), counted, leftovers, opened))
            recorded += counted
            wrong += wrong_episodes(root) if counted else 0
            print(f"{len(hits)} kills, {recorded} episodes recorded, {lost} lost, {wrong} wrong", flush=True)
    checks = [
        Check("recording: kills", len(hits), 50),
        Check("recording: kills that hit a commit", sum(k.committing for k in hits), 15),
        Check("recording: committed episodes lost", lost, 0, "<="),
        Check("recording: episodes that differ from what was recorded", wrong, 0, "<="),
        Check("recording: datasets that LeRobot cannot open after repair", unopened, 0, "<="),
        Check("recording: datasets that needed repair to open", sum(k.opened is False for k in hits), 0, "<="),
    ]
    return checks, {"episodes_recorded": recorded, "kills": [asdict(k) for k in hits]}


if __name__ == "__main__":
    p = parser(__doc__)
    p.add_argument("kills", type=int, nargs="?", default=60, help="default: %(default)d")
    checks, data = recording(p.parse_args().kills)
    write("crash_recording", checks, data, seeds=[0])

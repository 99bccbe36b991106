"""Flip bits, swap, cut and destroy files of a recorded dataset: `vla data check --deep` has to name each one.

    python tools/bench/corruption.py [damages]

Also: what digests cost a recording, episode against episode in turn.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from results import Check, parser, write
from vla_stack.data import digests
from vla_stack.data.integrity import check
from vla_stack.data.recorder import EpisodeRecorder
from vla_stack.errors import UserError
from vla_stack.schema import Camera, Dim, Observation, RobotSpec
from vla_stack.statistics import median_interval

RATE, EPISODES, FRAMES = 10.0, 6, 12
JOINTS = tuple(Dim(f"joint_{i}.pos", "rad", -3.0, 3.0) for i in range(4))


def robot(side: int) -> RobotSpec:
    cameras = (Camera("front", side, side), Camera("wrist", side, side))
    return RobotSpec("bench/arm", JOINTS, JOINTS, cameras, RATE)


def record(recorder: EpisodeRecorder, seed: int, frames: int, pictures: list[np.ndarray]) -> None:
    """One episode of smooth motion."""
    rng = np.random.default_rng(seed)
    phase = rng.uniform(0, 6, len(JOINTS))
    for k in range(frames):
        state = np.sin(phase + 0.1 * k).astype(np.float32)
        images = {c.name: pictures[(seed + k + i) % len(pictures)] for i, c in enumerate(recorder.spec.cameras)}
        recorder.add_frame(Observation(state, images, "reach", k, k * 100_000_000), state)
    recorder.save_episode(True)


def make_pictures(side: int, seed: int = 0) -> list[np.ndarray]:
    rng, (y, x) = np.random.default_rng(seed), np.mgrid[:side, :side] / side
    waves = [rng.uniform(1, 9, (3, 2)) for _ in range(16)]
    return [np.stack([127 + 100 * np.sin(a * x + b * y) for a, b in wave], -1).astype(np.uint8) for wave in waves]


def damage(root: Path, rng: random.Random) -> tuple[str, list[Path]]:
    """Harm a dataset once; gives the kind and the files that differ now."""
    files = [p for p in sorted(root.rglob("*")) if p.is_file() and p.stat().st_size]
    kind = rng.choice(["flip", "flip", "swap", "cut", "destroy"])
    file = rng.choice(files)
    whole = file.read_bytes()
    if kind == "swap":
        others = [p for p in files if p.suffix == file.suffix and p.read_bytes() != whole]
        if others:
            other = rng.choice(others)
            file.write_bytes(other.read_bytes())
            other.write_bytes(whole)
            return kind, [file, other]
        kind = "flip"  # the only one of its sort
    if kind == "flip":
        changed = bytearray(whole)
        bit = rng.randrange(8 * len(whole))
        changed[bit // 8] ^= 1 << bit % 8
    elif kind == "cut":
        changed = bytearray(whole[: rng.randrange(len(whole))])
    else:
        at = rng.randrange(len(whole))
        changed = bytearray(whole)
        changed[at : at + 200] = bytes(rng.randrange(256) for _ in changed[at : at + 200])
        if changed == whole:
            changed[at] ^= 1
    file.write_bytes(changed)
    return kind, [file]


def found(root: Path) -> list[str]:
    try:
        return check(root, deep=True)
    except UserError as e:  # meta/info.json itself: there is nothing to check by
        return [str(e)]


def attack(source: Path, work: Path, count: int) -> dict[str, Counter[str]]:
    """Damages by kind: how many, and how many of them all of whose files were named."""
    rng = random.Random(0)
    done, named = Counter[str](), Counter[str]()
    for _ in range(count):
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(source, work)
        kind, files = damage(work, rng)
        said = found(work)
        done[kind] += 1
        named[kind] += all(any(f.relative_to(work).as_posix() in line for line in said) for f in files)
    return {"done": done, "named": named}


def costs(folder: Path, pairs: int) -> list[float]:
    """Seconds of recording with digests over seconds without, for pairs of episodes recorded in turn."""
    pictures, side, ratios = make_pictures(240), 240, []
    nothing: Callable[..., None] = lambda *_: None  # noqa: E731
    with (
        EpisodeRecorder(folder / "with", robot(side)) as ours,
        EpisodeRecorder(folder / "without", robot(side)) as bare,
    ):
        for seed in range(pairs + 1):
            seconds = []
            for recorder in (ours, bare) if seed % 2 else (bare, ours):
                with patch.object(digests, "record", digests.record if recorder is ours else nothing):
                    begin = time.perf_counter()
                    record(recorder, seed, 100, pictures)
                    seconds.append((time.perf_counter() - begin, recorder is ours))
            if seed:  # the first pair opens files and loads encoders
                ratios.append(max(seconds, key=lambda s: s[1])[0] / min(seconds, key=lambda s: s[1])[0])
    return ratios


def main(damages: int, pairs: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with EpisodeRecorder(folder / "sealed", robot(48)) as recorder:
            for seed in range(EPISODES):
                record(recorder, seed, FRAMES, make_pictures(48))
        assert found(folder / "sealed") == []
        ratios = costs(folder, pairs)
        result = attack(folder / "sealed", folder / "work", damages)
    done, named = result["done"], result["named"]
    cost = median_interval(ratios, "pairs of recordings")
    checks = [
        Check("damages named by `check --deep`, of all", named.total() / done.total(), 1.0),
        *(Check(f"... {kind}", named[kind] / done[kind]) for kind in sorted(done)),
        Check(
            "recording with digests, time over without (median)",
            cost.value,
            1.03,
            "<=",
            cost,
            why="measured beside other work on two cores: the interval is wider than the bound and holds 1",
        ),
    ]
    data: dict[str, Any] = {"damages": dict(done), "named": dict(named), "pairs": len(ratios)}
    write("corruption", checks, data, seeds=[0])


if __name__ == "__main__":
    p = parser(__doc__)
    p.add_argument("damages", type=int, nargs="?", default=1000, help="(default: %(default)s)")
    p.add_argument("--pairs", type=int, default=40, help="of recorded episodes (default: %(default)s)")
    args = p.parse_args()
    main(args.damages, args.pairs)

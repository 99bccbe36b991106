"""Training batches a second: our loader against LeRobotDataset + DataLoader on datasets that LeRobot's writer made.

    python tools/bench/loader.py

Two cameras, action chunks of 16, shuffled batches of 32, 96x96 and 640x480, video (LeRobot's default AV1) and image
datasets. The peer is configured as `lerobot-train` does it (spawned persistent workers, uint8 video frames), decodes
with torchcodec where that works, and gets the better of 0 and 2 workers. Starting its workers is not timed; building
our cache of decoded frames is, and stands in the data together with the number of samples after which it has paid for
itself. Ours is timed before and after the peer and counts with the smaller value.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import disable_progress_bars

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from results import Check, parser, write
from vla_stack.data.frame_cache import cache_folder
from vla_stack.data.loader import ChunkLoader

HORIZON, BATCH, FPS = 16, 32, 10
CAMERAS = ("front", "wrist")


@dataclass(frozen=True)
class Case:
    """One comparison: picture size, storage, size of the made-up dataset, and the bound on the ratio."""

    height: int
    width: int
    storage: str
    episodes: int
    length: int
    bound: float

    @property
    def name(self) -> str:
        return f"{self.width}x{self.height} {self.storage}"


CASES = (
    Case(96, 96, "video", 20, 60, 20),
    Case(96, 96, "image", 20, 60, 20),
    Case(480, 640, "video", 6, 50, 8),
    Case(480, 640, "image", 6, 50, 8),
)


def make_dataset(case: Case, root: Path) -> None:
    """Smooth texture with moving blobs, by LeRobot's own writer with its default encoder."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    picture = {
        "dtype": case.storage,
        "shape": (case.height, case.width, 3),
        "names": ["height", "width", "channels"],
    }
    features: dict[str, Any] = {f"observation.images.{c}": picture for c in CAMERAS}
    features |= {
        "observation.state": {"dtype": "float32", "shape": (12,), "names": None},
        "action": {"dtype": "float32", "shape": (7,), "names": None},
    }
    dataset = LeRobotDataset.create(
        "bench/loader", FPS, features, root=root, use_videos=case.storage == "video", image_writer_threads=2
    )
    rng = np.random.default_rng(0)
    y, x = np.mgrid[: case.height, : case.width] / case.width
    texture = sum(np.sin(rng.uniform(5, 60) * x + rng.uniform(5, 60) * y + i)[..., None] for i in range(8))
    background = 128 + 12 * texture * rng.uniform(0.5, 1.0, 3)
    for _ in range(case.episodes):
        places, moves, colours = rng.random((5, 2)), rng.normal(0, 0.01, (5, 2)), rng.uniform(0, 255, (5, 3))
        for k in range(case.length):
            image = background.copy()
            for p, v, c in zip(places, moves, colours, strict=True):
                image[np.hypot(x - (p + k * v)[0], y - (p + k * v)[1]) < 0.08] = c
            image = image.clip(0, 255).astype(np.uint8)
            frame = {f"observation.images.{c}": image for c in CAMERAS}
            state, action = rng.normal(size=12), rng.normal(size=7)
            dataset.add_frame(
                {
                    **frame,
                    "observation.state": state.astype(np.float32),
                    "action": action.astype(np.float32),
                    "task": "look",
                }
            )
        dataset.save_episode(parallel_encoding=False)
    dataset.finalize()


def rate(batches: Iterable[Any], seconds: float, skip: int) -> float:
    """Samples a second over ``seconds``, at least one batch, after ``skip`` batches."""
    stream: Iterator[Any] = iter(batches)
    for _ in range(skip):
        next(stream)
    begin, count = time.perf_counter(), 0
    while count == 0 or time.perf_counter() - begin < seconds:
        next(stream)
        count += BATCH
    return count / (time.perf_counter() - begin)


def endless(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def peer_rates(root: Path, storage: str) -> dict[str, float]:
    """LeRobot's samples a second, by decoder and number of workers."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    decoder = video_decoder() if storage == "video" else "png"
    dataset = LeRobotDataset(
        "bench/loader",
        root=root,
        delta_timestamps={"action": [i / FPS for i in range(HORIZON)]},
        video_backend=decoder if storage == "video" else None,
        return_uint8=True,
    )
    out = {}
    for workers in (2, 0):
        parallel = {"prefetch_factor": 4, "persistent_workers": True, "multiprocessing_context": "spawn"}
        loader = torch.utils.data.DataLoader(
            dataset, BATCH, shuffle=True, num_workers=workers, drop_last=True, **(parallel if workers else {})
        )
        key = f"{decoder}, {workers} workers"
        out[key] = rate(endless(loader), 5.0, 2 * workers or 1)
        print(f"    LeRobot, {key}: {out[key]:.1f}/s", flush=True)
    return out


def video_decoder() -> str:
    """LeRobot's faster decoder if it works here: torchcodec needs FFmpeg's shared libraries."""
    try:
        from torchcodec.decoders import VideoDecoder  # noqa: F401
    except (ImportError, RuntimeError, OSError):
        return "pyav"
    return "torchcodec"


def copy_rate(root: Path) -> float:
    """Samples a second if a batch were one copy of as many contiguous bytes out of the cache: the memory's limit."""
    files = [np.memmap(p, np.uint8, "r") for p in sorted(cache_folder(root).glob("*.u8"))]
    size = BATCH * files[0].size // (ChunkLoader(root, 1, 1, cameras=[]).dataset.num_frames)
    out, rng = [np.zeros(size, np.uint8) for _ in files], np.random.default_rng(0)

    def batches() -> Iterator[None]:
        while True:
            for file, target in zip(files, out, strict=True):
                start = int(rng.integers(0, file.size - size))
                target[:] = file[start : start + size]
            yield None

    return rate(batches(), 2.0, 1)


def cold_rate(root: Path) -> float:
    """Our samples a second over the first epoch after the kernel has dropped the cache files from memory."""
    for path in cache_folder(root).glob("*.u8"):
        with path.open("rb") as f:
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    loader = ChunkLoader(root, HORIZON, BATCH)
    begin = time.perf_counter()
    for _ in range(len(loader)):
        next(loader)
    return len(loader) * BATCH / (time.perf_counter() - begin)


def timed(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def run(case: Case, root: Path) -> tuple[Check, dict[str, Any]]:
    print(case.name, flush=True)
    make_dataset(case, root)
    build = timed(lambda: ChunkLoader(root, HORIZON, BATCH, progress=False))
    cold = cold_rate(root)
    before = rate(ChunkLoader(root, HORIZON, BATCH, seed=1), 3.0, 3)
    peers = peer_rates(root, case.storage)
    after = rate(ChunkLoader(root, HORIZON, BATCH, seed=2), 3.0, 3)
    ours, peer = min(before, after), max(peers.values())
    print(f"    ours: {before:.0f}/s and {after:.0f}/s; cold {cold:.0f}/s; cache built in {build:.1f} s", flush=True)
    data = {
        "peer_samples_per_s": peers,
        "ours_samples_per_s": [before, after],
        "ours_samples_per_s_cold": cold,
        "copy_samples_per_s": copy_rate(root),
        "frames": case.episodes * case.length * len(CAMERAS),
        "cache_build_s": build,
        "cache_bytes": sum(p.stat().st_size for p in cache_folder(root).glob("*.u8")),
        "cache_pays_after_samples": build / (1 / peer - 1 / ours),
    }
    return Check(f"loader, {case.name}: samples/s, ours over LeRobot's best", ours / peer, case.bound), data


def main() -> None:
    parser(__doc__).parse_args()
    torch.set_num_threads(1)
    disable_progress_bars()
    checks, data = [], {}
    with tempfile.TemporaryDirectory() as tmp:
        for i, case in enumerate(CASES):
            check, data[case.name] = run(case, Path(tmp) / f"case-{i}")
            checks.append(check)
    write("loader", checks, {"horizon": HORIZON, "batch": BATCH, "cases": data}, seeds=[0, 1, 2])


if __name__ == "__main__":
    main()

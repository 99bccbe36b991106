"""Data at DROID's size: 75 000 episodes, 27 million frames, opened, counted, sampled and packed on two cores.

    python tools/bench/data_scale.py

Two made-up datasets in a temporary folder, under 10 GB. One is packed as LeRobot packs: 75 000 episodes of 360 frames
in files of up to 100 MB, eight numbers of state and action, rows of meta/episodes with all their statistics; its
episodes share a video of 224 x 224 under 1000 names, of which few stay open, so that a sampled frame costs opening,
seeking and decoding. The other is as a recorder of ours leaves it, a data file and a video an episode (75 copies under
1000 names each), and is packed by `vla data compact`. Each time is given twice, by the clock and by what the process
computed, divided by two cores: the clock counts whatever else the machine does. Each measurement is a process of its
own, whose largest resident memory is reported; of statistics the open dataset is taken off. Beside the times stands
what bounds them: reading the files once, a bare pass over the values, the bare decoder.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from results import Check, parser, write
from vla_stack.data import digests
from vla_stack.data.compact import compact
from vla_stack.data.features import INDEX_FEATURES
from vla_stack.data.layout import CHUNK_SIZE, DATA_PATH, EPISODES_PATH, INFO, STATS, VERSION, VIDEO_PATH, write_json
from vla_stack.data.stats import column_stats
from vla_stack.data.store import row_table, write_tasks
from vla_stack.data.video import VideoWriter, decode

EPISODES, LENGTH, SHORT, FPS, DIMS = 75_000, 360, 8, 15, 8
HORIZON, BATCH, SIZE, BATCHES = 16, 32, 224, 40
PER_FILE = 1500  # episodes of a data file of the packed dataset, about 60 MB; 250 to a file of meta/episodes
CAMERA = "observation.images.front"
TASKS = [f"task {i}" for i in range(2000)]


def features(size: int) -> dict[str, Any]:
    vector = {"dtype": "float32", "shape": [DIMS], "names": None}
    picture = {"dtype": "video", "shape": [size, size, 3], "names": ["height", "width", "channels"]}
    return {CAMERA: picture, "observation.state": vector, "action": vector, **INDEX_FEATURES}


def begin(root: Path, length: int, size: int) -> None:
    """All of a dataset but its rows, its videos and what says where they are."""
    info = {
        "codebase_version": VERSION,
        "robot_type": "made up",
        "total_episodes": EPISODES,
        "total_frames": EPISODES * length,
        "total_tasks": len(TASKS),
        "chunks_size": CHUNK_SIZE,
        "data_files_size_in_mb": 100,
        "video_files_size_in_mb": 200,
        "fps": FPS,
        "splits": {"train": f"0:{EPISODES}"},
        "data_path": DATA_PATH,
        "video_path": VIDEO_PATH,
        "features": features(size),
    }
    (root / "meta").mkdir(parents=True)
    write_json(root / INFO, info)
    write_json(root / STATS, {})
    write_tasks(root, TASKS)


def rows(first: int, count: int, length: int, rng: np.random.Generator) -> pa.Table:
    """Frames of some episodes: smooth paths, commands a little ahead, a gripper that opens and closes."""
    n = count * length
    state = rng.standard_normal((n, DIMS), np.float32)
    action = state + 0.1 * rng.standard_normal((n, DIMS), np.float32)
    action[:, -1] = action[:, -1] > 0
    episode, frame = np.repeat(np.arange(first, first + count), length), np.tile(np.arange(length), count)
    of = {
        "observation.state": pa.FixedSizeListArray.from_arrays(pa.array(state.ravel()), DIMS),
        "action": pa.FixedSizeListArray.from_arrays(pa.array(action.ravel()), DIMS),
        "timestamp": pa.array((frame / FPS).astype(np.float32)),
        "frame_index": pa.array(frame),
        "episode_index": pa.array(episode),
        "index": pa.array(np.arange(first * length, first * length + n)),
        "task_index": pa.array(episode % len(TASKS)),
    }
    return pa.table(of)


def numbered(i: int) -> tuple[int, int]:
    return i // CHUNK_SIZE, i % CHUNK_SIZE


def write_meta(
    root: Path, length: int, data_of: Callable[[int], int], video_of: Callable[[int], tuple[int, float]]
) -> None:
    """Rows of ``meta/episodes`` with statistics of every column, 250 to a file."""
    some = np.random.default_rng(0).standard_normal((length, DIMS))
    stats = {key: column_stats(some[:, : feature["shape"][0]]) for key, feature in features(1).items()}
    stats[CAMERA] = {k: v if k == "count" else v[:3].reshape(3, 1, 1) for k, v in column_stats(some).items()}
    template = row_table({}, stats)
    for file, first in enumerate(range(0, EPISODES, 250)):
        episodes = list(range(first, min(first + 250, EPISODES)))
        chunk, number = numbered(file)
        columns: dict[str, list[Any]] = {
            "episode_index": episodes,
            "tasks": [[TASKS[e % len(TASKS)]] for e in episodes],
            "length": [length] * len(episodes),
            "dataset_from_index": [e * length for e in episodes],
            "dataset_to_index": [(e + 1) * length for e in episodes],
            "meta/episodes/chunk_index": [chunk] * len(episodes),
            "meta/episodes/file_index": [number] * len(episodes),
        }
        for i, name in enumerate(("chunk_index", "file_index")):
            columns[f"data/{name}"] = [numbered(data_of(e))[i] for e in episodes]
            columns[f"videos/{CAMERA}/{name}"] = [numbered(video_of(e)[0])[i] for e in episodes]
        begins = [video_of(e)[1] for e in episodes]
        columns[f"videos/{CAMERA}/from_timestamp"] = begins
        columns[f"videos/{CAMERA}/to_timestamp"] = [t + length / FPS for t in begins]
        table = pa.concat_tables([template] * len(episodes)).combine_chunks()
        for name, values in reversed(columns.items()):
            table = table.add_column(0, name, pa.array(values))
        path = root / EPISODES_PATH.format(chunk_index=chunk, file_index=number)
        path.parent.mkdir(parents=True, exist_ok=True)
        digests.write_pages(table, path)


def film(path: Path, frames: int, size: int) -> None:
    """A textured scene in which something moves."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    y, x = np.mgrid[:size, :size] / size
    texture = sum(np.sin(rng.uniform(5, 60) * x + rng.uniform(5, 60) * y + i)[..., None] for i in range(8))
    scene = (128 + 12 * texture * rng.uniform(0.5, 1.0, 3)).clip(0, 255).astype(np.uint8)
    writer = VideoWriter(path, size, size, FPS)
    for k in range(frames):
        image = scene.copy()
        top, left = (k * 3) % (size - size // 8), (k * 2) % (size - size // 8)
        image[top : top + size // 8, left : left + size // 8] = (200, k % 256, 40)
        writer.put(image)
    writer.close()


def make_packed(root: Path) -> None:
    begin(root, LENGTH, SIZE)
    rng, names, each = np.random.default_rng(0), 1000, 4
    for file, first in enumerate(range(0, EPISODES, PER_FILE)):
        chunk, number = numbered(file)
        path = root / DATA_PATH.format(chunk_index=chunk, file_index=number)
        path.parent.mkdir(parents=True, exist_ok=True)
        digests.write_pages(rows(first, PER_FILE, LENGTH, rng), path)
    videos = [root / VIDEO_PATH.format(video_key=CAMERA, chunk_index=0, file_index=i) for i in range(names)]
    film(videos[0], each * LENGTH, SIZE)
    for name in videos[1:]:
        os.link(videos[0], name)
    write_meta(root, LENGTH, lambda e: e // PER_FILE, lambda e: (e % names, e // names % each * LENGTH / FPS))


def make_recorded(root: Path) -> None:
    begin(root, SHORT, 64)
    rng = np.random.default_rng(1)
    for e in range(EPISODES):
        chunk, number = numbered(e)
        data = root / DATA_PATH.format(chunk_index=chunk, file_index=number)
        video = root / VIDEO_PATH.format(video_key=CAMERA, chunk_index=chunk, file_index=number)
        if not number:
            data.parent.mkdir(parents=True)
            made = rows(e, min(CHUNK_SIZE, EPISODES - e), SHORT, rng)
            shared = video  # anew in each folder: a file system limits how many names a file has
            film(shared, SHORT, 64)
        else:
            os.link(shared, video)
        digests.write_pages(made.slice(number * SHORT, SHORT), data)
    write_meta(root, SHORT, lambda e: e, lambda e: (e, 0.0))


# What is measured, each in a process of its own ----------------------------------------------------------------------


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    value = call()
    return time.perf_counter() - start, value


def busy(call: Callable[[], Any]) -> tuple[float, float, Any]:
    """Seconds on the clock, seconds that this process computed on either of two cores, and what came of it."""
    start = time.process_time()
    seconds, value = timed(call)
    return seconds, (time.process_time() - start) / 2, value


def peak() -> float:
    """Largest resident memory of this process so far, GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def opening(root: Path) -> dict[str, float]:
    from vla_stack.data.dataset import open_dataset

    before, (seconds, core, _) = peak(), busy(lambda: open_dataset(root))
    gb = peak()  # before the files are read whole
    size = sum(p.stat().st_size for p in root.rglob("*.parquet"))
    reading, _ = timed(lambda: [p.read_bytes() for p in root.rglob("*.parquet")])
    return {
        "s": seconds,
        "core_s": core,
        "gb": gb,
        "gb_of_imports": before,
        "reading_s": reading,
        "files_gb": size / 1e9,
    }


def counting(root: Path) -> dict[str, float]:
    from vla_stack.data.dataset import open_dataset
    from vla_stack.data.stats import load_stats

    dataset, relative = open_dataset(root), np.arange(DIMS) < DIMS - 1
    before = peak()
    seconds, core, _ = busy(lambda: load_stats(dataset, HORIZON, relative, progress=False))
    gb = peak() - before
    again, _ = timed(lambda: load_stats(dataset, HORIZON, relative, progress=False))
    block = np.random.default_rng(0).standard_normal(1 << 18, np.float32)
    once = min(timed(lambda: (block.sum(), block.min(), block.max()))[0] for _ in range(20)) / len(block)
    values = dataset.num_frames * HORIZON * DIMS
    return {"s": seconds, "core_s": core, "again_s": again, "gb": gb, "values": values, "one_pass_s": once * values}


def sampling(root: Path) -> dict[str, float]:
    from vla_stack.data.dataset import open_dataset
    from vla_stack.data.loader import ChunkLoader

    def begin() -> ChunkLoader:
        loader = ChunkLoader(open_dataset(root), HORIZON, BATCH, cache_gb=64.0, progress=False)
        next(loader)
        return loader

    first, first_core, loader = busy(begin)
    dataset = loader.dataset
    for _ in range(4):
        next(loader)
    seconds, core, _ = busy(lambda: [next(loader) for _ in range(BATCHES)])
    path = dataset.video_file(0, CAMERA)
    frames, bare = 0, time.process_time()
    for _ in decode(path):
        frames += 1
    bare = frames / (time.process_time() - bare)
    raw = dataset.num_frames * SIZE * SIZE * 3
    return {
        "first_batch_s": first,
        "first_batch_core_s": first_core,
        "samples_per_s": BATCHES * BATCH / seconds,
        "samples_per_core_s": BATCHES * BATCH / core,
        "decoder_frames_per_s": bare,
        "raw_gb": raw / 1e9,
        "cached": float(root.with_name(f"{root.name}.frames").exists()),
        "gb": peak(),
    }


def packing(root: Path) -> dict[str, float]:
    seconds, core, done = busy(lambda: compact(root, progress=False))
    opened = opening(root)
    return {
        "s": seconds,
        "core_s": core,
        "before": done.before,
        "after": done.after,
        "gb": peak(),
        **{f"then_opens_{k}": opened[k] for k in ("s", "core_s")},
    }


MEASURED = {"opening": opening, "counting": counting, "sampling": sampling, "packing": packing}


def measured(what: str, root: Path) -> dict[str, float]:
    print(f"  {what} ...", flush=True)
    command = [sys.executable, str(Path(__file__).resolve()), "--child", what, str(root)]
    out = subprocess.run(
        command,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    found = json.loads(out.stdout.splitlines()[-1])
    print("    " + ", ".join(f"{k} {v:.4g}" for k, v in found.items()), flush=True)
    return found


def checks_of(found: dict[str, dict[str, float]], load: float) -> list[Check]:
    """Each time on the clock, and as what the process computed: the same on two cores that do nothing else."""
    opens, stats, samples, packs = (found[k] for k in MEASURED)
    shared = f"others computed on these cores at the same time, {load:.0f} processes on average; see the row below"

    def both(name: str, clock: float, core: float, bound: float, sense: str) -> list[Check]:
        own = f"{name}, by the computing time of two cores"
        return [Check(name, clock, bound, sense, why=shared), Check(own, core, bound, sense)]

    return [
        *both("75 000 episodes, 27 M frames: opens, s", opens["s"], opens["core_s"], 10.0, "<="),
        Check("opens: largest resident memory, GB", opens["gb"], 2.0, "<="),
        Check("opens: time over reading its files once", opens["s"] / opens["reading_s"]),
        *both("first batch from nothing, s", samples["first_batch_s"], samples["first_batch_core_s"], 30.0, "<="),
        Check("frames decoded to the disk for it", samples["cached"], 0.0, "<="),
        *both(
            "video on demand, 224 px: samples/s", samples["samples_per_s"], samples["samples_per_core_s"], 300.0, ">="
        ),
        Check(
            "on demand: over frames/s of one bare decoder",
            samples["samples_per_core_s"] / samples["decoder_frames_per_s"],
        ),
        *both("statistics, horizon 16, relative: s", stats["s"], stats["core_s"], 60.0, "<="),
        Check("statistics: memory above the open dataset, GB", stats["gb"], 1.0, "<="),
        Check("statistics: computing time over a bare sum, min, max", 2 * stats["core_s"] / stats["one_pass_s"]),
        Check("statistics at the next start, s", stats["again_s"]),
        Check("75 000 episodes: files after compact", packs["after"], 2000, "<="),
        Check("files before compact", packs["before"]),
    ]


def main() -> None:
    read = parser(__doc__)
    read.add_argument("--child", nargs=2, metavar=("WHAT", "ROOT"), help="measure one thing; the script starts these")
    args = read.parse_args()
    if args.child:
        what, root = args.child
        print(json.dumps(MEASURED[what](Path(root))))
        return
    found: dict[str, dict[str, float]] = {}
    data: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as tmp:
        packed, recorded = Path(tmp) / "packed", Path(tmp) / "recorded"
        data["making_packed_s"], _ = timed(lambda: make_packed(packed))
        found |= {what: measured(what, packed) for what in ("opening", "counting", "sampling")}
        shutil.rmtree(packed)
        data["making_recorded_s"], _ = timed(lambda: make_recorded(recorded))
        found["packing"] = measured("packing", recorded)
    load = os.getloadavg()[2]
    write("data_scale", checks_of(found, load), {"episodes": EPISODES, "length": LENGTH, **data, **found}, seeds=[0, 1])


if __name__ == "__main__":
    main()

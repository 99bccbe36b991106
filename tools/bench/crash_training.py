"""Kill -9 a training at random moments, half of them while it writes a checkpoint; each time it must resume.

    python tools/bench/crash_training.py [kills]

The runs are those of ``vla train`` on a recorded dataset; only the imports are shared (a fork server), so that fifty
starts cost seconds. Every run must end in the very bytes of a run that nobody killed: served weights, raw weights,
optimiser. ``tools/bench/crash.py`` calls :func:`training` and writes the results of recording and training together.
"""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from results import Check, parser, write
from vla_stack.data.recorder import EpisodeRecorder
from vla_stack.schema import Camera, Dim, Observation, RobotSpec

RECIPE = """
name: crash
policy:
  options: {chunk_size: 8, n_action_steps: 4, width: 32, expert_width: 32, depth: 2, heads: 2, head_dim: 16,
            vision_channels: [8, 16]}
method:
  optimizer: {lr: 1e-3, warmup_steps: 5}
  steps: 60
  batch_size: 16
  log_every: 5
  save_every: 4
threads: 1
device: cpu
"""


@dataclass
class Kill:
    """One kill -9: in which run, how it was aimed, when, and whether a checkpoint was being written."""

    run: int
    aim: str
    after_s: float
    writing: bool


def training(kills: int = 50, seed: int = 0) -> tuple[list[Check], dict[str, Any]]:
    """Kill trainings until ``kills`` kills have hit.

    Returns:
        Checks and data for a result file.
    """
    rng = np.random.default_rng(seed)
    hits: list[Kill] = []
    runs, equal = 0, 0
    with tempfile.TemporaryDirectory() as tmp:
        base = Path(tmp)
        recipe = base / "crash.yaml"
        recipe.write_text(f"{RECIPE}data: {{root: {record(base / 'data')}}}\n")
        for name in ("reference", "control"):  # the first pays for the fork server's imports, the second is timed
            begin = time.monotonic()
            finish(start(recipe, base / name))
            duration = time.monotonic() - begin
        reference = digest(base / "reference")
        if digest(base / "control") != reference:
            raise RuntimeError("two unkilled runs differ")
        while len(hits) < kills:
            run_dir, before = base / f"run-{runs}", len(hits)
            while not finished(run_dir):
                process = start(recipe, run_dir)
                if len(hits) < kills:
                    hits += attack(process, run_dir, runs, rng, duration)
                finish(process)
            if len(hits) > before:
                equal += digest(run_dir) == reference
                runs += 1
                print(f"{len(hits)} kills, {runs} runs killed, {equal} equal to the reference", flush=True)
            else:  # it ended before its kill
                shutil.rmtree(run_dir)
    writing = sum(hit.writing for hit in hits)
    checks = [
        Check("training: kills -9", len(hits), kills),
        Check("training: of them while a checkpoint was written", writing, kills // 5),
        Check("training: killed runs that end bit for bit as the unkilled one", equal / runs, 1.0),
    ]
    return checks, {"runs": runs, "unkilled_s": duration, "kills": [asdict(hit) for hit in hits]}


def start(recipe: Path, run_dir: Path) -> Any:
    """``vla train`` in a new process: a fresh run, or the continuation of what is there."""
    resume = (run_dir / "recipe.yaml").exists()
    args = ["--resume", str(run_dir)] if resume else [str(recipe), f"output_dir={run_dir}"]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vla_stack.training.loop", "vla_stack.policies.modeling_vla", "tensorboard"])
    process = context.Process(target=train, args=(args,))
    process.start()
    return process


def train(args: list[str]) -> None:
    """Body of the child process."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    from vla_stack.cli import main

    sys.exit(main(["train", *args]))


def attack(process: Any, run_dir: Path, run: int, rng: np.random.Generator, duration: float) -> list[Kill]:
    """Kill a training, at any moment or while it writes a checkpoint; nothing if it ends before that."""
    begin, old = time.monotonic(), half_written(run_dir)
    aim = "write" if rng.random() < 0.5 else "any"
    if aim == "any":
        process.join(rng.uniform(0.0, duration))
    else:
        seen = old
        for _ in range(int(rng.integers(1, 7))):  # which of the coming checkpoints
            while process.is_alive() and half_written(run_dir) <= seen:
                time.sleep(0.0005)
            seen = seen | half_written(run_dir)
        time.sleep(rng.uniform(0.0, 0.02))  # of the order of writing one
    process.kill()
    process.join()
    if process.exitcode == 0:
        return []
    return [Kill(run, aim, round(time.monotonic() - begin, 4), bool(half_written(run_dir) - old))]


def half_written(run_dir: Path) -> frozenset[tuple[str, int]]:
    """Checkpoints on the disk that are not whole, by name and inode."""
    found = set()
    for path in (run_dir / "checkpoints").glob(".tmp-*"):
        with contextlib.suppress(FileNotFoundError):
            found.add((path.name, path.lstat().st_ino))
    return frozenset(found)


def finish(process: Any) -> None:
    """Wait; a training that ends by itself must end well."""
    process.join()
    if process.exitcode not in (0, -9):
        raise RuntimeError(f"training ended with exit code {process.exitcode}")


def finished(run_dir: Path) -> bool:
    return (run_dir / "checkpoints/000060").exists()


def digest(run_dir: Path) -> str:
    """Hash of every tensor file of the last checkpoint."""
    last = run_dir / "checkpoints/000060"
    return hashlib.sha256(b"".join(p.read_bytes() for p in sorted(last.rglob("*.safetensors")))).hexdigest()


def record(root: Path) -> Path:
    """A small dataset of random motions."""
    dims = tuple(Dim(name, "m") for name in ("x", "y", "z"))
    spec = RobotSpec("test/arm", dims, dims, (Camera("front", 32, 32),), rate_hz=10.0)
    rng = np.random.default_rng(0)
    with EpisodeRecorder(root, spec, image_mode="image") as recorder:
        for _ in range(4):
            state = rng.standard_normal(3).astype(np.float32)
            for step in range(30):
                image = rng.integers(0, 256, (32, 32, 3), np.uint8)
                action = state + rng.normal(0, 0.1, 3).astype(np.float32)
                recorder.add_frame(Observation(state, {"front": image}, "move", step, step * 10**8), action)
                state = action
            recorder.save_episode(success=True)
    return root


if __name__ == "__main__":
    p = parser(__doc__)
    p.add_argument("kills", type=int, nargs="?", default=50, help="default: %(default)d")
    checks, data = training(p.parse_args().kills)
    write("crash_training", checks, data, seeds=[0])

"""End-to-end training speed: ``vla train`` against stock ``lerobot-train``, same policy, data, batch, steps, threads.

    python tools/bench/train.py [repeats]

Both are run as they are installed, in turns and twice, so that neither profits from a quiet moment alone; the best run
of each counts, and the other's best number of loader workers. Speed is that of the steady state, from the
second log record on, as each tool reports it itself: its own clock around loading, processing and updating, which for
LeRobot leaves out what happens between two updates (its progress bar). Start-up is reported apart: the time from the
start of the command to its end that is not steady state, which includes one checkpoint.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from results import Check, parser, write

BIN = Path(sys.executable).parent
STEPS, LOG, BATCH = 60, 10, 32
THREADS = os.cpu_count() or 1
# Waiting threads sleep: without it either tool is several times slower on a machine that does anything else.
ENV = os.environ | {"OMP_NUM_THREADS": str(THREADS), "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}


def main(repeats: int) -> int:
    with tempfile.TemporaryDirectory() as tmp:
        base = Path(tmp)
        data = base / "pick"
        collect = ["collect", "--task", "pick", "--episodes", "120", "--root", str(data)]
        subprocess.run([BIN / "vla", *collect], check=True, env=ENV, capture_output=True)
        runs = []
        for i in range(repeats):
            runs.append(ours(data, base / f"ours-{i}"))
            runs += [stock(data, base / f"stock-{workers}-{i}", workers) for workers in (0, 2)]
    runs.sort(key=lambda r: -r["samples_per_s"])
    mine = next(r for r in runs if r["tool"] == "vla train")
    peer = next(r for r in runs if r["tool"] != "vla train")
    checks = [
        Check("samples/s of vla train over lerobot-train", mine["samples_per_s"] / peer["samples_per_s"], 1.5),
        Check("start-up of lerobot-train over vla train", peer["startup_s"] / mine["startup_s"]),
        Check("vla train, samples/s", mine["samples_per_s"]),
        Check(f"{peer['tool']}, samples/s", peer["samples_per_s"]),
    ]
    write("train", checks, {"threads": THREADS, "batch_size": BATCH, "image_size": 64, "steps": STEPS, "runs": runs})
    return 0


def ours(data: Path, out: Path) -> dict[str, Any]:
    """One run of ``vla train``."""
    recipe = out.with_suffix(".yaml")
    sizes = f"steps: {STEPS}, batch_size: {BATCH}, log_every: {LOG}"
    # What the policy's own `forward` computes for lerobot-train, of pictures as they are.
    same_loss, plain = "draws: 1", "data: {augmentation: {strength: 0}}"
    recipe.write_text(f"method: {{{sizes}, {same_loss}}}\n{plain}\nthreads: {THREADS}\ndevice: cpu\n")
    seconds, _ = timed("vla", "train", str(recipe), f"data.root={data}", f"output_dir={out}")
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return summary("vla train", seconds, [r["samples_per_s"] for r in records])


def stock(data: Path, out: Path, workers: int) -> dict[str, Any]:
    """One run of ``lerobot-train``."""
    seconds, printed = timed(
        "lerobot-train",
        *("--dataset.repo_id=local/pick", f"--dataset.root={data}", f"--output_dir={out}"),
        *("--policy.type=vla", "--policy.device=cpu", "--policy.push_to_hub=false"),
        *(f"--steps={STEPS}", f"--batch_size={BATCH}", f"--log_freq={LOG}", f"--num_workers={workers}"),
        *("--env_eval_freq=0", f"--save_freq={STEPS}"),
    )
    # The printed smp/s is rounded; updt_s + data_s is what it is made of.
    windows = dict(re.findall(r"step:(\d+) (.*)", printed))  # LeRobot prints some lines to both streams
    times = [float(t) for w in windows.values() for t in [sum(map(float, re.findall(r"(?:updt_s|data_s):(\S+)", w)))]]
    return summary(f"lerobot-train, {workers} workers", seconds, [BATCH / t for t in times])


def timed(command: str, *args: str) -> tuple[float, str]:
    begin = time.monotonic()
    done = subprocess.run([BIN / command, *args], env=ENV, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command} failed:\n{done.stderr[-3000:]}")
    return time.monotonic() - begin, done.stdout + done.stderr


def summary(tool: str, seconds: float, rates: list[float]) -> dict[str, Any]:
    """Steady speed is that of all windows but the first, by their total time."""
    assert len(rates) == STEPS // LOG, f"{tool}: {len(rates)} log records"
    times = [LOG * BATCH / rate for rate in rates]
    steady = (len(rates) - 1) * LOG * BATCH / sum(times[1:])
    return {
        "tool": tool,
        "samples_per_s": steady,
        "windows": rates,
        "startup_s": seconds - sum(times),
        "wall_s": seconds,
    }


if __name__ == "__main__":
    p = parser(__doc__)
    p.add_argument("repeats", type=int, nargs="?", default=2, help="of every tool (default: %(default)d)")
    sys.exit(main(p.parse_args().repeats))

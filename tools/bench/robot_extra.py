"""The robot side alone: install ``.[robot]`` into an empty environment and time ``vla run --help`` there.

    python tools/bench/robot_extra.py

Bounds: the help text in under one second, and neither torch nor lerobot installed.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from results import ROOT, Check, parser, write


def main() -> int:
    parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as tmp:
        venv.create(tmp, with_pip=True)
        python, vla = Path(tmp, "bin", "python"), Path(tmp, "bin", "vla")
        t0 = time.monotonic()
        subprocess.run([python, "-m", "pip", "install", "-q", f"{ROOT}[robot]"], check=True)
        installed_s = time.monotonic() - t0
        heavy = [
            name
            for name in ("torch", "lerobot", "transformers", "pandas")
            if subprocess.run([python, "-c", f"import {name}"], capture_output=True).returncode == 0
        ]
        seconds = []
        for _ in range(6):  # the first compiles bytecode and is dropped
            t0 = time.monotonic()
            subprocess.run([vla, "run", "--help"], check=True, capture_output=True)
            seconds.append(time.monotonic() - t0)
        size = sum(f.stat().st_size for f in Path(tmp).rglob("*") if f.is_file() and not f.is_symlink())
    write(
        "robot_extra",
        [
            Check("`vla run --help`, seconds (median of 5)", statistics.median(seconds[1:]), 1.0, "<="),
            Check("heavy packages installed (torch, lerobot, ...)", len(heavy), 0, "<="),
        ],
        {"seconds": seconds, "heavy": heavy, "install_seconds": installed_s, "environment_mb": size / 2**20},
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Training for a number of CPU hours: those of all processes of `vla train`, loading included."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from vla_stack.data.layout import write_json


def trained(run: Path, recipe: Sequence[str], hours: float) -> float:
    """CPU hours that a training took, at most about ``hours``; a run that was interrupted goes on.

    Args:
        run: Its directory; the hours are noted beside it.
        recipe: Arguments of `vla train` but for ``output_dir``.
        hours: When it is told to stop, which it does after a checkpoint.
    """
    spent = run.parent / f"{run.name}.hours.json"
    before = json.loads(spent.read_text()) if spent.exists() else {"hours": 0.0, "over": False}
    if before["over"]:
        return float(before["hours"])
    resumed = ("--resume", str(run)) if (run / "checkpoints").exists() else (*recipe, f"output_dir={run}")
    command = vla("train", *resumed)
    begun = of_children()
    process = subprocess.Popen(command, start_new_session=True)
    told = False
    try:
        while process.poll() is None:
            time.sleep(5.0)
            now = before["hours"] + of_group(process.pid) / 3600
            write_json(spent, {"hours": now, "over": False})
            if now > hours:
                os.killpg(process.pid, signal.SIGINT)  # it saves a checkpoint and ends
                told = True
                process.wait()
    finally:  # Ctrl-C reaches this process alone
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
            process.wait()
    if process.returncode and not told:
        raise SystemExit(f"training of {run.name} failed; the same command goes on with it")
    now = before["hours"] + (of_children() - begun) / 3600
    write_json(spent, {"hours": now, "over": True})
    return now


def of_children() -> float:
    """CPU seconds of processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def of_group(group: int) -> float:
    """CPU seconds of a group of processes that runs."""
    total = 0.0
    for process in psutil.process_iter(["pid"]):
        try:
            if os.getpgid(process.pid) == group:
                total += sum(process.cpu_times()[:2])
        except (psutil.Error, ProcessLookupError):
            continue  # it has ended
    return total


def vla(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "vla_stack.cli", *arguments]

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
from contextlib import suppress
from pathlib import Path

import psutil

from vla_stack.data.layout import write_json

GRACE_S = 120.0  # for a checkpoint


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
            now = before["hours"] + of_all(process.pid) / 3600
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


def of_all(pid: int) -> float:
    """CPU seconds of a process that runs and of all that came of it, ended or not."""
    total = 0.0
    for process in everyone(pid):
        with suppress(psutil.Error):  # it has ended since
            total += sum(process.cpu_times()[:4])  # its own, and those of children that it has waited for
    return total


def everyone(pid: int) -> list[psutil.Process]:
    """A process and all that came of it, whatever sessions they have made for themselves."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []


def end_all(process: subprocess.Popen[bytes]) -> None:
    """Stop a process and all that came of it: a training saves a checkpoint first."""
    left = everyone(process.pid)
    for one in left:
        with suppress(psutil.Error):
            one.terminate()
    process.wait()
    for one in psutil.wait_procs(left[1:], timeout=GRACE_S)[1]:
        with suppress(psutil.Error):
            one.kill()


def vla(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "vla_stack.cli", *arguments]

"""Where a figure comes from: machine, versions, command, revision."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

PACKAGES = ("vla-stack", "torch", "lerobot", "mujoco", "gymnasium", "numpy")


def provenance() -> dict[str, Any]:
    """Everything beside the settings that a figure may depend on; plain JSON."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "revision": _revision(),
        "hardware": _hardware(),
        "versions": {"python": platform.python_version()} | {p: v for p in PACKAGES if (v := _version(p))},
    }


def _hardware() -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu)
    except OSError:
        pass
    found: dict[str, Any] = {"cpu": cpu, "cores": os.cpu_count(), "system": platform.system()}
    torch = sys.modules.get("torch")  # a robot computer has none, and this is no reason to import it
    if torch is not None and torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _revision() -> str:
    """Git revision of the tree that this file is in, with ``+`` if it has uncommitted changes; empty without git."""
    folder = Path(__file__).parent
    try:
        head, changes = (
            subprocess.run(["git", *a], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
            for a in (("rev-parse", "--short=12", "HEAD"), ("status", "--porcelain", "-uno"))
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head + ("+" if changes else "")

"""Packages of other people's, as pip would install them, and Python where they are."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def lay_out(project: Path, site: Path) -> None:
    """Put the modules of ``project`` into ``site``, and beside them what its ``pyproject.toml`` says of it."""
    told = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    for module in project.glob("*.py"):
        shutil.copy(module, site)
    info = site / f"{told['name'].replace('-', '_')}-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {told['name']}\nVersion: 0.1.0\n")
    groups = told["entry-points"].items()
    lines = [f"[{group}]\n" + "\n".join(f"{k} = {v}" for k, v in entries.items()) for group, entries in groups]
    (info / "entry_points.txt").write_text("\n".join(lines))


def environment(site: Path) -> dict[str, str]:
    """Variables of a process that finds ``site`` and this tree."""
    path = f"{site}{os.pathsep}{ROOT}"
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def python(site: Path, *args: object) -> str:
    """Run Python where the packages are installed; returns what it printed."""
    command = [sys.executable, *map(str, args)]
    done = subprocess.run(command, env=environment(site), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


def vla(site: Path, *commands: str) -> str:
    """Run several ``vla`` commands, one after another in one process; returns what they printed."""
    run = "import sys; from vla_stack.cli import main; [main(line.split()) and sys.exit(line) for line in sys.argv[1:]]"
    return python(site, "-c", run, *commands)

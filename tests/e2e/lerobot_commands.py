"""LeRobot's commands as they are installed."""

import os
import subprocess
import sys
from pathlib import Path


def stock(command: str, *args: str) -> str:
    """Run one; returns what it printed."""
    env = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([Path(sys.executable).parent / command, *args], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr

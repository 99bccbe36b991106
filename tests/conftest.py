"""What holds for every test: few threads, software rendering, and a Ctrl-C that works."""

import gc
import importlib.util
import os
import signal
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MUJOCO_GL", "egl")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# A runner that was itself started in the background inherits an ignored SIGINT, and so would every process that a test
# starts and then interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

REAL_TIME = (
    "console",
    "e2e",
    "robot_drivers",
    "runtime",
    "serving",
    "test_robot_verb.py",
    "test_outside.py",
    "test_tutorials.py",
)


def pytest_collection_modifyitems(items):
    """Second try for tests of real processes under the wall clock, whose deadlines are the product's own.

    A shared machine may stop any process for seconds, and a dead-man's 0.2 s are then over; that is no defect. What
    fails twice is one. Each second try is shown in the summary.
    """
    for item in items:
        if item.path.parent.name in REAL_TIME or item.path.name in REAL_TIME:
            item.add_marker(pytest.mark.flaky(reruns=1))


def pytest_collection_finish(session):
    """What torch and LeRobot have made while they were imported is never garbage: it is not searched again, and what
    tests leave is searched less often.
    """
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)


@pytest.fixture(scope="session")
def load_tool():
    """A script under ``tools/`` as a module."""

    def load(path):
        file = Path(__file__).resolve().parent.parent / "tools" / path
        spec = importlib.util.spec_from_file_location(file.stem, file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load

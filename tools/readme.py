"""Run every command of the README's table as a reader would: in that order, each in a process of its own.

    python tools/readme.py          # `make readme`; writes into a temporary folder alone
    python tools/readme.py train    # the rows with this word only

The rows are made short by what is appended to them. A command that goes on until Ctrl-C is awaited until it says that
it is ready, and interrupted, as a terminal would, when the command after it has ended.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pty
import re
import resource
import signal
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent  # of the environment: what is called `vla` and `python` below
ROW = re.compile(r"^\| .+? \| `(vla [^`]+)` \|$", re.M)
TIMEOUT_S = 600.0  # of a command, or until a server is ready
LOOK_S = 0.1
SIZE = (40, 120)  # rows and columns of a terminal
TAIL = 3000  # characters of a failed command's output
EPISODE = "--episodes 1 --max-steps 4 --num-envs 1 --workers 0"
FIT = "method.steps=2 method.batch_size=2 eval.every=0"
ADDRESS = "ipc://policy.sock"  # in the temporary folder: whatever else this machine serves is left alone


class Step(NamedTuple):
    """A row of the README and how it is made short.

    Args:
        command: As it stands in the README.
        short: Appended to it.
        ready: What a command prints that goes on until it is interrupted; empty for one that ends.
        row: Whether it is a row; others follow from a row and make sure of what it promises.
    """

    command: str
    short: str = ""
    ready: str = ""
    row: bool = True

    @property
    def line(self) -> str:
        return f"{self.command} {self.short}".rstrip()


STEPS = (
    Step("vla doctor"),
    Step("vla collect --task pick --episodes 200 --root data/pick", "--episodes 10 --workers 1"),
    Step("vla recipes"),
    Step("vla train pick data.root=data/pick output_dir=runs/pick", FIT),
    Step("vla policy info runs/pick", "--repeats 2"),
    Step("vla eval --policy runs/pick --env sim/pick-v0 --episodes 100", f"{EPISODE} --videos 0"),
    Step("vla compare shipped runs/pick --budget 200", "--budget 1 --num-envs 1"),
    Step("vla eval --suite shifts", f"{EPISODE} --splits camera"),
    Step("vla eval --mode sync naive rtc --latency 0,200,400ms", f"{EPISODE} --videos 0"),
    Step("vla serve --policy runs/pick", f"--endpoint {ADDRESS}", "READY"),
    Step("vla run --robot sim --task pick --episodes 10", f"--server {ADDRESS} --episodes 1 --seconds 1"),
    Step("vla console --robot sim --task pick --root data/console", "--port 18765", "open once"),
    Step("vla teleop --robot sim --task pick --root data/mine", "--seconds 1"),
    Step("vla emulate so101", ready="quit"),
    Step("vla robot check", "--seconds 0.5"),
    Step(
        "vla train grape_safety",
        "method.steps=2 method.calibration=2 method.starts=1 method.rollouts_per_start=2 method.num_envs=2 "
        "method.films=0 method.pairs.winner_succeeds=false eval.episodes=1",
    ),
    Step("vla train rac_stack", f"{FIT} method.iterations=1 method.demos=9 method.human_frames=5 eval.episodes=1"),
    Step(
        "vla train rl_wsrl",
        "method.offline.episodes=2 method.offline_steps=2 method.warmup=2 method.steps=4 method.sac.batch=8 "
        "task.options.max_episode_steps=4 eval.every=4 eval.episodes=1 eval.num_envs=1",
    ),
    Step(
        "vla train world_model_tiny data.root=data/pick output_dir=runs/world",
        "method.train_vae.steps=1 method.train_dynamics.steps=1 method.train_heads.steps=1 method.generated=2 "
        "eval.every=0 method.vae.widths=[8,8] method.dynamics.width=16 method.dynamics.blocks=1",
    ),
    Step("vla imagine", "--port 18767 --no-browser", "open http"),
    Step("vla export --policy runs/pick"),
    Step("vla export --policy runs/pick --out runs/pick_onnx"),
    Step("vla eval --policy runs/pick_onnx", f"{EPISODE} --videos 0"),
    Step("vla serve --policy runs/pick_onnx", f"--endpoint {ADDRESS}", "READY", row=False),
    Step("vla run --robot sim --task pick", f"--server {ADDRESS} --seconds 1", row=False),
    Step("vla data check data/pick --deep"),
    Step("vla --list"),
)


def rows(readme: str) -> list[str]:
    """The commands of the README's table."""
    return ROW.findall(readme)


class Process:
    """A command on a terminal of its own, in a group of its own; what it says is in ``log``.

    Attributes:
        silent_s: Longest time in which it said nothing, until it had ended or was ready.
        silent_from_s: When that began, from its start.
    """

    def __init__(self, step: Step, folder: Path, log: Path) -> None:
        self.step, self.log, self._begun = step, log, time.monotonic()
        self.silent_s = self.silent_from_s = 0.0
        self._terminal, there = pty.openpty()
        termios.tcsetwinsize(there, SIZE)
        # Nothing of this machine's user is read or written.
        env = os.environ | {"HOME": str(folder), "HF_HUB_OFFLINE": "1", "PATH": f"{BIN}:{os.environ['PATH']}"}
        self._process = subprocess.Popen(
            ["bash", "-c", step.line],
            cwd=folder,
            env=env,
            stdin=there,
            stdout=there,
            stderr=there,
            start_new_session=True,
        )
        os.close(there)
        log.touch()
        self._heard = self._begun
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        """Write down what it says; ends with it and all that it has started."""
        with self.log.open("ab", buffering=0) as out, contextlib.suppress(OSError):
            while block := os.read(self._terminal, 1 << 16):
                self._heard = time.monotonic()
                out.write(block)

    def wait(self, timeout_s: float = TIMEOUT_S) -> bool:
        """Until it has ended, or is ready where it does not end; whether that went well."""
        while (now := time.monotonic()) < self._begun + timeout_s:
            if (silent_s := now - (heard := self._heard)) > self.silent_s:
                self.silent_s, self.silent_from_s = silent_s, heard - self._begun
            code = self._process.poll()
            if code is not None:
                return code == 0 and not self.step.ready
            if self.step.ready and self.step.ready in self.log.read_text(errors="replace"):
                return True
            time.sleep(LOOK_S)
        return False

    def interrupt(self) -> bool:
        """Ctrl-C where it has not ended; whether it ended with 0."""
        try:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGINT)
            return self._process.wait(TIMEOUT_S) == 0
        except subprocess.TimeoutExpired:
            return False
        finally:
            with contextlib.suppress(ProcessLookupError):  # what it left behind
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._reader.join(1.0)
            os.close(self._terminal)

    def report(self, good: bool) -> None:
        """One line; where it failed, the end of what it printed as well."""
        text = self.log.read_text(errors="replace")
        if not good:
            print(text[-TAIL:])
        silence = f"silent {self.silent_s:4.1f} s from {self.silent_from_s:5.1f} s on"
        took = f"{time.monotonic() - self._begun:5.1f} s, {silence}"
        print(f"{'ok  ' if good else 'FAIL'} {took}  {self.step.line}", flush=True)


def run(steps: Iterable[Step], folder: Path) -> list[str]:
    """Run the steps in a folder; the lines of those that failed."""
    failed: list[str] = []
    server: Process | None = None

    def note(process: Process, good: bool) -> None:
        process.report(good)
        if not good:
            failed.append(process.step.line)

    for number, step in enumerate(steps):
        process = Process(step, folder, folder / f"{number:02d}.log")
        try:
            good = process.wait()
        except BaseException:
            for running in filter(None, (process, server)):
                running.interrupt()
            raise
        if server:
            note(server, server.interrupt())
        server = process if step.ready and good else None
        if server is None:
            note(process, process.interrupt() and good)
    if server:
        note(server, server.interrupt())
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("word", nargs="?", default="", help="run only the commands that contain it")
    word = parser.parse_args().word
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background, by what is started here too
    with tempfile.TemporaryDirectory(prefix="vla-readme-", ignore_cleanup_errors=True) as folder:
        failed = run(tuple(step for step in STEPS if word in step.command), Path(folder))
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"\n{len(failed)} failed; {used.ru_utime + used.ru_stime:.0f} s of CPU")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())

"""Pairs of processes that start one run at once, and pairs that resume it at once, with kill -9 between them.

``python start_resume_pairs.py FOLDER PAIRS`` prints one JSON object: how many of each pair proceeded, what the others
said, and from which checkpoint each run went on. The runs' method only writes checkpoints, by the project's own code.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import signal
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vla_stack import cli
from vla_stack.training import checkpoint as ckpt
from vla_stack.training import run_dir

ME = Path(__file__).stem
STEPS = 6


@dataclass(frozen=True)
class Committing:
    """Writes a checkpoint a step, and waits at its first and last step until it is told to go on."""

    name: str = "committing"

    def check_recipe(self, recipe: Any) -> None:
        """Anything goes."""

    def run(self, recipe: Any, run_dir: Path) -> None:
        """Go on from the last intact checkpoint."""
        root = run_dir / "checkpoints"
        found = ckpt.latest(root)
        step = json.loads((found / ckpt.STATE / "state.json").read_text())["step"] if found else 0
        say(f"begins {step}")
        heard()
        while step < STEPS:
            step += 1

            def fill(directory: Path, step: int = step) -> None:
                (directory / ckpt.PRETRAINED).mkdir()
                (directory / ckpt.PRETRAINED / "config.json").write_text(json.dumps({"step": step}))

            ckpt.commit(root, step, fill, {}, 2)
            say(f"saved {step}")
        say("done")


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def heard() -> None:
    os.read(0, 1)


class Racer:
    """A forked process that waits, then does one ``vla train``; its standard input and output are pipes."""

    def __init__(self, argv: list[str]) -> None:
        read_in, self.tell = os.pipe()
        self._out, write_out = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.dup2(read_in, 0)
            os.dup2(write_out, 1)
            os.closerange(3, 256)
            heard()
            complaint = io.StringIO()
            with contextlib.redirect_stderr(complaint):
                code = cli.main(argv)
            if code:
                say(f"refused {' '.join(complaint.getvalue().split())}")
            os._exit(code)
        os.close(read_in)
        os.close(write_out)
        self._lines = os.fdopen(self._out, "r")

    def go(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self.tell, b"g")

    def line(self) -> str:
        return self._lines.readline().strip()

    def end(self, kill: bool = False) -> None:
        if kill:
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self._lines.close()
        os.close(self.tell)


def race(argvs: list[list[str]], kill_after: int | None) -> tuple[int, str, list[str]]:
    """Let processes begin at once; how many proceeded, what the first said last, and what the others said.

    Args:
        argvs: Their command lines.
        kill_after: Checkpoints after which the one that proceeds is killed; None lets it end.
    """
    racers = [Racer(argv) for argv in argvs]
    for racer in racers:
        racer.go()
    firsts = [racer.line() for racer in racers]
    ahead = [racer for racer, line in zip(racers, firsts, strict=True) if line.startswith("begins")]
    others = [line for line in firsts if not line.startswith("begins")]
    for racer in racers:
        if racer not in ahead:
            racer.end()
    last = firsts[racers.index(ahead[0])] if ahead else ""
    for racer in ahead:
        racer.go()
        for count, line in enumerate(iter(racer.line, "")):
            last = line
            if count == kill_after:
                break
        racer.end(kill=kill_after is not None)
    return len(ahead), last, others


def main(base: Path, pairs: int) -> None:
    os.environ["VLA_TRUST"] = ME
    run_dir.revision = lambda: "none"  # git takes longer than all the rest
    rng, started, resumed, refusals, lost = random.Random(0), Counter[int](), Counter[int](), Counter[str](), []
    for number in range(pairs):
        run = base / f"run-{number}"
        start = ["train", f"{ME}:Committing", f"output_dir={run}"]
        count, last, others = race([start, start], kill_after=rng.randrange(STEPS - 1))
        started[count] += 1
        saved = int(last.split()[-1])
        again = ["train", "--resume", str(run)]
        count, last, more = race([again, again], kill_after=None)
        resumed[count] += 1
        kept = ckpt.latest(run / "checkpoints")
        if last != "done" or kept is None or kept.name != f"{STEPS:06d}" or (run / ".lock").exists():
            lost.append([number, saved, last])
        for text in (*others, *more):
            known = f"{run} is being written by process" in text or f"{run} was just released" in text
            refusals["writer named" if known or f"{run} already holds a run" in text else text] += 1
    print(json.dumps({"started": started, "resumed": resumed, "refusals": refusals, "lost": lost}))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main(Path(sys.argv[1]), int(sys.argv[2]))

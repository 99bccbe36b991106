"""Run the tutorials of ``docs/tutorials`` and write what they print, and their pictures, back into the pages.

    python tools/tutorials.py                        # `make tutorials`: all pages, minutes each
    python tools/tutorials.py evaluate               # the pages with this word in their names

A page is Markdown. Its ``bash`` and ``python`` blocks are run in order in a temporary folder, each command a process of
its own, all Python of a page in one namespace; the ``text`` block behind a block is its output. A comment above a block
says more: ``short:`` what a test appends to a command, ``ready:`` what a command prints that goes on to the page's
end. A picture that a page shows is copied from the folder if it was made there.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from readme import ROOT, Process, Step

PAGES = ROOT / "docs" / "tutorials"
BLOCK = re.compile(
    r"(?P<notes>(?:<!-- \w+: .+? -->\n)*)(?P<fence>```(?P<kind>bash|python)\n(?P<code>.*?)\n```\n)"
    r"(?:\n```text\n.*?\n```\n)?",
    re.S,
)
NOTE = re.compile(r"<!-- (\w+): (.+?) -->")
PICTURE = re.compile(r"!\[[^]]*\]\(([\w.-]+)\)")
RAN = re.compile(r"^\*Run .*\*$", re.M)
COLOUR = re.compile(r"\x1b\[[\d;]*m")
TOKEN = re.compile(r"(?<=token=)[\w-]+")
BAR = re.compile(r"\d%\||^Loading weights from|^\s*$")  # a progress bar, and what LeRobot says of every policy
SHELL = re.compile(r"^[A-Z_]+=|[|$;&]")  # of a command that is the shell's
TIMEOUT_S = 3600.0  # of a command, on a machine that does much else
HEAD, TAIL = 14, 10  # lines of a long output that are shown


class Block(NamedTuple):
    """A block of a page: its code, and what the comments above it say."""

    kind: str
    code: str
    notes: dict[str, str]


class Failure(Exception):
    """A block that went wrong; its message ends with what it printed."""


def blocks(page: str) -> list[Block]:
    """The blocks of a page that are run."""
    return [Block(b["kind"], b["code"], dict(NOTE.findall(b["notes"]))) for b in BLOCK.finditer(page)]


def shown(text: str, folder: Path) -> str:
    """What a reader needs of an output: no bars, colours or folders of ours, and not the middle of a long one."""
    lines = [COLOUR.sub("", line.rstrip().rpartition("\r")[2]) for line in text.split("\n")]
    lines = [line.replace(f"{folder}/", "").replace(str(ROOT), "...") for line in lines if not BAR.search(line)]
    lines = [TOKEN.sub("...", line).rstrip() for line in lines]
    if len(lines) > HEAD + TAIL + 1:
        lines[HEAD:-TAIL] = ["..."]
    return "\n".join(lines)


def with_outputs(page: str, outputs: list[str]) -> str:
    """The page with the outputs of its blocks in place of those that are there."""
    left = iter(outputs)

    def renew(block: re.Match[str]) -> str:
        output = next(left)
        return block["notes"] + block["fence"] + (f"\n```text\n{output}\n```\n" if output else "")

    return BLOCK.sub(renew, page)


def run(page: Path, folder: Path, short: bool = False) -> list[str]:
    """Run a page's blocks in a folder, which is also this process's own meanwhile.

    Args:
        page: A page.
        folder: An empty folder.
        short: Shorten commands as their notes say, and run those that end in this process.

    Returns:
        The output of each block.

    Raises:
        Failure: A block went wrong.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    outputs = []
    with contextlib.ExitStack() as running, contextlib.chdir(folder):
        for number, block in enumerate(blocks(page.read_text()), 1):
            step = Step(block.code, block.notes.get("short", "") if short else "", block.notes.get("ready", ""))
            try:
                if block.kind == "python":
                    text = _python(block.code, names)
                elif short and not step.ready and not SHELL.search(step.line):
                    text = _here(step.line)
                else:
                    text = running.enter_context(_process(step, folder, number))
            except Exception as e:
                raise Failure(f"{page.name}, block {number}: {step.line}\n{e}") from e
            outputs.append(shown(text, folder))
    return outputs


def _python(code: str, names: dict[str, Any]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(code, "block", "exec"), names)
    return out.getvalue()


def _here(line: str) -> str:
    from vla_stack.cli import main

    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        try:
            code = main(shlex.split(line.replace("\\\n", " "))[1:])
        except SystemExit as e:  # of arguments that are none
            code = e.code
    if code:
        raise Failure(f"ended with {code}: {out.getvalue()}")
    return out.getvalue()


@contextlib.contextmanager
def _process(step: Step, folder: Path, number: int) -> Iterator[str]:
    """A command's output: all of it, or until it says that it is ready; then it goes on to the page's end."""
    process = Process(step, folder, log := folder / f"{number:02d}.log")
    try:
        if not process.wait(TIMEOUT_S):
            raise Failure(log.read_text(errors="replace"))
        if not step.ready:
            process.interrupt()
        yield log.read_text(errors="replace")
    finally:
        if step.ready:
            process.interrupt()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("word", nargs="?", default="", help="run only the pages with it in their names")
    word = parser.parse_args().word
    for page in sorted(p for p in PAGES.glob("*.md") if word in p.stem):
        begun = sum(os.times()[:4])
        with tempfile.TemporaryDirectory(prefix="vla-tutorial-", ignore_cleanup_errors=True) as folder:
            try:
                outputs = run(page, Path(folder))
            except Failure as e:
                print(e)
                return 1
            for name in PICTURE.findall(page.read_text()):
                if (made := Path(folder, name)).exists():
                    shutil.copyfile(made, page.parent / name)
        minutes = (sum(os.times()[:4]) - begun) / 60
        ran = f"*Run without a GPU: {minutes:.1f} minutes of one core, everything included.*"
        page.write_text(RAN.sub(ran, with_outputs(page.read_text(), outputs)))
        print(f"ok  {minutes:4.1f} minutes of CPU  {page.name}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

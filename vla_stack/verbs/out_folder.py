"""The folder that a command's results go to: one of its own by default, made and tried before anything is computed."""

from __future__ import annotations

import atexit
import os
import re
import tempfile
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from vla_stack.errors import UserError


def out_folder(given: Path | None, under: str, name: str) -> Path:
    """Make the folder of ``--out``, or a new one that is called after what it is of, and the time.

    If it was made here and nothing has been written to it when the program ends, it is removed again.

    Args:
        given: What ``--out`` says.
        under: Where new ones are made.
        name: What its results are of, a policy or a robot.

    Raises:
        UserError: It is a file, or cannot be written to.
    """
    path = given or Path(under, f"{name}-{datetime.now():%Y%m%d-%H%M%S}")
    try:
        if given is None:
            path = _new(path)
        if given is None or not path.exists():
            atexit.register(_remove_empty, path.absolute(), os.getpid())
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):  # permissions alone do not say whether it works
            pass
    except OSError as e:
        why = "it is a file" if path.is_file() else e.strerror
        raise UserError(f"--out: nothing can be written to {path} ({why})", "give another --out") from None
    return path


def policy_name(policy: str) -> str:
    """What files about a policy are called: its directory, or that of its run; of a checkpoint its step as well."""
    *_, run, above, name = ("", "", "", *(part for part in _parts(policy) if part != "pretrained_model"))
    return re.sub(r"[^\w.-]+", "_", f"{run}-{name}" if above == "checkpoints" else name) or "policy"


def _parts(policy: str) -> tuple[str, ...]:
    return Path(os.path.abspath(policy)).parts[1:]  # "." has no name of its own


def _remove_empty(path: Path, process: int) -> None:
    """Of a command that was refused; in no process that came of it by a fork."""
    if os.getpid() == process:
        with suppress(OSError):  # there is something in it, or it has gone
            path.rmdir()


def _new(path: Path) -> Path:
    """Make a folder that was not there, under this name or one with a number; two commands never share one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made, number = path, 1
    while True:
        try:
            made.mkdir()
            return made
        except FileExistsError:
            number += 1
            made = path.with_name(f"{path.name}-{number}")

"""One folder, one writer: a lock that the kernel lets go of when its process dies."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from vla_stack.errors import UserError

LOCK = ".lock"  # of a run directory


@contextlib.contextmanager
def locked(file: Path, folder: Path, remedy: str) -> Iterator[None]:
    """Hold the writer's lock of a folder.

    Args:
        file: Its lock file, which says who holds it; made if it is missing, and left behind.
        folder: What is locked, for the message.
        remedy: What to do while another process holds it.

    Raises:
        UserError: Another process holds it; names its pid and host.
        OSError: The file cannot be made.
    """
    handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    with os.fdopen(handle, "r+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{folder} is being written by {_owner(file) or 'another process'}", remedy) from None
        if not file.exists() or os.fstat(lock.fileno()).st_ino != file.stat().st_ino:
            raise UserError(f"{folder} was just released by another process", "try again")
        with contextlib.suppress(OSError):  # a full disk: the lock holds without its owner's name
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            lock.flush()
        yield


def _owner(file: Path) -> str:
    """Who a lock file says holds it; whoever has just taken it may not have said so yet."""
    for _ in range(20):
        with contextlib.suppress(OSError):
            if text := file.read_text()[:200].strip():
                return text
        time.sleep(0.01)
    return ""


@contextlib.contextmanager
def writing(run_dir: Path) -> Iterator[None]:
    """Hold the writer's lock of a run directory, which is made if it is missing.

    Raises:
        UserError: Another process writes there, a link leads out of it, or it cannot be made.
    """
    made = not run_dir.exists()
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"{run_dir} cannot be made: {e.strerror}", "give another output_dir=") from None
    check_links(run_dir)
    with locked(run_dir / LOCK, run_dir, "wait for it to end, or give another output_dir="):
        try:
            yield
        finally:
            (run_dir / LOCK).unlink(missing_ok=True)  # whoever has opened it meanwhile finds that it is gone
            if made:
                with contextlib.suppress(OSError):  # it holds something
                    run_dir.rmdir()


def check_links(root: Path) -> None:
    """Refuse to write where a link leads out of a folder: what is written would land there.

    Raises:
        UserError: Names the first link.
    """
    home = root.resolve()
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = Path(folder) / name
            if path.is_symlink() and not path.resolve().is_relative_to(home):
                raise UserError(
                    f"{path} is a link out of {root}, through which nothing is written",
                    "put what it leads to in its place, or link the whole folder",
                )

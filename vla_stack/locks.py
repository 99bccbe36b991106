"""One folder, one writer: a lock that the kernel lets go of when its process dies."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from vla_stack.errors import UserError


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
            raise UserError(
                f"{folder} is being written by {lock.read(200).strip() or 'another process'}", remedy
            ) from None
        if not file.exists() or os.fstat(lock.fileno()).st_ino != file.stat().st_ino:
            raise UserError(f"{folder} was just released by another process", "try again")
        with contextlib.suppress(OSError):  # a full disk: the lock holds without its owner's name
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            lock.flush()
        yield

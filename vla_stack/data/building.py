"""A new dataset is built beside its place and gets its name at the end: whoever kills it leaves none that is half."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from vla_stack.data.layout import STAGING, sync_folder
from vla_stack.data.store import clear_staging, locked

_EXCHANGE = 2  # RENAME_EXCHANGE of renameat2(2)


@contextlib.contextmanager
def built(target: Path, doing: str) -> Iterator[Path]:
    """A locked, empty folder beside a dataset's place, which takes that place at the end, or is removed with an error.

    Args:
        target: Where the dataset will be. A dataset that is there already stays until the new one takes its place.
        doing: Names the folder, ``.<target>.<doing>``; what a process that was killed has left there is removed.

    Raises:
        UserError: Another process builds the same.
    """
    target = target.resolve()
    work = target.with_name(f".{target.name}.{doing}")
    with locked(work):
        for left in work.iterdir():
            if left.name != STAGING:
                shutil.rmtree(left) if left.is_dir() else left.unlink()
        try:
            yield work
            clear_staging(work)
            _exchange(work, target) if target.exists() else os.rename(work, target)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
    sync_folder(target.parent)
    if work.exists():  # what was there before
        shutil.rmtree(work)


def _exchange(new: Path, old: Path) -> None:
    """Two folders change places at once, where the system can; elsewhere one after the other."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    at = ctypes.c_int(-100)  # AT_FDCWD
    if call is not None and call(at, os.fsencode(new), at, os.fsencode(old), ctypes.c_uint(_EXCHANGE)) == 0:
        return
    aside = old.with_name(f".{old.name}.before")
    os.rename(old, aside)
    os.rename(new, old)
    os.rename(aside, new)

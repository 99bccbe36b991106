"""Ended episodes that are on the disk and not yet in the dataset, so that taking one back never edits the dataset.

An episode ends in ``.pending/<number>-<uid>/`` by one rename. It leaves by a commit, which copies it into the dataset
and then deletes the folder, or by a discard, which renames the folder, so that undo can rename it back; what is still
discarded when the recorder closes is deleted then. All of it survives a process that dies at any moment.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from vla_stack.data import stats as statistics
from vla_stack.data.dataset import read_parquet
from vla_stack.data.digests import write_pages
from vla_stack.data.layout import make_folder, read_json, sync_file, sync_folder, write_json
from vla_stack.data.sidecar import write_facts
from vla_stack.data.store import Episode
from vla_stack.errors import UserError

PENDING = ".pending"  # LeRobot's loader does not look there
_TABLE, _ABOUT, _DISCARDED = "episode.parquet", "episode.json", ".discarded"


class PendingEpisodes:
    """The pending episodes of a dataset. The caller holds the dataset's lock.

    Args:
        root: Dataset folder.
        staging: Folder on the same disk where unfinished files may lie.
        last_uid: Uid of the dataset's last episode: a commit that died before it had cleared up is recognised by it.
    """

    def __init__(self, root: Path, staging: Path, last_uid: int | None) -> None:
        self._root, self._folder, self._staging = root, root / PENDING, staging
        for path in self._paths():
            if _uid(path) == last_uid:
                shutil.rmtree(path)
        self.purge()

    def uids(self) -> list[int]:
        """Those that wait for a decision, oldest first."""
        return [_uid(path) for path in self._paths() if path.suffix != _DISCARDED]

    def add(self, episode: Episode) -> None:
        """Make an ended episode durable.

        Raises:
            OSError: Writing failed; nothing of it is left.
        """
        assert episode.facts is not None
        uid = episode.facts["episode_uid"]
        temporary = self._staging / f"pending-{uid}"
        try:
            temporary.mkdir()
            write_pages(episode.table, temporary / _TABLE)
            sync_file(temporary / _TABLE)
            for key, video in episode.videos.items():
                os.replace(video, temporary / f"{key}.mp4")
                sync_file(temporary / f"{key}.mp4")
            about = {"tasks": episode.tasks, "facts": episode.facts, "videos": list(episode.videos)}
            write_json(temporary / _ABOUT, about | {"stats": statistics.to_json(episode.stats)})
            make_folder(self._folder)
            number = max((int(path.name.split("-")[0]) for path in self._paths()), default=-1) + 1
            os.replace(temporary, self._folder / f"{number:08d}-{uid}")
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        sync_folder(self._folder)

    def read(self, uid: int) -> Episode:
        """A pending episode, its videos as links in the staging folder that a commit may move away."""
        path = self._find(uid)
        about = read_json(path / _ABOUT)
        videos: dict[str, Path] = {}
        for key in about["videos"]:
            videos[key] = self._staging / f"pending-{key}.mp4"
            videos[key].unlink(missing_ok=True)
            os.link(path / f"{key}.mp4", videos[key])
        stats = statistics.from_json(about["stats"])
        return Episode(read_parquet(path / _TABLE), videos, stats, tuple(about["tasks"]), about["facts"])

    def remove(self, uid: int) -> None:
        """Delete the folder of an episode that is in the dataset now; it is pending no longer, whatever is left of it.

        Raises:
            UserError: The disk does not even take its name back.
        """
        path = self._find(uid)
        with _explained(path, "deleted, though its episode is in the dataset"):
            (path / _ABOUT).unlink()  # so that what is left is no episode, not even a discarded one
            os.replace(path, gone := path.with_name(path.name + _DISCARDED))
        shutil.rmtree(gone, ignore_errors=True)

    def discard(self, uid: int, reason: str) -> None:
        """Mark for deletion; :meth:`restore` takes it back until the recorder closes.

        Raises:
            UserError: It is not pending, or the disk is full; then it is pending still.
        """
        path = self._find(uid)
        with _explained(path, "discarded"):
            _mark(path, reason)
            os.replace(path, path.with_name(path.name + _DISCARDED))
            sync_folder(self._folder)

    def restore(self, uid: int) -> None:
        """Undo a discard.

        Raises:
            UserError: It is not discarded, or the disk is full; then it is discarded still.
        """
        path = self._find(uid, discarded=True)
        with _explained(path, "restored"):
            _mark(path, "")
            os.replace(path, path.with_name(path.name.removesuffix(_DISCARDED)))
            sync_folder(self._folder)

    def purge(self) -> None:
        """Delete the discarded ones; their rows stay in the sidecar, for the accounts.

        Raises:
            UserError: The disk is full; what is left of them is deleted the next time.
        """
        for path in self._paths():
            if path.suffix != _DISCARDED:
                continue
            with _explained(path, "deleted"):
                if (path / _ABOUT).exists():
                    write_facts(self._root, [read_json(path / _ABOUT)["facts"] | {"outcome": "discarded"}])
                    (path / _ABOUT).unlink()
                shutil.rmtree(path)

    def _paths(self) -> list[Path]:
        return sorted(self._folder.iterdir()) if self._folder.exists() else []

    def _find(self, uid: int, discarded: bool = False) -> Path:
        for path in self._paths():
            if _uid(path) == uid and (path.suffix == _DISCARDED) == discarded:
                return path
        state = "discarded" if discarded else "pending"
        raise UserError(f"{self._root}: episode {uid} is not {state}", f"{state} are: {self._list(discarded)}")

    def _list(self, discarded: bool) -> str:
        return ", ".join(str(_uid(p)) for p in self._paths() if (p.suffix == _DISCARDED) == discarded) or "none"


@contextlib.contextmanager
def _explained(path: Path, what: str) -> Iterator[None]:
    """Turn a failure of the disk into a :class:`UserError`."""
    try:
        yield
    except OSError as e:
        raise UserError(f"{path} could not be {what} ({e})", "free disk space and try again") from e


def _mark(path: Path, reason: str) -> None:
    about = read_json(path / _ABOUT)
    about["facts"]["discard_reason"] = reason
    write_json(path / _ABOUT, about)


def _uid(path: Path) -> int:
    return int(path.name.removesuffix(_DISCARDED).split("-")[1])


def count_pending(root: Path) -> int:
    """Episodes that wait for a decision in a dataset that may be in use."""
    folder = root / PENDING
    return sum(path.suffix != _DISCARDED for path in folder.iterdir()) if folder.exists() else 0


def left_out(root: Path) -> str:
    """A line about pending episodes of a dataset that was copied from; empty where there are none."""
    waiting = count_pending(root)
    return f"{root}: left out {waiting} pending episodes that nobody has kept or discarded yet\n" if waiting else ""

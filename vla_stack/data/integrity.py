"""Finds what is wrong with a dataset folder, and takes it back to its last good episode.

A recording of ours that dies leaves at most files that ``meta/info.json`` does not count. A recording of LeRobot's own
writer that dies leaves parquet files without a footer and an info.json that counts too many episodes. Both end here in
the longest run of episodes 0, 1, … whose rows and pictures are all there. Removed files that belonged to a counted
episode are kept under ``.damaged/``, those of a later repair under ``.damaged.2/``. Where no episode would be left
nothing is changed: what somebody moved away can be put back. Where only the newest rows of ``meta/episodes`` are lost
they are made anew.
"""

from __future__ import annotations

import itertools
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from av.error import FFmpegError

from vla_stack.data import stats as statistics
from vla_stack.data.dataset import open_dataset, read_parquet, read_rows, read_tasks
from vla_stack.data.deep import changed_files, deep_problems
from vla_stack.data.digests import DIGESTS, drop_damaged, write_json, write_parquet
from vla_stack.data.layout import (
    EPISODES_PATH,
    INFO,
    STAGING,
    STATS,
    TASKS,
    make_folder,
    place,
    read_info,
    read_json,
    sync_folder,
)
from vla_stack.data.rebuild import rebuild_rows
from vla_stack.data.store import clear_staging, locked, write_tasks
from vla_stack.errors import UserError

DAMAGED = ".damaged"


@dataclass(frozen=True)
class RepairReport:
    """What :func:`repair` did.

    Attributes:
        episodes_before: Episodes that ``meta/info.json`` counted.
        episodes: Episodes that are left.
        frames: Frames that are left.
        actions: One sentence for each change; empty if nothing was wrong.
    """

    episodes_before: int
    episodes: int
    frames: int
    actions: tuple[str, ...] = ()


@dataclass
class _Scan:
    """What is on the disk, whatever info.json says."""

    rows: dict[int, dict[str, Any]] = field(default_factory=dict)  # of meta/episodes, statistics included
    data_rows: dict[Path, dict[int, int]] = field(default_factory=dict)  # file -> episode -> rows
    unreadable: dict[Path, str] = field(default_factory=dict)


def repair(root: str | Path) -> RepairReport:
    """Make a dataset consistent, dropping episodes from the first damaged one on.

    Args:
        root: Dataset folder.

    Raises:
        UserError: There is nothing to repair from, no episode would be left, intact episodes follow a damaged one, an
            episode whose frames are all there cannot be described anew, or it is being written to.
    """
    root = Path(root)
    if not (root / INFO).exists():
        raise UserError(f"{root / INFO} is missing", "check the folder's name; a dataset without it cannot be repaired")
    with locked(root):
        report = repair_locked(root)
    clear_staging(root)
    return report


def check(root: str | Path, deep: bool = False) -> list[str]:
    """Everything that is wrong with a dataset, one sentence each, nothing changed.

    Args:
        root: Dataset folder.
        deep: Read every byte as well, see :mod:`vla_stack.data.deep`.
    """
    root = Path(root)
    if changed := changed_files(root, videos=deep):
        return changed  # whatever else is said of them follows from that, and parsers may die of such files
    info = read_info(root)
    scan = _scan(root)
    problems = [f"{path.relative_to(root)}: {why}" for path, why in scan.unreadable.items()]
    for episode in range(info["total_episodes"]):
        problems += [f"episode {episode}: {p}" for p in _episode_problems(root, info, scan, episode)]
    beyond = sorted(e for e in scan.rows if e >= info["total_episodes"])
    if beyond:
        problems.append(f"episode {beyond[0]} was never committed")
    if (root / STAGING).exists():
        problems.append("a recording is running or died here")
    if deep:
        problems += deep_problems(root, info, scan.rows)
    elif not problems:
        try:
            open_dataset(root)
        except UserError as e:
            problems.append(str(e))
    return list(dict.fromkeys(problems))


def repair_locked(root: Path, drop: bool = True) -> RepairReport:
    """:func:`repair` for a caller that holds the dataset's lock.

    Args:
        root: Dataset folder.
        drop: Whether damaged episodes that ``meta/info.json`` counts may go; otherwise they are an error.
    """
    if not (root / INFO).exists():
        return RepairReport(0, 0, 0, tuple(_clear(root)))
    info = read_info(root)
    counted = int(info["total_episodes"])
    scan = _scan(root)
    rebuilt = _rebuilt(root, info, scan, counted)
    good = [e for e in range(counted) if not _episode_problems(root, info, scan, e)]
    keep = next((i for i, e in enumerate(good) if i != e), len(good))
    if len(good) > keep:
        first = _episode_problems(root, info, scan, keep)[0]
        raise UserError(
            f"{root}: episode {keep} is damaged ({first}) but {len(good) - keep} episodes after it are intact",
            "restore that file from a copy; nothing was changed",
        )
    if keep < counted and not (keep and drop):
        raise _refusal(root, info, scan, keep, counted)
    actions = _clear(root)
    actions += [f"took the damaged line {number} out of {DIGESTS}" for number in drop_damaged(root)]
    if rebuilt is not None:
        path = _file(root, EPISODES_PATH, rebuilt.slice(0, 1).to_pylist()[0], "meta/episodes")
        write_parquet(root, path.relative_to(root).as_posix(), rebuilt)
        actions.append(f"described {rebuilt.num_rows} episodes anew from their data, {TASKS} and videos")
    actions += _truncate(root, info, scan, keep, counted)
    actions += _fix_tasks(root, info, scan, keep)
    frames = scan.rows[keep - 1]["dataset_to_index"] if keep else 0
    actions += _fix_stats(root, scan, keep, frames)
    fixed = info | {"total_episodes": keep, "total_frames": frames, "splits": {"train": f"0:{keep}"} if keep else {}}
    if fixed != info:
        write_json(root, INFO, fixed)
        actions.append(f"{INFO} now counts {keep} episodes, {frames} frames")
    return RepairReport(counted, keep, frames, tuple(actions))


def _refusal(root: Path, info: dict[str, Any], scan: _Scan, keep: int, counted: int) -> UserError:
    """Why counted episodes are not dropped, and what to do instead."""
    why = _episode_problems(root, info, scan, keep)[0]
    if keep:
        remedy = f"put it back, or drop them with `vla data repair {root}`; nothing was changed"
        return UserError(f"{root}: of {counted} episodes {counted - keep} cannot be read ({why})", remedy)
    for key, feature in info["features"].items():
        folder = root / "videos" / key
        if feature["dtype"] == "video" and not any(folder.glob("*/*.mp4")):
            what = f"{folder} holds no video, and all {counted} episodes have theirs there"
            return UserError(what, "put it back; nothing was changed")
    remedy = "put back what is missing, from a copy, or record into another folder; nothing was changed"
    return UserError(f"{root}: none of its {counted} episodes can be read ({why})", remedy)


def _clear(root: Path) -> list[str]:
    """Delete what an episode that was never finished has left."""
    actions = []
    for path in (root / STAGING).iterdir():
        if path.name != "lock":
            actions.append(f"deleted the unfinished episode's {path.name}")
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return actions


def _scan(root: Path) -> _Scan:
    scan = _Scan()
    for path in sorted((root / "meta" / "episodes").glob("*/*.parquet")):
        try:
            for row in read_rows(path):
                scan.rows[row["episode_index"]] = row
        except UserError as e:
            scan.unreadable[path] = e.message.removeprefix(f"{path} ")
    for path in sorted((root / "data").glob("*/*.parquet")):
        try:
            counts = pc.value_counts(read_parquet(path, "episode_index".__eq__)["episode_index"].combine_chunks())
            scan.data_rows[path] = {c["values"]: c["counts"] for c in counts.to_pylist()}
        except (UserError, KeyError) as e:
            scan.unreadable[path] = str(e).removeprefix(f"{path} ")
    return scan


def _rebuilt(root: Path, info: dict[str, Any], scan: _Scan, counted: int) -> pa.Table | None:
    """Rows of the newest episodes, whose frames are there and whose rows of ``meta/episodes`` are not; in the scan too.

    Without this they would count as damaged, and their frames would be cut away.
    """
    first = next((e for e in range(counted) if e not in scan.rows), counted)
    files = {e: path for path, episodes in scan.data_rows.items() for e in episodes if first <= e < counted}
    if not files or any(first <= e < counted for e in scan.rows):
        return None
    try:
        lost = {e: files[e] for e in range(first, max(files) + 1)}
        table = rebuild_rows(root, info, lost, scan.rows.get(first - 1))
    except (KeyError, UserError) as e:
        why = e.message if isinstance(e, UserError) else f"the frames of episode {e} are missing"
        raise UserError(
            f"{root}/meta/episodes has lost the episodes from {first} on, and they cannot be described anew: {why}",
            f"restore it from a copy, or give them up: move {files[min(files)]} away; nothing was changed",
        ) from None
    scan.rows |= {row["episode_index"]: row for row in table.to_pylist()}
    return table


def _episode_problems(root: Path, info: dict[str, Any], scan: _Scan, episode: int) -> list[str]:
    """Why an episode cannot be read; empty if it can."""
    row = scan.rows.get(episode)
    if row is None:
        return ["meta/episodes has no row for it"]
    problems = []
    length = row["dataset_to_index"] - row["dataset_from_index"]
    data = _file(root, info["data_path"], row, "data")
    found = scan.data_rows.get(data, {}).get(episode, 0)
    if found != length:
        problems.append(f"{data.relative_to(root)} holds {found} of its {length} rows")
    for key, feature in info["features"].items():
        if feature["dtype"] == "video":
            path = _file(root, info["video_path"], row, f"videos/{key}", video_key=key)
            need = round(row[f"videos/{key}/from_timestamp"] * info["fps"]) + length
            frames = count_frames(path)
            if frames < need:
                problems.append(f"{path.relative_to(root)} holds {frames} frames, {need} are needed")
    return problems


def _file(root: Path, template: str, row: dict[str, Any], prefix: str, **names: str) -> Path:
    return place(root, template, row[f"{prefix}/chunk_index"], row[f"{prefix}/file_index"], **names)


def count_frames(path: Path) -> int:
    """Frames that a video's index promises, 0 if the file is missing or unreadable."""
    try:
        with av.open(str(path)) as container:
            return container.streams.video[0].frames
    except (OSError, FFmpegError, IndexError):
        return 0


def _truncate(root: Path, info: dict[str, Any], scan: _Scan, keep: int, counted: int) -> list[str]:
    """Remove every file and row that belongs to no episode below ``keep``."""
    actions = []
    numbered = (root / (f"{DAMAGED}.{n}" if n > 1 else DAMAGED) for n in itertools.count(1))
    aside = next(folder for folder in numbered if not folder.exists())
    for path, why in scan.unreadable.items():
        actions.append(f"{_set_aside(root, path, aside)}: it {why}")
    for path, counts in scan.data_rows.items():
        actions += _cut(root, path, counts, keep, counted, aside)
    for path in sorted((root / "meta" / "episodes").glob("*/*.parquet")):
        counts = dict.fromkeys(read_parquet(path, "episode_index".__eq__)["episode_index"].to_pylist(), 1)
        actions += _cut(root, path, counts, keep, counted, aside)
    rows = [scan.rows[e] for e in range(keep)]
    for key, feature in info["features"].items():
        if feature["dtype"] != "video":
            continue
        used = {_file(root, info["video_path"], row, f"videos/{key}", video_key=key) for row in rows}
        for path in sorted((root / "videos" / key).glob("*/*.mp4")):
            if path not in used:
                actions.append(f"{_set_aside(root, path, aside)}: no episode uses it")
    return actions


def _cut(root: Path, path: Path, counts: dict[int, int], keep: int, counted: int, aside: Path) -> list[str]:
    """Take the rows of episodes from ``keep`` on out of a parquet file."""
    name = path.relative_to(root)
    drop = sorted(e for e in counts if e >= keep)
    if not drop:
        return []
    table = read_parquet(path)
    kept = table.filter(pc.less(table["episode_index"], keep))
    if drop[0] < counted:
        _keep_copy(root, path, aside)
    if kept.num_rows:
        write_parquet(root, name.as_posix(), kept)
    else:
        path.unlink()
        sync_folder(path.parent)
    why = "was never committed" if drop[0] >= counted else "cannot be read"
    return [f"took episode {drop[0]} out of {name}: it {why}"]


def _keep_copy(root: Path, path: Path, aside: Path) -> None:
    target = aside / path.relative_to(root)
    make_folder(target.parent)
    os.link(path, target)


def _set_aside(root: Path, path: Path, aside: Path) -> str:
    _keep_copy(root, path, aside)
    path.unlink()
    sync_folder(path.parent)
    return f"moved {path.relative_to(root)} to {aside.name}"


def _fix_tasks(root: Path, info: dict[str, Any], scan: _Scan, keep: int) -> list[str]:
    """Rebuild ``meta/tasks.parquet`` from the episodes if it is damaged."""
    if not keep:
        return []
    try:
        tasks: tuple[str, ...] = read_tasks(root)
        actions = []
    except UserError:
        names: dict[int, str] = {}
        for path, counts in scan.data_rows.items():
            for episode in (e for e in counts if e < keep and len(scan.rows[e]["tasks"]) == 1):
                table = read_parquet(path, ("episode_index", "task_index").__contains__)
                index = table.filter(pc.equal(table["episode_index"], episode))["task_index"][0].as_py()
                names[index] = scan.rows[episode]["tasks"][0]
        if sorted(names) != list(range(len(names))):
            raise UserError(f"{root / TASKS} is damaged", "restore it from a copy") from None
        tasks = tuple(names[i] for i in range(len(names)))
        write_tasks(root, list(tasks))
        actions = [f"rebuilt {TASKS} from the episodes"]
    info["total_tasks"], before = len(tasks), info.get("total_tasks")
    if before != len(tasks):
        write_json(root, INFO, info)
    return actions


def _fix_stats(root: Path, scan: _Scan, keep: int, frames: int) -> list[str]:
    """Aggregate ``meta/stats.json`` anew if it does not describe exactly the episodes that are left."""
    try:
        counts = {k: int(np.ravel(v["count"])[0]) for k, v in read_json(root / STATS).items()}
        if counts.get("index", frames) == frames and counts:
            return []
    except (UserError, KeyError):
        pass
    parts = [_row_stats(scan.rows[e]) for e in range(keep)]
    if not parts or not all(parts):
        (root / STATS).unlink(missing_ok=True)
        return []
    write_json(root, STATS, statistics.to_json(statistics.aggregate(parts)))
    return [f"{STATS} aggregated anew over {keep} episodes"]


def _row_stats(row: dict[str, Any]) -> dict[str, statistics.Stats]:
    out: dict[str, statistics.Stats] = {}
    for name, value in row.items():
        if name.startswith("stats/"):
            _, key, stat = name.split("/")
            out.setdefault(key, {})[stat] = np.asarray(value)
    return out

"""Where a LeRobotDataset v3 keeps its files, and how a file is replaced so that no crash can leave half of it.

Every file of a dataset is written under another name, flushed to the disk, and renamed onto its place. A reader, or a
process that dies at any moment, therefore sees the old file or the new one. ``meta/info.json`` is replaced last: it
says how many episodes there are, so it is the commit record of a dataset.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from vla_stack.errors import UserError

VERSION = "v3.0"
CHUNK_SIZE = 1000  # files per folder, LeRobot's default
INFO = "meta/info.json"
STATS = "meta/stats.json"
TASKS = "meta/tasks.parquet"
ROBOT = "meta/robot.json"
DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
EPISODES_PATH = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
STAGING = ".recording"  # files of the running episode; LeRobot's loader does not look there


def sync_file(path: Path) -> None:
    """Flush a written file to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_folder(path: Path) -> None:
    """Flush a folder's entries (creations and renames) to the disk."""
    sync_file(path)


def make_folder(path: Path) -> None:
    """Create a folder and its parents, durably."""
    missing = [p for p in (path, *path.parents) if not p.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for p in missing:
        sync_folder(p.parent)


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file atomically and durably; on return it survives a power cut."""
    make_folder(path.parent)
    tmp = path.with_name(f".{path.name}.tmp")
    try:
        with tmp.open("w") as f:
            json.dump(value, f, indent=1)
            f.flush()
            os.fsync(f.fileno())
        os.replace(tmp, path)
    except BaseException:
        tmp.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        UserError: The file is missing or is not JSON.
    """
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path} is missing", "check the folder's name, or record with `vla collect`") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as e:
        raise UserError(f"{path} is not valid JSON ({e})", "restore it from a copy; it cannot be rebuilt") from None


def read_info(root: Path) -> dict[str, Any]:
    """Read and check ``meta/info.json``.

    Raises:
        UserError: The folder is not a LeRobotDataset v3.
    """
    path = root / INFO
    info = read_json(path)
    version = info.get("codebase_version", "none")
    if not version.startswith("v3."):
        raise UserError(
            f"{path} has dataset version '{version}', this reads v3",
            "convert it with `python -m lerobot.scripts.convert_dataset_v21_to_v30`",
        )
    missing = [k for k in ("features", "fps", "total_episodes", "total_frames", "data_path") if k not in info]
    if missing:
        raise UserError(f"{path} lacks {', '.join(missing)}", f"run `vla data repair {root}`")
    return info


def next_file(chunk_index: int, file_index: int, chunk_size: int = CHUNK_SIZE) -> tuple[int, int]:
    """The chunk and file index that follow the given ones."""
    return (chunk_index + 1, 0) if file_index + 1 >= chunk_size else (chunk_index, file_index + 1)

"""Where a LeRobotDataset v3 keeps its files, and how a file is replaced so that no crash can leave half of it.

Every file of a dataset is written under another name, flushed to the disk, and renamed onto its place. A reader, or a
process that dies at any moment, therefore sees the old file or the new one. ``meta/info.json`` is replaced last: it
says how many episodes there are, so it is the commit record of a dataset.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from vla_stack.errors import UserError

VERSION = "v3.0"
CHUNK_SIZE = 1000  # files per folder, LeRobot's default
INFO = "meta/info.json"
STATS = "meta/stats.json"
TASKS = "meta/tasks.parquet"
ROBOT = "meta/robot.json"
SIDECAR = "meta/rac_episodes.parquet"  # see sidecar.py
DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
EPISODES_PATH = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
SUSPECT = "do not use it before you know who made it"
# Of files: relative, folders that are no dots, and nothing but the numbers and the key to fill in.
_TEMPLATE = re.compile(
    r"(?:(?!\.{1,2}/)(?:[\w. -]|\{(?:chunk_index|file_index)(?::0?\d)?d?\}|\{video_key\})+/)*"
    r"(?:[\w. -]|\{(?:chunk_index|file_index)(?::0?\d)?d?\}|\{video_key\})+"
)
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


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file atomically and durably; on return it survives a power cut."""
    make_folder(path.parent)
    tmp = path.with_name(f".{path.name}.tmp")
    try:
        with tmp.open("wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        os.replace(tmp, path)
    except BaseException:
        tmp.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def encode_json(value: Any) -> bytes:
    """A value as it stands in a file."""
    return json.dumps(value, indent=1).encode()


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file; see :func:`replace_file`."""
    replace_file(path, encode_json(value))


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        UserError: The file is missing or is not JSON.
    """
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path} is missing", "check the folder's name, or record with `vla collect`") from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as e:
        raise UserError(f"{path} is not valid JSON ({e})", "restore it from a copy; it cannot be rebuilt") from None


def read_info(root: Path) -> dict[str, Any]:
    """Read and check ``meta/info.json``.

    Raises:
        UserError: The folder is not a LeRobotDataset v3, or the file names places outside it.
    """
    path = root / INFO
    info = read_json(path)
    if not isinstance(info, dict):
        raise UserError(f"{path} holds a {type(info).__name__}, not a dataset's description", "restore it from a copy")
    version = str(info.get("codebase_version", "none"))
    if not version.startswith("v3."):
        raise UserError(
            f"{path} has dataset version '{version}', this reads v3",
            "convert it with `python -m lerobot.scripts.convert_dataset_v21_to_v30`",
        )
    missing = [k for k in ("features", "fps", "total_episodes", "total_frames", "data_path") if k not in info]
    if missing:
        raise UserError(f"{path} lacks {', '.join(missing)}", f"run `vla data repair {root}`")
    for key in ("total_episodes", "total_frames"):
        if not isinstance(info[key], int) or info[key] < 0:
            raise UserError(f"{path}: '{key}' is {info[key]!r}, expected a whole number", "restore it from a copy")
    if not isinstance(info["fps"], int | float) or not 0 < info["fps"] < 1e5:
        raise UserError(f"{path}: 'fps' is {info['fps']!r}, expected frames per second", "restore it from a copy")
    _check_places(path, info)
    return info


def _check_places(path: Path, info: dict[str, Any]) -> None:
    """A file of a dataset may lie where it likes, but inside."""
    if not isinstance(info["features"], dict):
        raise UserError(f"{path}: 'features' is no mapping", "restore it from a copy")
    for key, feature in info["features"].items():
        if "/" in key or "\\" in key or "\0" in key or key in ("", ".", ".."):
            raise UserError(f"{path}: the feature '{key}' would be a place outside {path.parent.parent}", SUSPECT)
        shape = feature.get("shape") if isinstance(feature, dict) else None
        if not isinstance(shape, list) or not all(isinstance(n, int) and 0 < n < 1 << 20 for n in shape):
            raise UserError(f"{path}: the feature '{key}' has no shape", "restore it from a copy")
        if not isinstance(feature.get("dtype"), str):
            raise UserError(f"{path}: the feature '{key}' has no dtype", "restore it from a copy")
    for name in ("data_path", "video_path"):
        template = info.get(name)
        if template is not None and not (isinstance(template, str) and _TEMPLATE.fullmatch(template)):
            raise UserError(f"{path}: '{name}' is {template!r}, no place inside {path.parent.parent}", SUSPECT)


def place(root: Path, template: str, chunk_index: Any, file_index: Any, **names: str) -> Path:
    """The file of a dataset that a template and a row's numbers name.

    Raises:
        UserError: They are no numbers.
    """
    if not (isinstance(chunk_index, int) and isinstance(file_index, int)):
        raise UserError(f"{root}/meta/episodes numbers a file {chunk_index!r}, {file_index!r}", SUSPECT)
    return root / template.format(chunk_index=chunk_index, file_index=file_index, **names)


def next_file(chunk_index: int, file_index: int, chunk_size: int = CHUNK_SIZE) -> tuple[int, int]:
    """The chunk and file index that follow the given ones."""
    return (chunk_index + 1, 0) if file_index + 1 >= chunk_size else (chunk_index, file_index + 1)

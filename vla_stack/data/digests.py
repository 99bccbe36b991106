"""What every file of a dataset was when it became part of it, so that a later change of a single bit has a name.

``meta/digests.jsonl`` grows by a line a commit, before the files get their names: ``{"crc": ..., "files": {"data/…":
"<sha256>"}}``, the CRC-32 being that of the files' text. A file is as it was if any line has its digest, so a commit
that dies half way leaves nothing to mend. Datasets of others have no such file until ``vla data seal`` writes one.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from vla_stack.data.layout import INFO, STATS, TASKS, encode_json, make_folder, replace_file, sync_file, sync_folder
from vla_stack.errors import UserError

DIGESTS = "meta/digests.jsonl"


@dataclass
class Recorded:
    """What ``meta/digests.jsonl`` says.

    Attributes:
        files: Path in the dataset -> digests that it has had.
        damaged: Numbers of lines that are not as they were written, from 1.
    """

    files: dict[str, set[str]] = field(default_factory=dict)
    damaged: list[int] = field(default_factory=list)


def begin(root: Path) -> None:
    """Have a new dataset's files recorded from now on."""
    if not (root / DIGESTS).exists():
        replace_file(root / DIGESTS, b"")


def record(root: Path, files: Mapping[str, Path | bytes]) -> None:
    """Append the digests of files that are about to get their names; durable on return.

    Does nothing in a dataset whose files are not recorded.

    Args:
        root: Dataset folder.
        files: Path in the dataset -> the file under its present name, or its content.

    Raises:
        OSError: Writing failed; nothing was appended.
    """
    if not files or not (root / DIGESTS).exists():
        return
    line = _line({name: _sha256(content) for name, content in files.items()})
    with (root / DIGESTS).open("ab") as f:
        end = f.tell()
        try:
            f.write(line)
            f.flush()
            os.fsync(f.fileno())
        except BaseException:
            os.ftruncate(f.fileno(), end)
            raise


def read(root: Path) -> Recorded | None:
    """The digests of a dataset; None where it keeps none."""
    if not (root / DIGESTS).is_file():
        return None
    out = Recorded()
    *lines, rest = (root / DIGESTS).read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            files = json.loads(line)["files"]
            if line + b"\n" != _line(files):
                raise ValueError
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            out.damaged.append(number)
        else:
            for name, digest in files.items():
                out.files.setdefault(name, set()).add(digest)
    if rest:
        out.damaged.append(len(lines) + 1)
    return out


def changed(root: Path, recorded: Recorded, names: Iterable[str], strict: bool = False) -> dict[str, str]:
    """Which of some files are not as recorded: path in the dataset -> what is wrong with it.

    Args:
        root: Dataset folder.
        recorded: Its digests.
        names: Paths in the dataset.
        strict: Name files without a digest too. Otherwise they mean that another program, LeRobot say, has appended
            episodes; what it had to rewrite for that is not compared either.
    """
    if not strict and any(name not in recorded.files for name in _rows_of(root)):
        names = [name for name in names if name in recorded.files and name not in (INFO, STATS, TASKS)]
    out = {}
    for name in names:
        if not (root / name).is_file():
            if name in recorded.files and name != STATS:  # which `repair` may have dropped
                out[name] = "is missing"
        elif name not in recorded.files:
            out[name] = f"has no digest in {DIGESTS}"
        elif _sha256(root / name) not in recorded.files[name]:
            out[name] = "is not what was recorded: its SHA-256 differs"
    return out


def _rows_of(root: Path) -> list[str]:
    """Files that every program adds to a dataset with its episodes."""
    paths = (*(root / "data").glob("*/*.parquet"), *(root / "meta/episodes").glob("*/*.parquet"))
    return [path.relative_to(root).as_posix() for path in paths]


def seal(root: Path) -> int:
    """Record every file of a dataset as it is now, in place of what was recorded before; returns how many."""
    files = sorted(p for part in ("meta", "data", "videos") for p in (root / part).rglob("*") if p.is_file())
    names = [p.relative_to(root).as_posix() for p in files]
    kept = {n: _sha256(root / n) for n in names if n != DIGESTS and not Path(n).name.startswith(".")}
    replace_file(root / DIGESTS, _line(kept))
    return len(kept)


def drop_damaged(root: Path) -> list[int]:
    """Take lines out that are not as they were written; returns their numbers."""
    recorded = read(root)
    if recorded is None or not recorded.damaged:
        return []
    lines = (root / DIGESTS).read_bytes().split(b"\n")
    kept = [line for number, line in enumerate(lines, 1) if line and number not in recorded.damaged]
    replace_file(root / DIGESTS, b"".join(line + b"\n" for line in kept))
    return recorded.damaged


def write_json(root: Path, name: str, value: Any) -> None:
    """Replace a JSON file of a dataset, and record it."""
    data = encode_json(value)
    record(root, {name: data})
    replace_file(root / name, data)


def write_parquet(root: Path, name: str, table: pa.Table) -> None:
    """Replace a parquet file of a dataset atomically and durably, and record it."""
    path = root / name
    make_folder(path.parent)
    tmp = path.with_name(f".{path.name}.tmp")
    write_pages(table, tmp)
    sync_file(tmp)
    record(root, {name: tmp})
    os.replace(tmp, path)
    sync_folder(path.parent)


def write_pages(table: pa.Table, path: Path) -> None:
    """Write a parquet file whose pages carry checksums, which ``dataset.read_parquet`` compares."""
    pq.write_table(table, path, compression="snappy", write_page_checksum=True)


def remedy(root: Path) -> str:
    """What to do about a file that is not as recorded."""
    return (
        f"restore it from a copy, or run `vla data repair {root}`; if it was changed on purpose: vla data seal {root}"
    )


def span(episodes: list[int]) -> str:
    """Episodes of a file, as they stand behind its name."""
    if not episodes:
        return ""
    first, last = min(episodes), max(episodes)
    return f" (episode {first})" if first == last else f" (episodes {first} to {last})"


def require_unchanged(root: Path, names: Iterable[str], episodes: Mapping[str, list[int]] | None = None) -> None:
    """Raise :class:`UserError` where a file is not as recorded, or the record itself is damaged.

    Args:
        root: Dataset folder.
        names: Paths in there.
        episodes: Path -> the episodes that it holds, for the message.
    """
    recorded = read(root)
    if recorded is None:
        return
    if recorded.damaged:
        raise UserError(f"{root / DIGESTS}: line {recorded.damaged[0]} is damaged", f"run `vla data repair {root}`")
    for name, what in changed(root, recorded, names).items():
        raise UserError(f"{root / name}{span((episodes or {}).get(name, []))} {what}", remedy(root))


def _line(files: Mapping[str, str]) -> bytes:
    text = json.dumps(files, sort_keys=True, separators=(",", ":"))
    return f'{{"crc":{zlib.crc32(text.encode())},"files":{text}}}\n'.encode()


def _sha256(content: Path | bytes) -> str:
    if isinstance(content, bytes):
        return hashlib.sha256(content).hexdigest()
    with content.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()

"""A policy directory before anything of it is loaded: found by whatever name a person gave, and whole by its manifest.

    manifest.json    {"format": 1, "files": {"model.safetensors": "<sha256>", ...}}

A bit that flips on a disk or on the way must not drive a robot: whatever saves a policy here writes the manifest, and
loading refuses a directory that differs from its own. A directory of LeRobot's has none and is loaded as it is.

The policies that come with the package lie in ``SHIPPED``, so that `vla eval` and `vla run` work at once; each is a
LeRobot policy directory beside its recipe, training log and README (``native_multitask/README.md`` says how to train it
again). This file needs neither torch nor LeRobot.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vla_stack.errors import UserError

SHIPPED = Path(__file__).resolve().parent.parent / "assets" / "policies"
DEFAULT = "native_multitask"
CONFIG, WEIGHTS = "config.json", "model.safetensors"
MANIFEST, SIGNATURE = "manifest.json", "signature.json"
LOADED = (".json", ".safetensors", ".model", ".txt", ".jinja", ".onnx", ".data")  # what a loader reads; nothing runs
FILES = tuple(f"*{suffix}" for suffix in LOADED)  # of a repository: nothing that could run
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")  # of a repository: a name, or an owner and a name
STATISTICS, GRAPHS = "policy_p*processor*.safetensors", "*.onnx*"  # files of a policy whose hash says which they are
LARGEST = 1 << 20  # bytes of a JSON file that describes a policy; the largest known have some thousand


def resolve_policy(name: str | Path) -> Path:
    """Directory of a policy that a person named.

    Args:
        name: A policy directory, a checkpoint or run directory above one, or the name of a shipped policy
            (``shipped`` is the default one); or a repository of the hub, ``owner/name``, which is downloaded once.

    Returns:
        The directory that holds ``config.json``.

    Raises:
        UserError: Nothing of that name holds a policy.
    """
    try:
        return _here(name)
    except UserError:
        if "/" not in str(name) or not _of_hub(name):
            raise
    from huggingface_hub import snapshot_download  # torch comes with these, and most names need neither
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return _here(snapshot_download(str(name), allow_patterns=list(FILES)))
    except (OSError, HfHubHTTPError) as e:
        raise UserError(*not_on_hub(name, CONFIG, e)) from None


def resolve_source(name: str | Path) -> Path | str:
    """Where the weights are that a recipe starts from; those of a repository of the hub are left to who reads them.

    Returns:
        The directory; or the name as it is, where it can be a repository's and nothing of that name lies here.

    Raises:
        UserError: It can be neither.
    """
    try:
        return _here(name)
    except UserError:
        if not _of_hub(name):
            raise
        return str(name)


def _of_hub(name: str | Path) -> bool:
    return not Path(name).exists() and HUB_ID.fullmatch(str(name)) is not None


def _here(name: str | Path) -> Path:
    path = SHIPPED / DEFAULT if str(name) == "shipped" else Path(name)
    for candidate in (
        path,
        path / "pretrained_model",
        path / "last" / "pretrained_model",
        path / "checkpoints" / "last" / "pretrained_model",
        *sorted(path.glob("iteration-*/train/checkpoints/last/pretrained_model"), reverse=True),  # the newest
        SHIPPED / path,
    ):
        if (candidate / CONFIG).is_file():
            return candidate
    shipped = sorted(p.name for p in SHIPPED.glob("*") if (p / CONFIG).is_file())
    raise UserError(
        f"'{name}' holds no policy ({f'no {CONFIG}' if path.exists() else 'there is no such directory'})",
        f"give a pretrained_model directory, a run directory, or one of: shipped, {', '.join(shipped)}",
    )


def not_on_hub(source: str | Path, name: str, error: BaseException) -> tuple[str, str]:
    """Message and remedy where neither this machine nor the hub has a file of a policy."""
    message = f"'{source}' is no directory here, and {name} cannot be had from the hub ({type(error).__name__})"
    return message, "check the name and the connection, or give a local directory"


def read_json(file: Path) -> Any:
    """A JSON file of a policy directory.

    Raises:
        UserError: It is larger or nested deeper than any configuration.
        json.JSONDecodeError: It is no JSON.
    """
    if file.stat().st_size > LARGEST:
        raise UserError(f"{file} has {file.stat().st_size} bytes, a configuration at most {LARGEST}")
    try:
        return json.loads(file.read_bytes())
    except RecursionError:
        raise UserError(f"{file} is nested too deeply") from None
    except UnicodeDecodeError as e:
        raise UserError(f"{file} is no text ({e.reason})") from None


def choose_robot(names: Sequence[str], name: str | None, where: str | Path) -> int:
    """Index of the robot that a person named, of those a policy drives; none needs to be named where there is one.

    Raises:
        UserError: There are several and none is named, or there is none of that name.
    """
    if name is None and len(names) == 1:
        return 0
    if name is None:
        raise UserError(f"{where} drives several robots", f"choose one with --embodiment: {', '.join(names)}")
    if name not in names:
        raise UserError(f"{where} has no embodiment '{name}'", f"it has {', '.join(names) or 'one robot alone'}")
    return names.index(name)


def check_robot(directory: Path, name: str | None) -> None:
    """:func:`choose_robot` by what a configuration says before it is loaded; one that is damaged is its loader's."""
    try:
        names = [str(robot["name"]) for robot in read_json(directory / CONFIG).get("embodiments", ())]
    except (UserError, ValueError, TypeError, KeyError, AttributeError):
        return
    if names or name is not None:
        choose_robot(names, name, directory)


def digest(directory: Path, pattern: str) -> str:
    """Digits of one SHA-256 over the files of a pattern."""
    found = hashlib.sha256()
    for file in sorted(directory.glob(pattern)):
        with file.open("rb") as f:
            while block := f.read(1 << 22):
                found.update(block)
    return found.hexdigest()[:16]


def write_manifest(directory: Path) -> None:
    """Record the digest of every file that a loader of the directory reads."""
    text = json.dumps({"format": 1, "files": digests(directory)}, indent=1, sort_keys=True) + "\n"
    (directory / MANIFEST).write_text(text)


def digests(directory: Path) -> dict[str, str]:
    """SHA-256 of every file that a loader of the directory reads, by its path in there."""
    files = (p for p in sorted(directory.rglob("*")) if p.suffix in LOADED and p.is_file())
    names = {p.relative_to(directory).as_posix(): p for p in files}
    return {name: _sha256(path) for name, path in names.items() if name not in (MANIFEST, SIGNATURE)}


def check_manifest(directory: Path) -> dict[str, str]:
    """The digests of a directory's files, compared with its manifest if it has one.

    Returns:
        Path -> SHA-256, as :func:`digests`.

    Raises:
        UserError: A file differs from the manifest, is missing, or is not in it.
    """
    if not (directory / MANIFEST).is_file():
        return digests(directory)
    listed = _listed(directory / MANIFEST)
    if missing := [name for name in listed if not (directory / name).is_file()]:
        raise UserError(f"{directory / missing[0]} is missing, {MANIFEST} lists it", "copy the whole directory again")
    found = digests(directory)
    remedy = f"copy it again; or, if you changed it yourself: vla policy sign {directory}"
    for name, digest in found.items():
        if name not in listed:
            raise UserError(f"{directory / name} is not in {MANIFEST}, so nobody vouches for it", remedy)
        if digest != listed[name]:
            raise UserError(f"{directory / name} is not what was saved: its SHA-256 is not that of {MANIFEST}", remedy)
    return found


def _listed(manifest: Path) -> dict[str, str]:
    try:
        if manifest.stat().st_size > LARGEST:
            raise ValueError(f"it has {manifest.stat().st_size} bytes")
        tree = json.loads(manifest.read_bytes())
        if tree["format"] != 1:
            raise ValueError(f"its format is {tree['format']}, this version reads 1")
        if not all(isinstance(digest, str) for digest in tree["files"].values()):
            raise ValueError("a digest is no text")
        return dict(tree["files"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise UserError(f"{manifest} is damaged: {e}", "copy the whole directory again") from None


def _sha256(file: Path) -> str:
    with file.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()

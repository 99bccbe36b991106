"""The trained policy that comes with the package, so that `vla eval` and `vla run` work at once.

The directory is a LeRobot policy directory beside its recipe, training log and README (``native_multitask/README.md``
says how to train it again).
"""

from __future__ import annotations

import re
from pathlib import Path

from vla_stack.errors import UserError
from vla_stack.policies.manifest import LOADED

SHIPPED = Path(__file__).resolve().parent.parent / "assets" / "policies"
DEFAULT = "native_multitask"
FILES = tuple(f"*{suffix}" for suffix in LOADED)  # of a repository: nothing that could run
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")  # of a repository: a name, or an owner and a name


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

    from vla_stack.policies.weights import not_on_hub

    try:
        return _here(snapshot_download(str(name), allow_patterns=list(FILES)))
    except (OSError, HfHubHTTPError) as e:
        raise UserError(*not_on_hub(name, "config.json", e)) from None


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
        if (candidate / "config.json").is_file():
            return candidate
    shipped = sorted(p.name for p in SHIPPED.glob("*") if (p / "config.json").is_file())
    raise UserError(
        f"'{name}' holds no policy ({'no config.json' if path.exists() else 'there is no such directory'})",
        f"give a pretrained_model directory, a run directory, or one of: shipped, {', '.join(shipped)}",
    )

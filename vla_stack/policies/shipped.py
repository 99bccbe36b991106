"""The trained policy that comes with the package, so that `vla eval` and `vla run` work at once.

The directory is a LeRobot policy directory beside its recipe, training log and README (``native_multitask/README.md``
says how to train it again).
"""

from __future__ import annotations

import re
from pathlib import Path

from vla_stack.errors import UserError

SHIPPED = Path(__file__).resolve().parent.parent / "assets" / "policies"
DEFAULT = "native_multitask"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")  # of a repository: a name, or an owner and a name


def resolve_policy(name: str | Path) -> Path:
    """Directory of a policy that a person named.

    Args:
        name: A policy directory, a checkpoint or run directory above one, or the name of a shipped policy;
            ``shipped`` is the default one.

    Returns:
        The directory that holds ``config.json``.

    Raises:
        UserError: Nothing of that name holds a policy.
    """
    path = SHIPPED / DEFAULT if str(name) == "shipped" else Path(name)
    for candidate in (
        path,
        path / "pretrained_model",
        path / "last" / "pretrained_model",
        path / "checkpoints" / "last" / "pretrained_model",
        SHIPPED / path,
    ):
        if (candidate / "config.json").is_file():
            return candidate
    shipped = sorted(p.name for p in SHIPPED.glob("*") if (p / "config.json").is_file())
    raise UserError(
        f"'{name}' holds no policy ({'no config.json' if path.exists() else 'there is no such directory'})",
        f"give a pretrained_model directory, a run directory, or one of: shipped, {', '.join(shipped)}",
    )


def resolve_source(name: str | Path) -> Path | str:
    """Where the weights are that a recipe starts from: :func:`resolve_policy`, or a repository of the hub.

    Returns:
        The directory; or the name as it is, where it can be a repository's and nothing of that name lies here.

    Raises:
        UserError: It can be neither.
    """
    try:
        return resolve_policy(name)
    except UserError:
        if Path(name).exists() or not HUB_ID.fullmatch(str(name)):
            raise
        return str(name)

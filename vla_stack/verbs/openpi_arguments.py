"""What websocket protocols need to be told: which keys a robot's messages have, and the token that both ends know."""

from __future__ import annotations

import argparse
import os
import secrets
from pathlib import Path

from vla_stack.errors import UserError


def add_openpi_arguments(parser: argparse.ArgumentParser) -> None:
    """``--keys`` and ``--token``."""
    parser.add_argument(
        "--keys",
        action="append",
        default=[],
        metavar="NAME=KEY",
        help="websockets: key of a camera, of state (several with + between them) or of task in its messages; "
        "repeatable (default, openpi: observation/images/CAMERA, observation/state, prompt; vla-eval: images/CAMERA, "
        "state, task_description)",
    )
    parser.add_argument(
        "--token", type=Path, metavar="FILE", help="websockets: file with the token that both ends know"
    )


def renamed_keys(args: argparse.Namespace) -> dict[str, str]:
    """What ``--keys`` names.

    Raises:
        UserError: One of them is not NAME=KEY.
    """
    pairs = [text.partition("=") for text in args.keys]
    for text, (name, _, key) in zip(args.keys, pairs, strict=True):
        if not name or not key:
            raise UserError(f"--keys {text} is not NAME=KEY", "e.g. --keys front=observation/image")
    return {name: key for name, _, key in pairs}


def new_token(file: Path) -> str:
    """The token in ``file``; where there is none yet, a new one, for its owner's eyes.

    Raises:
        UserError: See :func:`read_token`.
    """
    try:
        with open(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as out:
            out.write(secrets.token_urlsafe(32) + "\n")
    except FileExistsError:
        pass
    except OSError as e:
        raise UserError(f"cannot write --token {file}: {e.strerror}") from None
    return read_token(file)


def read_token(file: Path) -> str:
    """The token in ``file``.

    Raises:
        UserError: It is not there, others may read it, or it is no token.
    """
    try:
        mode, token = file.stat().st_mode, file.read_text().strip()
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"cannot read --token {file}: {e}", "`vla serve` makes it; copy it here") from None
    if mode & 0o077:
        raise UserError(f"--token {file} can be read by others", f"chmod 600 {file}")
    if len(token) < 16 or not token.isascii() or not token.isprintable() or " " in token:
        raise UserError(f"--token {file} holds no token of at least 16 letters", "delete it and `vla serve` makes one")
    return token

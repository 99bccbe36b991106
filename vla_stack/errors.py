"""The one error type that reaches a person as a single line instead of a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Collection


class UserError(Exception):
    """Something that the person at the keyboard can mend.

    Args:
        message: What is wrong, naming the file, key or value.
        remedy: What to do about it, in one sentence; empty where the message says it all.
    """

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message if not remedy else f"{message} -- {remedy}")
        self.message = message
        self.remedy = remedy


def check_options(owner: str, given: Collection[str], known: Collection[str]) -> None:
    """Compare names of options; a mistyped one is told the name that is nearest to it.

    Args:
        owner: Who takes the options, for the message.
        given: Names that were given.
        known: Names that there are.

    Raises:
        UserError: One of ``given`` is not known.
    """
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            remedy = f"the nearest option is '{near[0]}'" if near else "it has none"
            raise UserError(f"{owner} has no option '{name}'", remedy)


def first_line(error: BaseException) -> str:
    """First line of an error's text, or its kind where it has none."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)

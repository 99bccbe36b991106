"""Types of command-line arguments: a value that cannot be is refused where it is typed, before anything is loaded."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path


def count(text: str) -> int:
    """A whole number from 1 on."""
    return _whole(text, 1)


def whole(text: str) -> int:
    """A whole number from 0 on."""
    return _whole(text, 0)


def port(text: str) -> int:
    """A TCP port; 0 takes any."""
    return _whole(text, 0, 65535)


def number(text: str) -> float:
    """A finite number."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is no finite number")
    return value


def positive(text: str) -> float:
    """A finite number above 0."""
    if (value := number(text)) <= 0.0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def not_negative(text: str) -> float:
    """A finite number from 0 on."""
    if (value := number(text)) < 0.0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return value


def share(text: str) -> float:
    """A number between 0 and 1, both excluded."""
    if not 0.0 < (value := number(text)) < 1.0:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


def device(text: str) -> str:
    """A torch device, as text: whether this machine has it is known once torch is loaded."""
    kind, colon, index = text.partition(":")
    if kind not in ("auto", "cpu", "cuda", "mps", "xpu") or (colon and not index.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is no device; for example cpu, cuda, cuda:1, mps, auto")
    return text


def existing(text: str) -> Path:
    """A file that is there."""
    if not (path := Path(text)).is_file():
        raise argparse.ArgumentTypeError(f"{text} is {'a folder' if path.is_dir() else 'no file'}")
    return path


def _whole(text: str, low: int, high: int | None = None) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
    if value < low or (high is not None and value > high):
        raise argparse.ArgumentTypeError(f"{value} is not {f'from {low} to {high}' if high else f'{low} or more'}")
    return value


def given(add_arguments: Callable[[argparse.ArgumentParser], None], args: argparse.Namespace, *names: str) -> list[str]:
    """Which of these options of a verb ask for something else than by default."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return [f"--{n.replace('_', '-')}" for n in names if getattr(args, n) != parser.get_default(n)]

"""Ray, on which rollouts of training, evaluation and collection may run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from vla_stack.errors import UserError

Where = Literal["local", "ray"]
ATTEMPTS = 3  # to start Ray


def connect(workers: int) -> tuple[Any, bool]:
    """Ray, and whether it was connected to here: that of ``RAY_ADDRESS``, or a new one of ``workers`` processors.

    Raises:
        UserError: Ray is not installed, or does not start.
    """
    try:
        import ray
    except ModuleNotFoundError:
        raise UserError("Ray is not installed", 'pip install "vla-stack[scale]"; or local rollouts') from None
    if ray.is_initialized():
        return ray, False
    own: dict[str, Any] = {} if os.environ.get("RAY_ADDRESS") else {"num_cpus": workers, "include_dashboard": False}
    trouble = ""
    for _ in range(ATTEMPTS):
        try:
            ray.init(log_to_driver=False, configure_logging=False, **own)
            return ray, True
        except Exception as e:  # Ray raises bare exceptions: a busy machine is too slow for its own limits at first
            trouble = str(e).splitlines()[0]
            ray.shutdown()
    raise UserError(f"Ray does not start: {trouble}", "start it with `ray start --head`, or use local rollouts")


@contextmanager
def cluster(workers: int) -> Iterator[Any]:
    """Ray as by :func:`connect`; what was started for it ends with it."""
    ray, own = connect(workers)
    try:
        yield ray
    finally:
        if own:
            ray.shutdown()

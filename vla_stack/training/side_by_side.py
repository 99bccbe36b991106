"""Several processes of one training on this machine's cores, each with its part of every batch.

One process that computes on two cores waits for the slower one in every operation; two processes wait once a step. The
others are started by the first one and end with it: they do what it does, on batches of their own, and write nothing.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from vla_stack.errors import UserError
from vla_stack.training.recipe import Recipe

OTHER = f"{__package__}.other_process"
WAIT_S = 30.0  # for the others to end by themselves


@contextmanager
def side_by_side(recipe: Recipe, run_dir: Path) -> Iterator[Recipe]:
    """While this lasts, this process is the first of ``recipe.processes``; the others carry the same recipe out.

    Yields:
        The recipe of each: its part of a batch.

    Raises:
        UserError: The batch cannot be shared evenly.
    """
    n = recipe.processes
    if n == 1 or "WORLD_SIZE" in os.environ:
        yield recipe
        return
    size = recipe.method.batch_size
    if size % n:
        raise UserError(f"method.batch_size={size} cannot be shared by processes={n}", "make it a multiple")
    own = replace(recipe, processes=1, method=replace(recipe.method, batch_size=size // n))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    address |= {"WORLD_SIZE": str(n), "LOCAL_WORLD_SIZE": str(n)}
    others = [_start(own, run_dir, address | {"RANK": str(i), "LOCAL_RANK": str(i)}) for i in range(1, n)]
    before = dict(os.environ)
    os.environ |= address | {"RANK": "0", "LOCAL_RANK": "0"}
    try:
        import vla_stack.training.build  # noqa: F401  imports, while the others do, what all need, for seconds

        if not all(other.stdout and other.stdout.readline() for other in others):
            raise UserError("another process of this training did not start", "processes=1 trains in this one alone")
        yield own
        with suppress(subprocess.TimeoutExpired):
            for other in others:
                other.wait(WAIT_S)
    except RuntimeError as e:  # of a connection that has been lost
        if any(other.poll() for other in others):
            raise UserError(f"another process of this training ended: {e}", f"vla train --resume {run_dir}") from None
        raise
    finally:
        for other in others:
            other.kill()  # whoever is left waits for this process
            other.wait()
        os.environ.clear()
        os.environ.update(before)


def _start(recipe: Recipe, run_dir: Path, environment: dict[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", OTHER, str(run_dir)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    other = subprocess.Popen(command, env=os.environ | environment, **pipes)
    assert other.stdin is not None
    with suppress(BrokenPipeError), other.stdin as stdin:  # the caller sees that it has ended
        stdin.write(recipe.to_yaml())
    return other

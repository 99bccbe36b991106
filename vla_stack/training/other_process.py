"""One of the other processes of a training, as ``side_by_side`` starts them. Its recipe comes by standard input, the
run directory is its argument; it says once that it is there, and nothing more.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import yaml

import vla_stack.training.build  # noqa: F401  now, so that nobody waits for it in the middle
from vla_stack.errors import UserError
from vla_stack.training.recipe import make


def main() -> None:
    """Carry the recipe out."""
    recipe = make(yaml.safe_load(sys.stdin), "the first process")
    print("here", flush=True)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    try:
        recipe.method.run(recipe, Path(sys.argv[1]))
    except KeyboardInterrupt:  # all have heard it, and the first one answers
        pass
    except UserError as e:
        sys.exit(f"process {os.environ['RANK']}: {e.message}")


if __name__ == "__main__":
    main()

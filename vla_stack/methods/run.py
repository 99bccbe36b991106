"""``vla train`` for recipes that name a loop of rounds, ``loop: rac``: start one, or continue it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from vla_stack.errors import UserError
from vla_stack.locks import writing
from vla_stack.registry import LOOPS
from vla_stack.training.recipe_tree import build, plain, read_tree
from vla_stack.training.train import withdrawn_on_failure, write_run_files


def run(loop: str, source: Path, overrides: Sequence[str], resume: Path | None) -> int:
    """Run a loop to its end.

    Args:
        loop: Name of a module with ``RECIPE``, a dataclass, and ``run(recipe, run_dir)``.
        source: The recipe.
        overrides: ``key=value``.
        resume: Run directory to continue.

    Raises:
        UserError: There is no such loop or key, or the run directory is in use.
    """
    module = LOOPS.get(loop)
    recipe = build(module.RECIPE, read_tree(source, overrides), str(source))
    run_dir = resume or Path(recipe.output_dir or f"outputs/rounds/{recipe.name}-{datetime.now():%Y%m%d-%H%M%S}")
    with writing(run_dir):
        return _run(module, recipe, run_dir, resume is not None)


def _run(module: Any, recipe: Any, run_dir: Path, resume: bool) -> int:
    if not resume and (run_dir / "recipe.yaml").exists():
        raise UserError(f"{run_dir} already holds a run", f"vla train --resume {run_dir}, or another output_dir=")
    try:
        with withdrawn_on_failure(run_dir) if not resume else _kept_on_refusal(run_dir / "recipe.yaml"):
            write_run_files(yaml.safe_dump(plain(dataclasses.asdict(recipe)), sort_keys=False), run_dir)
            module.main(recipe, run_dir)
    except KeyboardInterrupt:
        print(f"stopped; continue with: vla train --resume {run_dir}")
        return 130
    print(f"done: {run_dir}; its records: round-*/record.json, or metrics.jsonl")
    return 0


@contextmanager
def _kept_on_refusal(recipe: Path) -> Iterator[None]:
    """Leave a run the recipe that it had where the overrides of a resumption are refused."""
    before = recipe.read_bytes()
    try:
        yield
    except UserError:
        recipe.write_bytes(before)
        raise

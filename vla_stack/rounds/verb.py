"""``vla train`` for recipes that name a loop of rounds, ``loop: rac``: start one, or continue it."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path

import yaml

from vla_stack.errors import UserError
from vla_stack.training.recipe_tree import build, plain, read_tree
from vla_stack.training.train import withdrawn_on_failure

LOOPS = (
    "rac",
    "grape",
    "reinflow",
    "off_policy",
)  # modules of this room with RECIPE, a dataclass, and run(recipe, run_dir)


def run(loop: str, source: Path, overrides: Sequence[str], resume: Path | None) -> int:
    """Run a loop to its end.

    Args:
        loop: One of ``LOOPS``.
        source: The recipe.
        overrides: ``key=value``.
        resume: Run directory to continue.

    Raises:
        UserError: There is no such loop or key, or the run directory is in use.
    """
    if loop not in LOOPS:
        raise UserError(f"{source}: there is no loop '{loop}'", f"the loops are {', '.join(LOOPS)}")
    module = importlib.import_module(f"vla_stack.rounds.{loop}")
    recipe = build(module.RECIPE, read_tree(source, overrides), str(source))
    run_dir = resume or Path(recipe.output_dir or f"outputs/rounds/{recipe.name}-{datetime.now():%Y%m%d-%H%M%S}")
    if resume is None and (run_dir / "recipe.yaml").exists():
        raise UserError(f"{run_dir} already holds a run", f"vla train --resume {run_dir}, or another output_dir=")
    try:
        with withdrawn_on_failure(run_dir) if resume is None else nullcontext():
            run_dir.mkdir(parents=True, exist_ok=True)
            (run_dir / "recipe.yaml").write_text(yaml.safe_dump(plain(dataclasses.asdict(recipe)), sort_keys=False))
            module.run(recipe, run_dir)
    except KeyboardInterrupt:
        print(f"stopped; continue with: vla train --resume {run_dir}")
        return 130
    print(f"done: {run_dir}; its records: round-*/record.json, or metrics.jsonl")
    return 0

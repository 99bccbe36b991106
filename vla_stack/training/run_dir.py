"""Run directories: the same for every method. The resolved recipe, who ran what when, metrics, checkpoints."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from vla_stack.data.layout import replace_file
from vla_stack.errors import UserError
from vla_stack.locks import LOCK, writing
from vla_stack.training.recipe import Recipe
from vla_stack.version import __version__

RECIPE, REVISION = "recipe.yaml", "revision.txt"  # what a run is
HELD_OUT = "held_out.json"  # which episodes it was not trained on, of each dataset


def default_dir(recipe: Recipe) -> Path:
    """Where a run lies whose recipe does not say."""
    return Path(recipe.output_dir or f"outputs/train/{recipe.name}-{datetime.now():%Y%m%d-%H%M%S}")


def recipe_of(run_dir: Path) -> Path:
    """The recipe that a run keeps; raises :class:`UserError` where there is no run."""
    if not (path := run_dir / RECIPE).is_file():
        what = f"holds no {RECIPE}, it is no run directory" if run_dir.is_dir() else "is no directory"
        raise UserError(f"--resume: {run_dir} {what}", "find your runs with: ls -dt outputs/train/*")
    return path


@contextmanager
def begun(recipe: Recipe, run_dir: Path, resume: bool) -> Iterator[None]:
    """A start of a run: its files are written, and taken back where it fails before it has computed anything.

    Of the processes of one run the first alone writes.

    Raises:
        UserError: The directory holds a run that is not to be resumed, another process writes there, or the recipe
            evaluates in an environment that there is not.
    """
    check_envs(recipe)
    if int(os.environ.get("RANK", "0")):
        yield
        return
    with writing(run_dir):
        if not resume and (run_dir / RECIPE).exists():
            raise UserError(f"{run_dir} already holds a run", f"vla train --resume {run_dir}, or another output_dir=")
        with _kept_on_refusal(run_dir) if resume else _withdrawn_on_failure(run_dir):
            write_recipe(recipe, run_dir)
            now = datetime.now().astimezone().isoformat(timespec="seconds")
            with (run_dir / REVISION).open("a") as f:
                f.write(f"{now} {revision()} {' '.join(sys.argv)}\n")
            yield


def check_envs(recipe: Recipe) -> None:
    """Refuse an id that the first evaluation, perhaps hours later, would find to stand for nothing.

    Raises:
        UserError: There is no such environment; the nearest is named.
    """
    for entry in recipe.eval_envs if recipe.eval.every else ():
        from vla_stack.envs.making import check_id  # it loads gymnasium, which a run without evaluations need not

        try:
            check_id(entry.rpartition("@")[2])
        except UserError as e:
            raise UserError(f"'{'eval.envs' if recipe.eval.envs else 'task'}': {e.message}", e.remedy) from None


def write_recipe(recipe: Recipe, run_dir: Path) -> None:
    """Write the resolved recipe, as YAML, whole or not at all."""
    run_dir.mkdir(parents=True, exist_ok=True)
    tmp = run_dir / f"{RECIPE}.tmp"
    tmp.write_text(recipe.to_yaml())
    tmp.replace(run_dir / RECIPE)


@contextmanager
def _withdrawn_on_failure(run_dir: Path) -> Iterator[None]:
    """Take a new run back that fails before it has computed anything, so that the mended command can be given again.

    What was in the directory before stays, as does a run that left anything but its own description: that one can be
    resumed.
    """
    fresh = not run_dir.exists() or all(path.name == LOCK for path in run_dir.iterdir())
    try:
        yield
    except Exception:
        files = [p.relative_to(run_dir) for p in run_dir.rglob("*") if p.is_file() and p.stat().st_size]
        # TensorBoard writes a heading at once.
        if all(str(p) in (RECIPE, REVISION, HELD_OUT, LOCK) or p.parts[0] == "tb" for p in files):
            for name in (RECIPE, REVISION, HELD_OUT):
                (run_dir / name).unlink(missing_ok=True)
            if fresh:
                shutil.rmtree(run_dir, ignore_errors=True)
        raise


@contextmanager
def _kept_on_refusal(run_dir: Path) -> Iterator[None]:
    """Leave a run the recipe that it had where a resumption fails before it has computed anything.

    Later the recipe stays: what was computed by it goes on by it, after a full disk, say.
    """
    recipe, before = (run_dir / RECIPE).read_bytes(), _left(run_dir)
    try:
        yield
    except Exception:
        if _left(run_dir) == before:
            replace_file(run_dir / RECIPE, recipe)
        raise


def _left(run_dir: Path) -> dict[Path, int]:
    """Files of a run besides its own description, and when they were written: its logs are opened before a step."""
    files = (path for path in run_dir.rglob("*") if path.name not in (RECIPE, REVISION, HELD_OUT, LOCK))
    return {path: path.stat().st_mtime_ns for path in files if path.is_file()}


def revision() -> str:
    """Version of the package and, in a clone, its git revision; ``+`` marks uncommitted changes."""
    here = Path(__file__).parent

    def git(*command: str) -> str:
        return subprocess.run(["git", *command], cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        dirty = "+" if git("status", "--porcelain", "-uno") else ""
        return f"{__version__} {git('rev-parse', '--short=12', 'HEAD')}{dirty}"
    except (OSError, subprocess.CalledProcessError):
        return __version__

"""Progress for people (a bar or lines with rate and ETA) and for machines (JSONL, TensorBoard, W&B if asked)."""

from __future__ import annotations

import json
import math
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from vla_stack.errors import UserError


class Window:
    """Values of the steps since the last log record, kept on the device so that logging does not stall it."""

    def __init__(self) -> None:
        self._values: dict[str, list[Any]] = {}
        self._unchecked: list[tuple[int, str, Any]] = []

    def add(self, step: int, values: dict[str, Any]) -> None:
        """Take in values of ``step``; ``loss`` and ``grad_norm`` are the ones that must be finite."""
        for key, value in values.items():
            value = value.detach() if isinstance(value, torch.Tensor) else value
            self._values.setdefault(key, []).append(value)
            if key in ("loss", "grad_norm"):
                self._unchecked.append((step, key, value))

    def check(self) -> None:
        """Raise if a loss or gradient since the last check is not finite.

        Raises:
            UserError: Names the step and the value.
        """
        for step, key, value in self._unchecked:
            if not math.isfinite(float(value)):
                raise UserError(
                    f"{key} is {float(value)} at step {step}, nothing of it was saved",
                    "lower optimizer.lr or check the data with `vla data check`, then resume from the last checkpoint",
                )
        self._unchecked.clear()

    def means(self) -> dict[str, float]:
        """Mean of each value over the window, which starts anew."""
        values, self._values = self._values, {}
        return {key: sum(map(float, v)) / len(v) for key, v in values.items()}


class Log:
    """Writes the records of one run; used as a context manager.

    Args:
        run_dir: Run directory; ``metrics.jsonl`` and ``tb/`` are written there.
        steps: Steps of the run.
        start: Step at which the run starts or resumes; records after it are dropped, they will be written again.
        wandb: Weights & Biases project to log to as well; empty does not.
        name: Of the run, there.
        enabled: False on all ranks but one: nothing is written or shown.
    """

    def __init__(
        self, run_dir: Path, steps: int, start: int, wandb: str = "", name: str = "", enabled: bool = True
    ) -> None:
        self._begin, self._start, self._steps, self._enabled = time.monotonic(), start, steps, enabled
        self._exit = ExitStack()
        self._wandb = None
        if not enabled:
            return
        # TensorBoard takes a second to import; a robot's or a reader's process should not pay for it.
        from torch.utils.tensorboard import SummaryWriter

        path = run_dir / "metrics.jsonl"
        truncate(path, start)
        self._file = self._exit.enter_context(path.open("a"))
        self._tb = self._exit.enter_context(SummaryWriter(str(run_dir / "tb"), purge_step=start + 1, flush_secs=10))
        bar = tqdm(total=steps, initial=start, unit="step", disable=None, dynamic_ncols=True)
        self._bar = self._exit.enter_context(bar)
        if wandb:
            self._wandb = _wandb(wandb, name, run_dir)
            self._exit.callback(self._wandb.finish)

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def advance(self) -> None:
        """One optimiser step is done."""
        if self._enabled:
            self._bar.update(1)

    def record(self, step: int, values: dict[str, float]) -> None:
        """Write one record and show it."""
        if not self._enabled:
            return
        elapsed = time.monotonic() - self._begin
        self._file.write(json.dumps({"step": step, "seconds": round(elapsed, 3), **values}) + "\n")
        self._file.flush()
        for key, value in values.items():
            self._tb.add_scalar(key, value, step)
        if self._wandb is not None:
            self._wandb.log(values, step=step)
        named = ("loss", "samples_per_s", "validation/loss")
        shown = {k: f"{v:.4g}" for k, v in values.items() if k in named or k.startswith("eval/")}
        if self._bar.disable:  # not a terminal: lines instead of a bar
            left = elapsed / max(1, step - self._start) * (self._steps - step)
            text = "  ".join(f"{k} {v}" for k, v in shown.items())
            print(f"step {step}/{self._steps}  {text}  ETA {tqdm.format_interval(left)}", flush=True)
        else:
            self._bar.set_postfix(shown)


def truncate(path: Path, step: int) -> None:
    """Keep the whole records up to ``step``; a killed run may have left later ones and a torn line."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (ValueError, KeyError):
            continue
    path.write_text("".join(kept))


def _wandb(project: str, name: str, run_dir: Path) -> Any:
    try:
        import wandb
    except ModuleNotFoundError:
        raise UserError("wandb is not installed", "pip install wandb, or leave wandb= empty") from None
    return wandb.init(project=project, name=name, dir=str(run_dir), id=run_dir.name, resume="allow")

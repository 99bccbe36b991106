"""The learning curve of a run, as a picture beside its numbers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from vla_stack.statistics import success_interval


def draw_curve(run_dir: Path, success: bool, episodes: int) -> Path:
    """Draw ``learning_curve.png`` from ``metrics.jsonl``.

    Args:
        run_dir: Run directory.
        success: Success with its 95 % interval; otherwise the mean return.
        episodes: Episodes of each evaluation.
    """
    from matplotlib.figure import Figure

    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    key = "eval/success" if success else "eval/return"
    points = [(r["step"], r[key]) for r in records if key in r]
    steps, values = np.array(points).T
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(steps, values, marker="o", markersize=3, color="#0072b2", label="evaluation")
    if success:
        bounds = np.array([success_interval(round(v * episodes), episodes).interval for v in values]).T
        axes.fill_between(steps, *bounds, alpha=0.2, linewidth=0, color="#0072b2")
        axes.set_ylim(-0.02, 1.02)
        own = [(r["step"], r["train/success"]) for r in records if "train/success" in r]
        if own:
            axes.plot(*np.array(own).T, color="#e69f00", linewidth=1, label="training episodes")
    axes.set_xlabel("control steps online")
    axes.set_ylabel("success" if success else "return")
    axes.legend(frameon=False)
    axes.grid(alpha=0.2)
    path = run_dir / "learning_curve.png"
    figure.savefig(path.with_suffix(".tmp.png"), dpi=120)
    path.with_suffix(".tmp.png").replace(path)
    return path

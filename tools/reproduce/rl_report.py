"""Curves with intervals, steps to a threshold, and the plot of ``wsrl.py`` and ``expo.py``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from results import RESULTS

DRAWS = 4000
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")


class Runs:
    """The runs of one arm on one task: evaluations [seeds, k] at common steps."""

    def __init__(self, records: Sequence[dict[str, Any]]) -> None:
        self.seeds = [r["seed"] for r in records]
        self.episodes = records[0]["episodes"]
        self.steps = np.array([p["step"] for p in min((r["curve"] for r in records), key=len)])
        self.success = np.array([[p["eval/success"] for p in r["curve"][: len(self.steps)]] for r in records])

    def to_threshold(self, threshold: float) -> NDArray:
        """Control steps of each seed until success stays at or over the threshold for two evaluations; one evaluation
        beyond the end where it never does."""
        smooth = np.minimum(self.success[:, :-1], self.success[:, 1:]) >= threshold
        late = self.steps[-1] + self.steps[1] - self.steps[0]
        return np.array([self.steps[row.argmax()] if row.any() else late for row in smooth])

    def reached(self, threshold: float) -> float:
        """Share of the seeds that got there."""
        return float((self.to_threshold(threshold) <= self.steps[-1]).mean())

    def curve(self) -> dict[str, Any]:
        bounds = [interval(self.success[:, i]) for i in range(len(self.steps))]
        return {"steps": self.steps.tolist(), "mean": self.success.mean(0).tolist(), "interval": bounds,
                "by_seed": self.success.tolist(), "seeds": self.seeds}  # fmt: skip


def arms_of(records: Sequence[dict[str, Any]], task: str, names: Sequence[str]) -> dict[str, Runs]:
    """Arms of a task that have runs."""
    found = {name: [r for r in records if r["task"] == task and r["arm"] == name] for name in names}
    return {name: Runs(rows) for name, rows in found.items() if rows}


def interval(values: NDArray) -> tuple[float, float]:
    """95 % bootstrap interval of a mean over seeds."""
    rng = np.random.default_rng(0)
    means = np.asarray(values, float)[rng.integers(len(values), size=(DRAWS, len(values)))].mean(1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def ratio(ours: NDArray, theirs: NDArray) -> tuple[float, tuple[float, float]]:
    """Ratio of mean steps to the threshold, and its paired bootstrap interval over seeds. Starts count as one step."""
    a, b = (np.maximum(np.asarray(x, float), 1.0) for x in (ours, theirs))
    rng = np.random.default_rng(0)
    rows = rng.integers(len(a), size=(DRAWS, len(a)))
    low, high = np.percentile(a[rows].mean(1) / b[rows].mean(1), [2.5, 97.5])
    return float(a.mean() / b.mean()), (float(low), float(high))


def plot(name: str, title: Mapping[str, str], tasks: Mapping[str, dict[str, Runs]], about: Mapping[str, str]) -> None:
    """Write ``docs/results/<name>.svg``: a panel a task."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * len(tasks), 3.6), layout="constrained")
    panels = figure.subplots(1, len(tasks), squeeze=False)[0]
    for axes, (task, arms) in zip(panels, tasks.items(), strict=True):
        for colour, (arm, runs) in zip(COLOURS, arms.items(), strict=False):
            bounds = np.array([interval(runs.success[:, i]) for i in range(len(runs.steps))]).T
            axes.plot(runs.steps, runs.success.mean(0), color=colour, label=about[arm])
            axes.fill_between(runs.steps, *bounds, color=colour, alpha=0.15, linewidth=0)
        axes.set_title(title[task])
        axes.set_xlabel("control steps online")
        axes.set_ylim(-0.02, 1.02)
        axes.grid(alpha=0.2)
    panels[0].set_ylabel("success, mean of seeds with 95 % interval")
    panels[-1].legend(frameon=False, fontsize=8)
    figure.savefig(RESULTS / f"{name}.svg", metadata={"Date": None})

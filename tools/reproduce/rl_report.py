"""Curves with intervals, steps to a threshold, and the plot of off-policy experiments."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from results import RESULTS
from vla_stack.statistics import SEEDS, Estimate, rates_difference, rates_interval, ratio_interval

EARLY = 3  # evaluations from the first update on in which a dip is looked for: fixed beforehand, the same for all arms
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")


class Runs:
    """The runs of one arm on one task: evaluations [seeds, k] at the steps that all have."""

    def __init__(self, records: Sequence[dict[str, Any]]) -> None:
        self.seeds = [r["seed"] for r in records]
        self.episodes = int(records[0]["episodes"])
        curves = [{p["step"]: p["eval/success"] for p in r["curve"]} for r in records]
        self.steps = np.array(sorted(set.intersection(*(set(c) for c in curves))))
        self.success = np.array([[c[step] for step in self.steps] for c in curves])

    def of(self, seeds: Sequence[int]) -> Runs:
        """Those of some seeds, in that order."""
        some = copy.copy(self)
        some.seeds, some.success = list(seeds), self.success[[self.seeds.index(s) for s in seeds]]
        return some

    def early(self, after: int) -> NDArray:
        """How far each seed's first :data:`EARLY` evaluations after ``after`` steps are from its first one."""
        return self.success[:, self.steps > after][:, :EARLY].mean(1) - self.success[:, 0]

    def dip(self, after: int) -> Estimate:
        """Mean of :meth:`early`."""
        start = self.success[:, 0]
        return rates_difference(self.early(after) + start, EARLY * self.episodes, start, self.episodes)

    def at(self, column: int) -> Estimate:
        """Mean success at an evaluation."""
        return rates_interval(self.success[:, column], self.episodes)

    def minus(self, other: Runs) -> Estimate:
        """How far the mean of the curve is above that of another arm, of the same seeds."""
        ours, theirs = (r.episodes * r.success.shape[1] for r in (self, other))
        return rates_difference(self.success.mean(1), ours, other.success.mean(1), theirs)

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
        bounds = [self.at(i).interval for i in range(len(self.steps))]
        return {"steps": self.steps.tolist(), "mean": self.success.mean(0).tolist(), "interval": bounds,
                "by_seed": self.success.tolist(), "seeds": self.seeds}  # fmt: skip


def arms_of(records: Sequence[dict[str, Any]], task: str, names: Sequence[str]) -> dict[str, Runs]:
    """Arms of a task that have runs."""
    found = {name: [r for r in records if r["task"] == task and r["arm"] == name] for name in names}
    return {name: Runs(rows) for name, rows in found.items() if rows}


def ratio(ours: NDArray, theirs: NDArray) -> Estimate:
    """Ratio of mean steps to the threshold, paired by seed. Starts count as one step."""
    return ratio_interval(*(np.maximum(np.asarray(x, float), 1.0) for x in (ours, theirs)), SEEDS)


def plot(name: str, title: Mapping[str, str], tasks: Mapping[str, dict[str, Runs]], about: Mapping[str, str]) -> None:
    """Write ``docs/results/<name>.svg``: a panel a task."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * len(tasks), 3.6), layout="constrained")
    panels = figure.subplots(1, len(tasks), squeeze=False)[0]
    for axes, (task, arms) in zip(panels, tasks.items(), strict=True):
        for colour, (arm, runs) in zip(COLOURS, arms.items(), strict=False):
            bounds = np.array([runs.at(i).interval for i in range(len(runs.steps))]).T
            axes.plot(runs.steps, runs.success.mean(0), color=colour, label=about[arm])
            axes.fill_between(runs.steps, *bounds, color=colour, alpha=0.15, linewidth=0)
        axes.set_title(title[task])
        axes.set_xlabel("control steps online")
        axes.set_ylim(-0.02, 1.02)
        axes.grid(alpha=0.2)
    panels[0].set_ylabel("success, mean of seeds with 95 % interval")
    panels[-1].legend(frameon=False, fontsize=8)
    figure.savefig(RESULTS / f"{name}.svg", metadata={"Date": None})

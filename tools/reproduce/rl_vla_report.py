"""What ``rl_vla.py`` has found: starts, ends, gains, and curves against environment steps and core minutes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from results import RESULTS, Check, write
from vla_stack.statistics import rates_difference, rates_interval

ABOUT = {
    "expo": "EXPO",
    "reinflow": "ReinFlow",
    "bc": "imitation of own successes",
    "dsrl": "DSRL",
    "dsrl_na": "DSRL-NA",
    "rlpd": "RLPD",
}
COLOURS = dict(zip(ABOUT, ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00"), strict=True))
LOW, HIGH, WANTED, GAIN, APART = 0.3, 0.5, 0.8, 0.2, 0.03
CLAIM = ("expo", "reinflow")  # of which one is asked to get there


def evaluations(cell: dict[str, Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Environment steps, core minutes of practice and learning, and success, at each evaluation of a run."""
    minutes = list(accumulate(point.get("cpu_s", 0.0) / 60 for point in cell["curve"]))
    rows = [(p["env_steps"], m, p["eval"]) for p, m in zip(cell["curve"], minutes, strict=True) if "eval" in p]
    steps, spent, success = (np.array(column) for column in zip(*rows, strict=True))
    return steps, spent, success


def report(name: str, cells: Sequence[dict[str, Any]], kept: dict[str, Any]) -> None:
    """Write the result file and the plot.

    Args:
        name: Stem.
        cells: Records of runs, those that are not over without ``served``.
        kept: What the file keeps for another machine to go on from.
    """
    checks: list[Check] = []
    tasks = dict.fromkeys(cell["task"] for cell in cells)
    for task in tasks:
        for arm, about in ABOUT.items():
            runs = [cell for cell in cells if cell["task"] == task and cell["arm"] == arm]
            if runs:
                checks += of_arm(f"{task}, {about}", runs, arm in CLAIM)
    write(name, checks, kept, sorted({cell["seed"] for cell in cells}))
    plot(name, cells, list(tasks))


def of_arm(label: str, runs: list[dict[str, Any]], claim: bool) -> list[Check]:
    """What one arm of a task has come to."""
    curves = [evaluations(run) for run in runs]
    n = len(runs[0]["curve"][0]["eval_success"])
    first, last = (np.array([curve[2][i] for curve in curves]) for i in (0, -1))
    begin, end, gain = rates_interval(first, n), rates_interval(last, n), rates_difference(last, n, first, n)
    over = [run for run in runs if "served" in run]
    why = f"{len(runs)} runs, {len(over)} of them to the end"
    steps, minutes = (float(np.mean([curve[i][-1] for curve in curves])) for i in (0, 1))
    checks = [
        Check(f"{label}: start, at least", begin.value, LOW, ">=", begin, why),
        Check(f"{label}: start, at most", begin.value, HIGH, "<=", begin, why),
        Check(f"{label}: success in the end", end.value, WANTED if claim else None, ">=", end, why),
        Check(f"{label}: gain", gain.value, None, ">=", gain, why),
        Check(f"{label}: gain, lower end", max(-1.0, gain.low), GAIN if claim else None, ">=", None, why),
        Check(f"{label}: environment steps", steps),
        Check(f"{label}: core minutes of practice and learning", minutes),
    ]
    if over:
        served = np.array([np.mean(run["served"]) for run in over])
        episodes = len(over[0]["served"])
        ended = np.array([evaluations(run)[2][-1] for run in over])
        fewer, more = sorted(((served, episodes), (ended, n)), key=lambda rates: float(rates[0].mean()))
        apart = rates_difference(*more, *fewer)
        checks.append(Check(f"{label}: served, other scenes", rates_interval(served, episodes).value))
        checks.append(Check(f"{label}: served less the loop's evaluation, size", apart.value, APART, "<=", apart))
    return checks


def plot(name: str, cells: Sequence[dict[str, Any]], tasks: list[str]) -> None:
    """Write ``docs/results/<name>.svg``: success against environment steps and core minutes, a row a task."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4 * len(tasks)), layout="constrained")
    panels = figure.subplots(len(tasks), 2, squeeze=False)
    for row, task in zip(panels, tasks, strict=True):
        for arm, about in ABOUT.items():
            runs = [evaluations(c) for c in cells if c["task"] == task and c["arm"] == arm]
            for i, (steps, minutes, success) in enumerate(runs):
                for axes, x in zip(row, (steps, minutes), strict=True):
                    axes.plot(x, success, "o-", color=COLOURS[arm], linewidth=1, markersize=3, label=about * (not i))
        for axes, what in zip(row, ("environment steps", "core minutes"), strict=True):
            axes.set(xlabel=what, ylim=(-0.02, 1.02), title=task)
            axes.grid(alpha=0.2)
    panels[0][0].set_ylabel("success, each run")
    panels[-1][-1].legend(frameon=False, fontsize=8)
    figure.savefig(RESULTS / f"{name}.svg", metadata={"Date": None})

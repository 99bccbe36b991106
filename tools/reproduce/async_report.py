"""Checks, plots and tables of the latency sweep (``async_execution.py``), of the cells that there are."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from async_execution import CLAIMED, EXECUTE, EXECUTES, LATENCIES, POLICIES, SEED, TASKS, Cell, cells, file_of

from vla_stack.rollout.latency import Latency
from vla_stack.statistics import paired_interval, success_interval

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from results import RESULTS, ROOT, Check, write

NAME = "async_execution"
PAGE, BEGIN, END = ROOT / "docs" / "execution.md", "<!-- figures of async_execution -->", "<!-- end of figures -->"
Figures = Mapping[Cell, dict[str, Any]]
SHOWN = {  # (policy, mode) -> name in plots and tables
    ("plain", "sync"): "sync",
    ("plain", "naive"): "naive",
    ("plain", "ensemble"): "ensemble",
    ("plain", "rtc"): "rtc",
    ("plain", "rtc_identity"): "rtc_identity",
    ("plain", "bid"): "bid",
    ("plain", "future_state"): "future_state",
    ("prefix", "prefix"): "prefix",
    ("lambda", "prefix"): "prefix, Λ-mask",
}
COLOURS = ("#000000", "#999999", "#56b4e9", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#d55e00", "#8c1d40")


def read(out: Path) -> dict[Cell, dict[str, Any]]:
    """What has been measured."""
    return {cell: json.loads(file_of(out, cell).read_text()) for cell in cells() if file_of(out, cell).exists()}


def success_checks(figures: Figures) -> list[Check]:
    """At each claimed delay, the best asynchronous mode against ``sync`` on the dynamic task, both at their best."""
    checks = []
    for latency in CLAIMED:
        arms: dict[bool, list[tuple[Cell, list[int]]]] = {True: [], False: []}
        for cell, figure in figures.items():
            if (cell.task, cell.latency) == ("conveyor", latency) and (cell.policy, cell.mode) in SHOWN:
                arms[cell.mode == "sync"].append((cell, figure["success"]))
        if not arms[True] or not arms[False]:
            continue
        # The best of several is chosen for both, sync among its numbers of executed steps; no correction is made.
        (waiting, a), (moving, b) = (max(arms[s], key=lambda arm: sum(arm[1])) for s in (True, False))
        gain = paired_interval(a, b)
        name = f"conveyor, {latency}: {SHOWN[moving.policy, moving.mode]} ({moving.execute} steps) - "
        why = "" if gain.low > 0 else "the lower bound of the paired interval is not above 0"
        name += f"sync ({waiting.execute} steps), success, lower bound"
        checks.append(Check(name, gain.low, 1e-6, interval=gain, why=why))
    return checks


def seam_checks(figures: Figures) -> list[Check]:
    """Roughness at seams of each continuing mode over that of ``naive``, of the same policy at the same delay."""
    checks = []
    for task in TASKS:
        for latency in CLAIMED:
            for policy, mode in (("plain", "rtc"), ("prefix", "prefix"), ("lambda", "prefix")):
                pair = [figures.get(Cell(policy, m, task, latency)) for m in (mode, "naive")]
                ours, naive = (f and f["discontinuity"] for f in pair)
                if ours and naive:
                    name = f"{task}, {latency}: seams of {SHOWN[policy, mode]} / of naive"
                    why = "" if ours < naive else "the motion is rougher where chunks meet than without it"
                    checks.append(Check(name, ours / naive, 1.0, "<=", why=why))
    return checks


def scores(figures: Figures) -> dict[tuple[str, str, str, Latency], float]:
    """Frequency-averaged score: mean success over the numbers of executed steps, where all of them were run."""
    found = {}
    for cell in figures:
        group = [figures.get(Cell(cell.policy, cell.mode, cell.task, cell.latency, steps)) for steps in EXECUTES]
        if all(group):
            rates = [np.mean(f["success"]) for f in group if f]
            found[cell.policy, cell.mode, cell.task, cell.latency] = float(np.mean(rates))
    return found


def rows(figures: Figures) -> dict[str, dict[str, Any]]:
    """Summary of every cell, by its key."""
    averaged, table = scores(figures), {}
    for cell, figure in figures.items():
        wins, n = sum(figure["success"]), len(figure["success"])
        table[cell.key] = {k: v for k, v in figure.items() if k != "success"} | {
            "success": wins,
            "of": n,
            "interval_95": success_interval(wins, n).interval,
            "frequency_averaged_score": averaged.get((cell.policy, cell.mode, cell.task, cell.latency)),
        }
    return table


def markdown(figures: Figures) -> str:
    """Tables of success and seams, a row a mode, a column a delay."""
    averaged = scores(figures)
    lines = []
    for task, kind in TASKS.items():
        lines += ["", f"**{task}** ({kind}): success in per cent with its 95 % interval, seams in brackets", ""]
        lines.append("| mode | " + " | ".join(map(str, LATENCIES)) + " | FAS at 200 ms |")
        lines.append("|---" * (len(LATENCIES) + 2) + "|")
        for (policy, mode), name in SHOWN.items():
            found = [figures.get(Cell(policy, mode, task, latency)) for latency in LATENCIES]
            if not any(found):
                continue
            score = averaged.get((policy, mode, task, CLAIMED[0]))
            entries = [_entry(f) for f in found] + ["" if score is None else f"{score:.2f}"]
            lines.append(f"| {name} | " + " | ".join(entries) + " |")
    return "\n".join(lines) + "\n"


def _entry(figure: dict[str, Any] | None) -> str:
    if figure is None:
        return ""
    wins, n, seams = sum(figure["success"]), len(figure["success"]), figure["discontinuity"]
    low, high = success_interval(wins, n).interval
    return f"{100 * wins / n:.0f} [{100 * low:.0f}, {100 * high:.0f}]" + (f" ({seams:.1f})" if seams else "")


def plot(figures: Figures, path: Path) -> None:
    """Success with intervals, and seams, against delay, a line a mode."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, len(TASKS), figsize=(11, 7.5), sharex=True)
    for column, (task, kind) in enumerate(TASKS.items()):
        for colour, ((policy, mode), name) in zip(COLOURS, SHOWN.items(), strict=True):
            found = [(x.mean_s * 1000, figures.get(Cell(policy, mode, task, x))) for x in LATENCIES]
            known = [(ms, f) for ms, f in found if f]
            if not known:
                continue
            ms = np.array([m for m, _ in known]) + 2.0 * list(SHOWN).index((policy, mode)) - 8.0
            rate = np.array([np.mean(f["success"]) for _, f in known])
            low, high = np.array([success_interval(sum(f["success"]), len(f["success"])).interval for _, f in known]).T
            style: dict[str, Any] = {"marker": "o", "markersize": 4, "color": colour, "linewidth": 1.2}
            axes[0, column].errorbar(ms, rate, (rate - low, high - rate), label=name, elinewidth=0.7, **style)
            seams = [f["discontinuity"] or np.nan for _, f in known]
            axes[1, column].plot(ms, seams, **style)
        axes[0, column].set(title=f"{task} ({kind})", ylim=(0, 1.02), ylabel="success, 95 % interval")
        axes[1, column].set(xlabel="delay of the policy, ms", ylabel="roughness at seams / within chunks", yscale="log")
    axes[0, 0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def write_all(out: Path, size: dict[str, Any]) -> None:
    """``docs/results/async_execution.{json,svg}`` and the tables in docs/execution.md, between their two marks."""
    figures = read(out)
    about = {"size": size, "policies": POLICIES, "execute": EXECUTE, "executes": list(EXECUTES)}
    checks = success_checks(figures) + seam_checks(figures)
    write(NAME, checks, about | {"cells": rows(figures)}, seeds=[SEED])
    plot(figures, RESULTS / f"{NAME}.svg")
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(before + BEGIN + "\n" + markdown(figures) + "\n" + END + rest.split(END)[1])

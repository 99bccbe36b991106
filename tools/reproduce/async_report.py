"""Checks, plots and tables of the latency sweep (``async_execution.py``), of the cells that there are."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from async_execution import CLAIMED, EXECUTE, EXECUTES, LATENCIES, NAME, TASKS, Way, ways

from vla_stack.rollout.latency import JITTERS, Latency
from vla_stack.statistics import Estimate, seeds_interval

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from results import RESULTS, ROOT, Check, write

PAGE, BEGIN, END = ROOT / "docs" / "execution.md", "<!-- figures of async_execution -->", "<!-- end of figures -->"
Records = Mapping[int, dict[str, Any]]  # by training seed
Figures = Mapping[tuple[str, str], Records]  # by task and arm
SHOWN = {  # (policy, mode) -> name in plots and tables
    ("plain", "sync"): "sync",
    ("plain", "naive"): "naive",
    ("plain", "ensemble"): "ensemble",
    ("plain", "rtc"): "rtc",
    ("plain", "rtc_identity"): "rtc_identity",
    ("plain", "bid"): "bid",
    ("plain", "future_state"): "future_state",
    ("prefix", "prefix"): "prefix",
    ("prefix", "naive"): "naive, trained with prefixes",
    ("lambda", "prefix"): "prefix, Λ-mask",
    ("lambda", "naive"): "naive, trained with Λ-mask",
}
CONTINUING = (("plain", "rtc"), ("prefix", "prefix"), ("lambda", "prefix"))
PLAIN = ("plain", "naive")
TOLERATED = 0.05  # of success, that a mode may cost against the plain policy's naive execution


def gathered(records: list[dict[str, Any]]) -> dict[tuple[str, str], dict[int, dict[str, Any]]]:
    found: dict[tuple[str, str], dict[int, dict[str, Any]]] = defaultdict(dict)
    for record in records:
        found[record["task"], record["arm"]][record["seed"]] = record
    return found


def table(records: Records, seeds: list[int] | None = None) -> np.ndarray:
    """[seeds, starts] of successes."""
    return np.array([records[seed]["outcomes"] for seed in seeds or sorted(records)])


def difference(a: Records, b: Records) -> Estimate | None:
    """Success of ``a`` minus that of ``b``, on the seeds that both have."""
    seeds = sorted(set(a) & set(b))
    return seeds_interval(table(a, seeds), table(b, seeds)) if seeds else None


def seams(records: Records) -> float | None:
    """Roughness where one chunk follows another over that within chunks, the mean of the seeds."""
    known = [r["discontinuity"] for r in records.values() if r["discontinuity"]]
    return float(np.mean(known)) if known else None


def success_checks(figures: Figures) -> list[Check]:
    """At each claimed delay: asynchronous against ``sync`` where things move; what a continuing mode costs."""
    checks = []
    for latency in CLAIMED:
        modes = {mode: figures.get(("conveyor", Way(*mode, latency).arm), {}) for mode in SHOWN}
        waiting = modes.pop(("plain", "sync"))
        moving = {mode: records for mode, records in modes.items() if len(records) == len(waiting) > 0}
        if moving:
            # the best of several is chosen among those that do not wait, and no correction is made: the reason says so
            best = max(moving, key=lambda mode: table(moving[mode]).mean())
            gain = seeds_interval(table(moving[best]), table(waiting))
            why = f"{SHOWN[best]}, the best of {len(moving)}" + "; what waiting costs is not told from nothing" * (
                gain.low <= 0
            )
            name = f"conveyor, {latency}: best that does not wait minus sync, success"
            checks.append(Check(name, gain.value, None, ">=", gain, why))
            name = f"conveyor, {latency}: best that does not wait minus sync, success, lower bound"
            checks.append(Check(name, gain.low, 0.0, ">", gain, why))
    for task in TASKS:
        for latency in CLAIMED:
            plain = figures.get((task, Way(*PLAIN, latency).arm), {})
            for mode in CONTINUING:
                cost = difference(figures.get((task, Way(*mode, latency).arm), {}), plain)
                if cost:
                    why = "" if cost.value >= -TOLERATED else "what makes the motion smooth costs success here"
                    name = f"{task}, {latency}: {SHOWN[mode]} minus naive, success"
                    checks.append(Check(name, cost.value, -TOLERATED, ">=", cost, why))
    return checks


def seam_checks(figures: Figures) -> list[Check]:
    """Roughness at seams of each continuing mode over that of ``naive``, of the same policy at the same delay."""
    checks = []
    for task in TASKS:
        for latency in CLAIMED:
            for policy, mode in CONTINUING:
                pair = [figures.get((task, Way(policy, m, latency).arm), {}) for m in (mode, "naive")]
                ours, naive = map(seams, pair)
                if ours and naive:
                    name = f"{task}, {latency}: seams of {SHOWN[policy, mode]} / of naive"
                    why = "" if ours < naive else "the motion is rougher where chunks meet than without it"
                    checks.append(Check(name, ours / naive, 1.0, "<=", why=why))
    return checks


def averaged(figures: Figures, task: str, policy: str, mode: str, latency: Latency) -> float | None:
    """Frequency-averaged score: mean success over the numbers of executed steps, where all of them were run."""
    group = [figures.get((task, Way(policy, mode, latency, steps).arm), {}) for steps in EXECUTES]
    return float(np.mean([table(r).mean() for r in group])) if all(group) else None


def rows(figures: Figures) -> dict[str, dict[str, Any]]:
    """Summary of every way on every task."""
    summary = {}
    for (task, arm), records in figures.items():
        success = seeds_interval(table(records))
        summary[f"{task} {arm}"] = {
            "success": success.value,
            "interval_95": success.interval,
            "over": success.over,
            "seeds": len(records),
            "seams": seams(records),
            "idle_fraction": float(np.mean([r["idle_fraction"] for r in records.values()])),
        }
    return summary


def markdown(figures: Figures) -> str:
    """Tables of success and seams, a row a mode, a column a delay; one for each kind of jitter that was run."""
    lines = []
    for (task, kind), jitter in [(item, j) for item in TASKS.items() for j in JITTERS]:
        latencies = [Latency(x.mean_s, jitter) for x in LATENCIES]
        ran = {mode: [figures.get((task, Way(*mode, x).arm), {}) for x in latencies] for mode in SHOWN}
        if not any(map(any, ran.values())):
            continue
        late = {"none": "constant", "gamma": "gamma distributed", "spikes": "with spikes of a second"}[jitter]
        seeds = {len(records) for found in ran.values() for records in found if records}
        trained = f"{' to '.join(map(str, sorted({min(seeds), max(seeds)})))} training seed{'s' * (max(seeds) > 1)}"
        shown = "success in per cent with its 95 % interval, seams in brackets"
        lines += ["", f"**{task}** ({kind}), delay {late}, {trained}: {shown}"]
        score = f"FAS at {CLAIMED[0]}"
        lines += ["", "| mode | " + " | ".join(f"{round(x.mean_s * 1000)} ms" for x in latencies) + f" | {score} |"]
        lines.append("|---" * (len(latencies) + 2) + "|")
        for mode, found in ran.items():
            if any(found):
                mean = averaged(figures, task, *mode, Latency(CLAIMED[0].mean_s, jitter))
                entries = [_entry(f) for f in found] + ["" if mean is None else f"{mean:.2f}"]
                lines.append(f"| {SHOWN[mode]} | " + " | ".join(entries) + " |")
    return "\n".join(lines) + "\n"


def _entry(records: Records) -> str:
    if not records:
        return ""
    success, rough = seeds_interval(table(records)), seams(records)
    low, high = success.interval
    return f"{100 * success.value:.0f} [{100 * low:.0f}, {100 * high:.0f}]" + (f" ({rough:.1f})" if rough else "")


def plot(figures: Figures, path: Path) -> None:
    """Success with intervals, and seams, against delay, a line a mode."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, len(TASKS), figsize=(11, 7.5), sharex=True)
    colours = plt.get_cmap("tab20").colors  # type: ignore[attr-defined]  # of a listed colour map
    for column, (task, kind) in enumerate(TASKS.items()):
        for number, (mode, name) in enumerate(SHOWN.items()):
            known = [(x.mean_s * 1000, figures.get((task, Way(*mode, x).arm), {})) for x in LATENCIES]
            known = [(ms, records) for ms, records in known if records]
            if not known:
                continue
            ms = np.array([m for m, _ in known]) + 2.0 * number - 8.0
            found = [seeds_interval(table(records)) for _, records in known]
            rate, low, high = np.array([(f.value, *f.interval) for f in found]).T
            style: dict[str, Any] = {"marker": "o", "markersize": 4, "color": colours[number], "linewidth": 1.2}
            axes[0, column].errorbar(ms, rate, (rate - low, high - rate), label=name, elinewidth=0.7, **style)
            axes[1, column].plot(ms, [seams(records) or np.nan for _, records in known], **style)
        axes[0, column].set(title=f"{task} ({kind})", ylim=(0, 1.02), ylabel="success, 95 % interval")
        axes[1, column].set(xlabel="delay of the policy, ms", ylabel="roughness at seams / within chunks", yscale="log")
    axes[0, 0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def write_all(records: list[dict[str, Any]], cells: dict[str, Any]) -> None:
    """``docs/results/async_execution.{json,svg}`` and the tables in docs/execution.md, between their two marks."""
    figures = {key: found for key, found in gathered(records).items() if key[1] in ways()}
    checks = success_checks(figures) + seam_checks(figures)
    about = {"execute": EXECUTE, "executes": list(EXECUTES), "figures": rows(figures)}
    write(NAME, checks, cells | about, seeds=sorted({r["seed"] for r in records}))
    plot(figures, RESULTS / f"{NAME}.svg")
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(before + BEGIN + "\n" + markdown(figures) + "\n" + END + rest.split(END)[1])

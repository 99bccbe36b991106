"""Figures, checks and plot of ``grape.py`` from the records of its runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from results import RESULTS, Check, write
from vla_stack.statistics import SEEDS, Estimate, mean_interval, ratio_interval, seeds_interval

Runs = dict[int, list[dict[str, Any]]]  # seed -> iterations
ORDER = ("base", "filtered", "random", "grape-success", "grape-safety", "grape-efficiency", "tpo-success", "tpo-safety",
         "tpo-efficiency", "shuffled")  # fmt: skip
# What is measured of an evaluation's episodes: success, whether the wall was touched, ticks; arrays [seeds, starts].
Metric = Callable[[dict[str, np.ndarray]], float]
METRICS: dict[str, Metric] = {
    "success": lambda e: float(e["success"].mean()),
    "collisions": lambda e: float(e["collided"].mean()),
    "steps": lambda e: float(e["steps"].mean()),
    "steps_of_successes": lambda e: float(e["steps"][e["success"] > 0].mean()) if e["success"].any() else float("nan"),
}
TABLES = {"success": "success", "collisions": "collided", "steps": "steps"}  # metrics that are means of all episodes
OWN = {"success": ("success", 1), "safety": ("collisions", -1), "efficiency": ("steps_of_successes", -1)}
KNOWING = "the generalist knows better than the demonstrations that it is trained on; there is room above it still"
# From poses and from pictures: success above continued imitation, and collisions less those of SFT, relative.
AHEAD, SAFER = {False: 0.0, True: 0.15}, {False: -0.3, True: -0.5}


def line(name: str, seed: int, record: dict[str, Any]) -> str:
    """A finished cell in a line."""
    rates = f"success {record['success_rate']:.0%} collisions {record['collision_rate']:.0%}"
    return f"{name:<17} seed {seed}: {rates} steps {record['mean_steps']:.1f} pairs {record['pairs']}"


def report(name: str, records: dict[str, Runs], settings: dict[str, Any]) -> None:
    """Write ``docs/results/<name>.json``, with the settings of its runs, and its plot."""
    arms = {arm: records[arm] for arm in ORDER if arm in records}
    if "base" not in arms:
        print("nothing is done yet")
        return
    iterations = max(len(run) for runs in arms.values() for run in runs.values())
    done = {
        arm: {s: run for s, run in runs.items() if arm == "base" or len(run) == iterations}
        for arm, runs in arms.items()
    }
    done = {arm: runs for arm, runs in done.items() if runs}
    table = {arm: row(runs) for arm, runs in done.items()}
    for arm, r in table.items():
        cells = (f"{m} {r[m]:.3g} [{r[f'{m}_interval'][0]:.3g}, {r[f'{m}_interval'][1]:.3g}]" for m in METRICS)
        print(f"{arm:<17}", *cells)
    seeds = sorted({seed for runs in done.values() for seed in runs})
    said = {"settings": settings, "arms": table, "iterations": iterations - 1}
    write(name, checks(done, table, settings.get("images", False)), said, seeds)
    plot(name, table)


def episodes(runs: Runs, seeds: list[int]) -> dict[str, np.ndarray]:
    """Last iteration's episodes, [seeds, starts]."""
    return {key: np.array([runs[s][-1][key] for s in seeds], float) for key in ("success", "collided", "steps")}


def row(runs: Runs) -> dict[str, Any]:
    """An arm's figures over its seeds, with intervals, and what each seed and iteration came to."""
    out: dict[str, Any] = {"seeds": sorted(runs)}
    for key, metric in METRICS.items():
        e = estimate(runs, key)
        out |= {key: e.value, f"{key}_interval": e.interval, f"{key}_by_seed": by_seed(runs, metric)}
    out["iterations"] = [
        {
            k: float(np.mean([run[i][k] for run in runs.values()]))
            for k in ("success_rate", "collision_rate", "mean_steps")
        }
        for i in range(min(map(len, runs.values())))
    ]
    return out


def by_seed(runs: Runs, metric: Metric) -> list[float]:
    """The metric of each seed."""
    return [metric(episodes(runs, [s])) for s in sorted(runs)]


def estimate(runs: Runs, key: str, minus: Runs | None = None) -> Estimate:
    """A metric, or by how much it is above that of another arm of the same seeds."""
    both = [runs] if minus is None else [runs, minus]
    if column := TABLES.get(key):
        return seeds_interval(*(episodes(r, sorted(r))[column] for r in both))
    values = [np.array(by_seed(r, METRICS[key])) for r in both]
    return mean_interval(values[0] - values[1] if minus else values[0], SEEDS)


def compare(a: Runs, b: Runs, key: str, relative: bool = False) -> Estimate:
    """Metric of arm a minus that of arm b over their common seeds, as a share of b's where ``relative``."""
    a, b = ({s: runs[s] for s in set(a) & set(b)} for runs in (a, b))
    if not relative:
        return estimate(a, key, b)
    ours, theirs = (np.array(by_seed(runs, METRICS[key])) for runs in (a, b))
    e = ratio_interval(ours, np.maximum(theirs, 1e-9), SEEDS)
    return Estimate(e.value - 1, e.low - 1, e.high - 1, e.over, e.n)


def checks(done: dict[str, Runs], table: dict[str, Any], images: bool) -> list[Check]:
    """The claims of the specification's section 7, where their arms are there."""
    base = table["base"]
    out = [
        Check("SFT: success, at least", base["success"], 0.4, ">=", base["success_interval"]),
        Check("SFT: success, at most", base["success"], 0.6, "<=", base["success_interval"], KNOWING * images),
        Check("SFT: episodes that touch the wall", base["collisions"], 0.3, ">=", base["collisions_interval"]),
    ]

    def claim(title: str, a: str, b: str, key: str, bound: float, sense: str, relative: bool = False) -> None:
        if a in done and b in done and set(done[a]) & set(done[b]):
            e = compare(done[a], done[b], key, relative)
            check = Check(title, e.value, bound, sense, e)
            check.why = "" if check.holds else "measured so; see the arms' figures"
            out.append(check)

    claim("success: GRAPE minus SFT", "grape-success", "base", "success", 0.1, ">=")
    claim("safety: collisions against SFT, relative", "grape-safety", "base", "collisions", SAFER[images], "<=", True)
    claim("safety: success minus SFT", "grape-safety", "base", "success", -0.02, ">=")
    claim("efficiency: steps of successes against SFT, relative", "grape-efficiency", "base", "steps_of_successes",
          -0.1, "<=", True)  # fmt: skip
    claim("efficiency: steps against SFT, relative", "grape-efficiency", "base", "steps", -0.1, "<=", True)
    claim("efficiency: success minus SFT", "grape-efficiency", "base", "success", -0.02, ">=")
    for objective, (key, sign) in OWN.items():
        arm = f"grape-{objective}"
        for other in ("filtered", "random", f"tpo-{objective}", "shuffled"):
            if arm not in done or other not in done or not set(done[arm]) & set(done[other]):
                continue
            e = compare(done[arm], done[other], key)
            end = e.low if sign > 0 else e.high
            title = f"{objective}: GRAPE minus {other}, {key.replace('_', ' ')}"
            bound = AHEAD[images] if (objective, other) == ("success", "filtered") else 0.0
            out.append(Check(title, e.value, bound, ">=" if sign > 0 else "<=", e))
            out[-1].why = "" if out[-1].holds else "the other arm does better on what GRAPE was to improve"
            if other == "filtered":
                held = end > 0 if sign > 0 else end < 0
                why = "" if held else "the interval over seeds holds 0"
                out.append(Check(f"{title}: near end", end, 0.0, ">=" if sign > 0 else "<=", None, why))
    if "shuffled" in done:
        claim("shuffled labels minus SFT, success (must not help)", "shuffled", "base", "success", 0.05, "<=")
    return out


def plot(name: str, table: dict[str, Any]) -> None:
    """Every arm's success, collisions and steps with intervals; dots are seeds."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 3, figsize=(14, 0.4 * len(table) + 1.4), sharey=True, layout="constrained")
    for panel, key in zip(panels, ("success", "collisions", "steps_of_successes"), strict=True):
        for y, row_ in enumerate(table.values()):
            low, high = row_[f"{key}_interval"]
            panel.plot([low, high], [y, y], linewidth=4, alpha=0.35, color=f"C{y % 10}")
            panel.plot(row_[key], y, "o", color=f"C{y % 10}")
            panel.plot(row_[f"{key}_by_seed"], [y] * len(row_["seeds"]), ".", color="0.4", markersize=4)
        panel.axvline(table["base"][key], color="0.6", linewidth=0.8, linestyle=":")
        panel.set_xlabel(key.replace("_", " "))
        panel.grid(axis="x", alpha=0.2)
    panels[0].set_yticks(range(len(table)), list(table))
    panels[0].invert_yaxis()
    figure.savefig(RESULTS / f"{name}.svg")
    plt.close(figure)

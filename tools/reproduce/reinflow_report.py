"""Figures, checks and plot of ``reinflow.py`` from its cells."""

from __future__ import annotations

from typing import Any

import numpy as np

from results import RESULTS, Check, write
from vla_stack.statistics import seeds_interval

GAIN, START = 0.20, (0.30, 0.60)
ABOUT = {
    "k4": "ReinFlow, 4 steps",
    "k1": "ReinFlow, 1 step",
    "fixed4": "noise of one size, 4 steps",
    "bc4": "imitation of own successes, 4 steps",
}
Runs = dict[int, list[dict[str, Any]]]  # seed -> evaluations, from the start policy to the last


def report(name: str, cells: list[dict[str, Any]], kept: dict[str, Any]) -> None:
    """Write ``docs/results/<name>.json`` and its plot."""
    runs: dict[tuple[str, str], Runs] = {}
    for c in cells:
        runs.setdefault((c["task"], c["arm"]), {})[c["seed"]] = [x for x in c["curve"] if "eval" in x]
    write(name, checks(runs), {"about": ABOUT, **kept}, sorted({c["seed"] for c in cells}))
    plot(name, runs)


def short(cell: dict[str, Any]) -> dict[str, Any]:
    """What a result file keeps of a cell; the outcomes of an evaluation's episodes are a word of 0 and 1."""
    keys = ("step", "env_steps", "eval", "eval_success", "rollout", "kl", "sigma")
    curve = [{k: _short(x[k]) for k in keys if k in x} for x in cell["curve"]]
    return {k: cell[k] for k in ("task", "arm", "seed", "cpu_s")} | {"curve": curve}


def _short(value: Any) -> Any:
    if isinstance(value, list):
        return "".join(str(int(won)) for won in value)
    return round(value, 4) if isinstance(value, float) else value


def outcomes(runs: Runs, at: int) -> np.ndarray:
    """Success of every evaluation episode, int [seeds, episodes]; ``at`` 0 is the start policy, -1 the last."""
    return np.array([[int(won) for won in runs[seed][at]["eval_success"]] for seed in sorted(runs)])


def checks(runs: dict[tuple[str, str], Runs]) -> list[Check]:
    """The claim at 4 and at 1 steps, the start it is made from, and the baselines."""
    out = []
    for (task, arm), of in runs.items():
        first, last = outcomes(of, 0), outcomes(of, -1)
        about, begin, end = f"{task}, {ABOUT[arm]}", float(first.mean()), float(last.mean())
        if arm in ("k4", "k1"):
            why = "" if START[0] <= begin <= START[1] else "outside the 30-60 % that the claim is made from"
            out.append(Check(f"{about}: start, at least", begin, START[0], ">=", seeds_interval(first), why))
            out.append(Check(f"{about}: start, at most", begin, START[1], "<=", seeds_interval(first), why))
        out.append(Check(f"{about}: success in the end", end, None, ">=", seeds_interval(last)))
        why = "" if end - begin >= GAIN else f"{begin:.0%} to {end:.0%} within the budget"
        bound = GAIN if arm in ("k4", "k1") else None
        out.append(Check(f"{about}: gain", end - begin, bound, ">=", seeds_interval(last, first), why))
    for task in dict.fromkeys(task for task, _ in runs):
        for arm in ("fixed4", "bc4"):
            ours, other = runs.get((task, "k4"), {}), runs.get((task, arm), {})
            if seeds := sorted(set(ours) & set(other)):
                apart = seeds_interval(*(outcomes({s: side[s] for s in seeds}, -1) for side in (ours, other)))
                why = "the baseline does better" if apart.high < 0 else "not told apart"
                name = f"{task}: ReinFlow minus {ABOUT[arm]}"
                out.append(Check(name, apart.value, interval=apart))
                out.append(Check(f"{name}: lower end", apart.low, 0.0, ">", apart, f"{why} at this budget"))
    return out


def plot(name: str, runs: dict[tuple[str, str], Runs]) -> None:
    """Success of the deployed policy against environment steps, mean of the seeds and its interval."""
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(task for task, _ in runs))
    figure = Figure(figsize=(5.5 * max(1, len(tasks)), 3.8), layout="constrained")
    for i, task in enumerate(tasks):
        axes = figure.add_subplot(1, len(tasks), i + 1)
        for (of_task, arm), of in runs.items():
            if of_task != task:
                continue
            points = range(min(len(rows) for rows in of.values()))
            x = [np.mean([rows[k]["env_steps"] for rows in of.values()]) for k in points]
            (line,) = axes.plot(x, [outcomes(of, k).mean() for k in points], "o-", label=ABOUT[arm])
            low, high = zip(*(seeds_interval(outcomes(of, k)).interval for k in points), strict=True)
            axes.fill_between(x, low, high, alpha=0.12, color=line.get_color())
        axes.set(title=task, xlabel="environment steps", ylabel="success, without noise", ylim=(0, 1))
        axes.legend(fontsize=7, loc="lower right")
    figure.savefig(RESULTS / f"{name}.svg", metadata={"Date": None})

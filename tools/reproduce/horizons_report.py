"""Statistics, checks and plot of ``mixture_of_horizons.py``, from the cells that are there."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from math import comb
from typing import Any

import numpy as np
from horizons_arms import CLIP, EMA, EULER_STEPS, LR, NOISE, START_SEED, VALIDATION_SEED, Settings, arms
from numpy.typing import NDArray

from results import RESULTS, Check, write
from vla_stack.statistics import seeds_interval

RESAMPLES = 10_000
NULL = "the interval includes zero: at this scale the difference is not told from none"
BELOW = "the whole interval is below zero: the claim's opposite is what is seen"
DRAWS = "the same compute as further (noise, time) draws an observation helps more than further horizons, in {} steps"

Cells = list[dict[str, Any]]


def report(name: str, settings: Settings, seeds: Sequence[int], cells: Cells) -> None:
    """Write ``docs/results/<name>.json`` and its plot."""
    validation = [c for c in cells if c["seed"] == VALIDATION_SEED]
    cells = [c for c in cells if c["seed"] != VALIDATION_SEED]
    known = {key: of_arm(cells, key, settings.execute) for key in arms(settings)}
    table = {key: summary(settings, key, group) for key, group in known.items() if group}
    pairs = {key: difference(known["full"], group) for key, group in known.items() if key != "full"}
    pairs = {key: value for key, value in pairs.items() if value}
    sweep = [executed(group) for group in by_execution(settings, cells).values()]
    checks = [
        *size_checks(settings, known),
        *level_checks(settings, known[settings.baseline]),
        *claim_checks(settings, pairs),
        *consensus_checks(cells),
        *cost_checks(),
    ]
    data = {
        "settings": dataclasses.asdict(settings),
        "training": {"lr": LR, "clip_norm": CLIP, "ema": EMA, "euler_steps": EULER_STEPS, "demo_noise": NOISE},
        "start_seed": START_SEED,
        "arms": table,
        "full minus": pairs,
        "executed steps": sweep,
        "validation": {c["arm"]: {k: np.mean(t["success"]) for k, t in c["tasks"].items()} for c in validation},
        "cells": [compact(c) for c in cells],
    }
    write(name, checks, data, seeds=sorted({c["seed"] for c in cells}))
    if table:
        plot(name, settings, table, pairs, sweep)


# --- Statistics -------------------------------------------------------------------------------------------------------


def of_arm(cells: Cells, arm: str, execute: int) -> Cells:
    """An arm's cells with a fixed number of executed steps, by seed."""
    return sorted((c for c in cells if c["arm"] == arm and c["execute"] == execute), key=lambda c: c["seed"])


def outcomes(cell: dict[str, Any]) -> NDArray[np.float64]:
    """Success at each start, all tasks end to end, float [N]."""
    return np.concatenate([np.array(t["success"], np.float64) for t in cell["tasks"].values()])


def mcnemar(wins: int, losses: int) -> float:
    """Two-sided exact McNemar test: p-value of ``wins`` against ``losses`` among discordant pairs."""
    n, k = wins + losses, min(wins, losses)
    return min(1.0, 2 * sum(comb(n, i) for i in range(k + 1)) / 2**n)


def difference(ours: Cells, theirs: Cells) -> dict[str, Any] | None:
    """Success of ``ours`` minus that of ``theirs`` on shared seeds and starts; None where no seed is shared."""
    a, b = ({c["seed"]: outcomes(c) for c in group} for group in (ours, theirs))
    if not (shared := sorted(a.keys() & b.keys())):
        return None
    first, second = (np.stack([side[s] for s in shared]) for side in (a, b))
    delta, estimate = first - second, seeds_interval(first, second)
    wins, losses = int((delta > 0).sum()), int((delta < 0).sum())
    return {
        "mean": float(delta.mean()),
        "interval": estimate.interval,
        "over": estimate.over,
        "by_seed": delta.mean(1).tolist(),
        "seeds": shared,
        "starts": delta.shape[1],
        "wins": wins,
        "losses": losses,
        "mcnemar_p": mcnemar(wins, losses),
    }


def summary(settings: Settings, key: str, group: Cells) -> dict[str, Any]:
    """An arm's figures."""
    arm, success = arms(settings)[key], np.stack([outcomes(c) for c in group])
    episodes = [t for c in group for t in c["tasks"].values()]
    return {
        "letter": arm.letter,
        "about": arm.about,
        "seeds": [c["seed"] for c in group],
        "success": float(success.mean()),
        "interval": seeds_interval(success).interval,
        "by_seed": success.mean(1).tolist(),
        "by_task": {task: float(np.mean([c["tasks"][task]["success"] for c in group])) for task in group[0]["tasks"]},
        "held_out_l1": np.mean([c["l1"] for c in group], axis=0).tolist(),
        "calls_per_episode": float(np.mean(np.concatenate([t["chunks"] for t in episodes]))),
        "boundary": float(np.mean([t["boundary"] for t in episodes])),
        "train_cpu_s": [c["train"]["cpu_s"] for c in group],
        "policy_ms_per_chunk": [1e3 * c["policy_cpu_s"] / c["policy_calls"] for c in group],
        "parameters": group[0]["parameters"],
        "clip_norm": CLIP * arm.clip,
        "grad_norm": float(np.mean([c["train"]["log"][-1]["grad_norm"] for c in group])),
        "gate": {
            k: float(np.mean([c["train"]["log"][-1][k] for c in group]))
            for k in group[0]["train"]["log"][-1]
            if k.startswith(("gate_", "usage_")) and key in ("full", "unbalanced")
        },
    }


def by_execution(settings: Settings, cells: Cells) -> dict[tuple[Any, ...], Cells]:
    """Cells grouped by arm and way of executing chunks."""
    groups: dict[tuple[Any, ...], Cells] = {}
    for c in cells:
        if c["arm"] in ("full", f"plain-{settings.horizons[-1]}"):
            groups.setdefault((c["arm"], c["execute"], c["ratio"], c["shuffled"]), []).append(c)
    return groups


def executed(group: Cells) -> dict[str, Any]:
    """Success against steps executed per chunk, over the seeds of one way of executing."""
    success = np.stack([outcomes(c) for c in group])
    steps, chunks = (sum(sum(t[k]) for c in group for t in c["tasks"].values()) for k in ("steps", "chunks"))
    first = group[0]
    return {
        "arm": first["arm"],
        "execute": first["execute"],
        "ratio": first["ratio"],
        "shuffled": first["shuffled"],
        "seeds": sorted(c["seed"] for c in group),
        "steps_per_chunk": steps / chunks,
        "success": float(success.mean()),
        "interval": seeds_interval(success).interval,
    }


def compact(cell: dict[str, Any]) -> dict[str, Any]:
    """A cell for the result file: outcomes as one digit a start."""
    tasks = {k: "".join(map(str, t["success"])) for k, t in cell["tasks"].items()}
    return {k: cell[k] for k in ("seed", "arm", "execute", "ratio", "shuffled")} | {"success": tasks}


# --- Checks -----------------------------------------------------------------------------------------------------------


def controlled(settings: Settings) -> tuple[str, ...]:
    """Arms that the claim is about: best single length and, without images, compute-matched and reweighted."""
    return (settings.baseline,) if settings.images else (settings.baseline, "draws", "reweighted")


def size_checks(settings: Settings, known: dict[str, Cells]) -> list[Check]:
    """Whether the experiment is as large as it was meant to be, in the arms that the claim compares."""
    done = min(len(known[k]) for k in (*controlled(settings), "full"))
    short = f"the time for this run ended after {done} seeds"
    return [
        Check("tasks", len(settings.tasks), 3, why="a smaller run"),
        Check("training seeds of all arms that the claim compares", done, 5, why=short),
        Check("paired starts a seed", settings.starts * len(settings.tasks), 500, why="a smaller run"),
    ]


def level_checks(settings: Settings, plain: Cells) -> list[Check]:
    """Whether the baseline leaves room in both directions."""
    checks = []
    for task in settings.tasks if plain else ():
        rate = float(np.mean([c["tasks"][task]["success"] for c in plain]))
        why = "harder than meant at this budget of training; it still has room in both directions"
        checks.append(Check(f"{task}: success of plain", rate, 0.4, why=why))
    return checks


def claim_checks(settings: Settings, pairs: dict[str, Any]) -> list[Check]:
    """The claim: the mixture's advantage over each control, by the lower end of its interval."""
    table, checks = arms(settings), []
    controls = (*controlled(settings), "longest")
    for key in controls:
        if key in pairs:
            low, high = pairs[key]["interval"]
            title = f"mixture minus '{table[key].about}' ({table[key].letter}): lower end"
            below = DRAWS.format(settings.steps) if key == "draws" else BELOW
            checks.append(
                Check(title, low, 0.0, interval=(low, high), why=below if high < 0 else NULL, over=pairs[key]["over"])
            )
    for key in [k for k in pairs if k not in controls]:
        title = f"mixture minus '{table[key].about}' ({table[key].letter}), seeds: {len(pairs[key]['seeds'])}"
        checks.append(Check(title, pairs[key]["mean"], interval=tuple(pairs[key]["interval"]), over=pairs[key]["over"]))
    return checks


def consensus_checks(cells: Cells) -> list[Check]:
    """Whether it matters *when* few steps are executed: consensus against as many steps at random moments."""
    by_ratio: dict[tuple[float, bool], Cells] = {}
    for c in cells:
        if c["ratio"]:
            by_ratio.setdefault((c["ratio"], c["shuffled"]), []).append(c)
    checks = []
    for (ratio, shuffled), group in sorted(by_ratio.items()):
        if shuffled and (found := difference(by_ratio.get((ratio, False), []), group)):
            title = f"consensus at ratio {ratio:g} minus as many steps at random moments: lower end"
            low, high = found["interval"]
            checks.append(Check(title, low, 0.0, ">", (low, high), BELOW if high < 0 else NULL, found["over"]))
    return checks


def cost_checks() -> list[Check]:
    """Milliseconds of one chunk, measured by ``tools/bench/horizons.py`` at H = 30 and ten Euler steps."""
    path = RESULTS / "horizons_layout.json"
    rows = json.loads(path.read_text())["data"]["rows"] if path.exists() else []
    return [
        Check(f"ms a call at N = {r['branches']}, {layout}", r[f"{layout}_ms"])
        for r in rows
        if r["work"] in ("inference", "inference of 1")
        for layout in ("packed", "padded")
    ]


# --- Plot -------------------------------------------------------------------------------------------------------------


def plot(name: str, settings: Settings, table: dict[str, Any], pairs: dict[str, Any], sweep: list[Any]) -> None:
    """Success by arm, the mixture's advantage, the error by step and, where it was swept, by executed steps."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    swept = len(sweep) > 2
    figure, panels = plt.subplots(1, 3 + swept, figsize=(13 + 4 * swept, 3.6), layout="constrained")
    for axes, rows, title in (
        (panels[0], {k: (v["success"], v["interval"], v["by_seed"]) for k, v in table.items()}, "success"),
        (panels[1], {k: (v["mean"], v["interval"], v["by_seed"]) for k, v in pairs.items()}, "mixture minus arm"),
    ):
        for y, (mean, (low, high), seeds) in enumerate(rows.values()):
            axes.plot(seeds, np.full(len(seeds), y), ".", color="0.7")
            axes.errorbar(mean, y, xerr=[[mean - low], [high - mean]], fmt="o", capsize=3)
        labels = [f"{table[k]['about']} ({table[k]['letter']})" for k in rows]
        axes.set(yticks=range(len(rows)), yticklabels=labels, xlabel=title)
        axes.invert_yaxis()
    panels[1].axvline(0, color="0.5", lw=0.8)
    for key in table:
        if key in ("full", "draws") or key.startswith("plain"):
            panels[2].plot(table[key]["held_out_l1"], label=table[key]["about"])
    panels[2].set(xlabel="step of the chunk", ylabel="held-out L1")
    panels[2].legend()
    if swept:
        plot_executed(panels[3], f"plain-{settings.horizons[-1]}", sweep)
    figure.savefig(RESULTS / f"{name}.svg")
    plt.close(figure)


def plot_executed(axes: Any, plain: str, sweep: list[Any]) -> None:
    """Success against the mean number of steps executed of a chunk."""
    kinds = {
        "plain, fixed": ("s-", lambda s: s["arm"] == plain and not s["ratio"]),
        "mixture, fixed": ("o-", lambda s: s["arm"] == "full" and not s["ratio"]),
        "mixture, dynamic": ("^", lambda s: s["ratio"] and not s["shuffled"]),
        "mixture, shuffled": ("x", lambda s: s["shuffled"]),
    }
    for label, (mark, chosen) in kinds.items():
        points = sorted((s["steps_per_chunk"], s["success"]) for s in sweep if chosen(s))
        axes.plot(*np.array(points).reshape(-1, 2).T, mark, label=label)
    axes.set(xlabel="steps executed per chunk", ylabel="success")
    axes.legend()

"""From the cells of ``world_model.py`` to checks: the gates of the specification, section 6, and what was reached."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from world_training import Settings, plain

from results import Check, write
from vla_stack.statistics import mean_interval, success_interval
from vla_stack.world_model.quality import METRICS

SHORT = "a small model trained for hours on CPU cores on few episodes"


def report(name: str, settings: Settings, cells: Sequence[dict[str, Any]]) -> None:
    """Write ``docs/results/<name>.json`` of the cells that are there."""
    checks = quality(cells) + control(cells) + memory(cells) + improvement(cells)
    kept = [{k: v for k, v in c.items() if k != "rows"} for c in cells]
    data = {"settings": plain(settings), "cells": kept, "quality": table(cells), "episodes_note": NOTE}
    write(name, checks, data, sorted({c["seed"] for c in cells}))


NOTE = "perceptual distance: of the autoencoder's own latents, root mean square; weights for LPIPS are not at hand"


def of(cells: Sequence[dict[str, Any]], part: str, arm: str) -> list[dict[str, Any]]:
    return [c for c in cells if (c["part"], c["arm"]) == (part, arm)]


def table(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over clips and seeds, of each arm, view and k."""
    out = []
    for arm in sorted({c["arm"] for c in cells if c["part"] == "quality"}):
        rows = [r for c in of(cells, "quality", arm) for r in c["rows"]]
        for view in sorted({r["view"] for r in rows}):
            for k in sorted({r["k"] for r in rows}):
                some = [r for r in rows if (r["view"], r["k"]) == (view, k)]
                row: dict[str, Any] = {"arm": arm, "view": view, "k": k, "n": len(some)}
                for metric in METRICS:
                    for who in ("model", "copy_last", "autoencoder"):
                        values = np.array([r[metric][who] for r in some], float)
                        row[f"{metric}_{who}"] = float(np.nanmean(values)) if not np.isnan(values).all() else None
                out.append(row)
    return out


def quality(cells: Sequence[dict[str, Any]]) -> list[Check]:
    """Paired differences: on moving pixels, for each k up to 16, and on whole pictures, where false motion counts too.

    Clips are what was drawn: all rows of one go together in the interval.
    """
    checks: list[Check] = []
    rows = [(c["seed"], r) for c in of(cells, "quality", "full") for r in c["rows"]]
    why = {"no_memory": "what both cameras see at first is seldom out of sight so soon", "mean_pose": SHORT}
    for arm in why:
        other = {(c["seed"], r["start"], r["view"], r["k"]): r for c in of(cells, "quality", arm) for r in c["rows"]}
        for k in sorted({r["k"] for _, r in rows if r["k"] <= 16}):
            pairs = [
                ((seed, r["start"]), r["psnr_moving"]["model"] - other[key]["psnr_moving"]["model"])
                for seed, r in rows
                if r["k"] == k and (key := (seed, r["start"], r["view"], k)) in other
            ]
            checks += difference(f"PSNR of moving pixels above {arm}, k = {k} (dB)", pairs, why[arm])
    for k in sorted({r["k"] for _, r in rows}):
        for metric, what in (("psnr_moving", "moving pixels"), ("psnr", "whole pictures")):
            pairs = [((s, r["start"]), r[metric]["model"] - r[metric]["copy_last"]) for s, r in rows if r["k"] == k]
            checks += difference(f"PSNR of {what} above copy-last-frame, k = {k} (dB)", pairs)
    return checks


def difference(name: str, pairs: Sequence[tuple[Any, float]], why: str = SHORT) -> list[Check]:
    """A mean difference with its interval over clusters, all of which should lie above 0.

    Args:
        name: Of the check, which holds the lower end against 0.
        pairs: Cluster, whose mean counts as one value, and difference.
        why: If it falls short.
    """
    sums: dict[Any, list[float]] = {}
    for cluster, value in pairs:
        if np.isfinite(value):
            sums.setdefault(cluster, []).append(value)
    if not sums:
        return []
    e = mean_interval([float(np.mean(v)) for v in sums.values()], "clips")
    return [Check(name, e.value, interval=e), Check(f"{name}: lower end", e.low, 0.0, ">", e, why)]


def control(cells: Sequence[dict[str, Any]]) -> list[Check]:
    checks = []
    if full := of(cells, "control", "full"):
        checks.append(Check("controllability A on moving pixels", mean(full, "A"), 0.3, why=SHORT))
        checks.append(Check("pose-probe error at k = 16 (m)", mean(full, "probe_m"), 0.015, "<=", why=SHORT))
        checks.append(Check("pose-probe error on recorded pictures (m)", mean(full, "probe_on_recorded_m")))
    if arm := of(cells, "control", "mean_pose"):
        checks.append(Check("controllability A with the mean of all poses", mean(arm, "A")))
    return checks


def mean(cells: Sequence[dict[str, Any]], key: str) -> float:
    return float(np.mean([c[key] for c in cells]))


def memory(cells: Sequence[dict[str, Any]]) -> list[Check]:
    checks = []
    if full := of(cells, "memory", "full"):
        checks.append(Check("hue out of sight remembered", mean(full, "own"), 0.6, why=SHORT))
        nowhere = "the other episode's cube is at another place, and a calibrated camera looks where it is"
        checks.append(Check("swapped history followed", mean(full, "follows_swapped"), 0.6, why=nowhere))
        checks.append(Check("history in another hue followed", mean(full, "follows_recoloured"), 0.6, why=SHORT))
        pairs = [
            ((c["seed"], i), float(own) - float(other))
            for c in full
            for i, (own, other) in enumerate(zip(c["right"]["own"], c["right"]["shuffled_poses"], strict=True))
        ]
        checks += difference("accuracy lost where history poses are shuffled", pairs, "poses are no key")
        checks.append(Check("hue classifier on recorded pictures", mean(full, "classifier")))
    if arm := of(cells, "memory", "no_memory"):
        n = sum(c["n"] for c in arm)
        right = round(sum(c["own"] * c["n"] for c in arm))
        low = success_interval(right, n).low
        checks.append(
            Check("lower bound of hue accuracy without memory (chance 1/6)", low, 1 / 6, "<=", why="the hue leaks in")
        )
    return checks


def improvement(cells: Sequence[dict[str, Any]]) -> list[Check]:
    """Arms against each other on the same episodes of the simulator."""
    outcomes = {c["arm"]: c["successes"] for c in cells if c["part"] == "improvement" and c["successes"]}
    checks = [
        Check(
            f"success in the simulator in other words and from other places, {arm}",
            float(np.mean(won)),
            interval=success_interval(sum(won), len(won)),
        )
        for arm, won in outcomes.items()
    ]

    def paired(a: str, b: str) -> list[tuple[int, float]]:
        return [(i, float(x) - float(y)) for i, (x, y) in enumerate(zip(outcomes[a], outcomes[b], strict=True))]

    why = "imagined successes are not close enough to real ones, or too few episodes to tell"
    for arm in ("imagined", "relabelled", "simulated", "planned", "critics"):
        if {"unchanged", arm} <= set(outcomes):
            gained = difference(f"gain by {arm} episodes", paired(arm, "unchanged"), why)
            checks += gained[:1] if arm == "simulated" else gained  # what there is to gain
        if {"real", arm} <= set(outcomes):
            checks += difference(f"{arm} less as many real demonstrations", paired(arm, "real"))[:1]
    return checks

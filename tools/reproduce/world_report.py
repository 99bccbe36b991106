"""From the cells of ``world_model.py`` to checks: the gates of the specification, section 6, and what was reached."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from world_training import Settings, plain

from results import Check, write
from vla_stack.statistics import wilson
from vla_stack.world_model.quality import METRICS
from vla_stack.world_model.ranking import compare

SHORT = "a small model trained for hours on CPU cores on few episodes"
DRAWS = 2000


def report(name: str, settings: Settings, cells: Sequence[dict[str, Any]]) -> None:
    """Write ``docs/results/<name>.json`` of the cells that are there."""
    checks = quality(cells) + control(cells) + memory(cells) + ranking(cells) + improvement(cells)
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
    """Paired differences on moving pixels, for each k up to 16."""
    checks: list[Check] = []
    rows = [(c["seed"], r) for c in of(cells, "quality", "full") for r in c["rows"]]
    for arm in ("no_memory", "mean_pose"):
        other = {(c["seed"], r["start"], r["view"], r["k"]): r for c in of(cells, "quality", arm) for r in c["rows"]}
        pairs = [
            r["psnr_moving"]["model"] - other[key]["psnr_moving"]["model"]
            for seed, r in rows
            if r["k"] <= 16 and (key := (seed, r["start"], r["view"], r["k"])) in other
        ]
        checks += difference(f"PSNR of moving pixels above {arm}, k <= 16 (dB)", pairs)
    for k in sorted({r["k"] for _, r in rows}):
        pairs = [r["psnr_moving"]["model"] - r["psnr_moving"]["copy_last"] for _, r in rows if r["k"] == k]
        checks += difference(f"PSNR of moving pixels above copy-last-frame, k = {k} (dB)", pairs)
    return checks


def difference(name: str, pairs: Sequence[float]) -> list[Check]:
    """A mean difference with a bootstrap interval, which should lie above 0."""
    values = np.array([p for p in pairs if np.isfinite(p)])
    if not len(values):
        return []
    rng = np.random.default_rng(0)
    means = values[rng.integers(len(values), size=(DRAWS, len(values)))].mean(1)
    low, high = np.percentile(means, (2.5, 97.5))
    return [Check(name, float(values.mean()), 0.0, interval=(float(low), float(high)), why=SHORT)]


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
        checks.append(Check("swapped history followed", mean(full, "follows_swap"), 0.6, why=SHORT))
        loss = mean(full, "own") - mean(full, "shuffled_poses")
        checks.append(Check("accuracy lost where history poses are shuffled", loss, 0.0, why="poses are no key"))
        checks.append(Check("hue classifier on recorded pictures", mean(full, "classifier")))
    if arm := of(cells, "memory", "no_memory"):
        n = sum(c["n"] for c in arm)
        right = round(sum(c["own"] * c["n"] for c in arm))
        low, _ = wilson(right, n)
        checks.append(
            Check("lower bound of hue accuracy without memory (chance 1/6)", low, 1 / 6, "<=", why="the hue leaks in")
        )
    return checks


def ranking(cells: Sequence[dict[str, Any]]) -> list[Check]:
    """Correlation over policies, with tripped rollouts as failures and left out."""
    policies = [c for c in cells if c["part"] == "ranking"]
    if len(policies) < 3:
        return []
    real = [c["real"] for c in policies]
    tripped = np.array([c["tripped"] for c in policies], bool)
    imagined = np.array([c["model"] for c in policies], float)
    why = SHORT + ", or policies whose rates do not differ"
    checks = [Check("share of imagined rollouts that no guard ended", float(1 - tripped.mean()))]
    for label, outcomes in (
        ("", imagined * ~tripped),
        (" without tripped rollouts", np.where(tripped, np.nan, imagined)),
    ):
        s = compare(real, list(outcomes))
        interval = {k: tuple(s[k]["interval"]) for k in ("pearson", "spearman", "mmrv", "bias")}
        for key, bound, sense in (
            ("pearson", 0.8, ">="),
            ("spearman", None, ">="),
            ("mmrv", 0.1, "<="),
            ("bias", None, ">="),
        ):
            value = s[key]["value"]
            value = -1.0 if np.isnan(value) else value  # rates that do not vary order nothing
            name = f"{key} over {len(policies)} policies{label}"
            checks.append(Check(name, value, bound, sense, interval[key], why))  # type: ignore[arg-type]
        inner = s["pearson_inner"]
        name = f"pearson without the best and the worst policy{label}"
        checks.append(Check(name, -1.0 if np.isnan(inner) else inner))
    won, said = (np.concatenate([np.array(c[key], bool) for c in policies]) for key in ("real", "judged"))
    for outcome, name in ((True, "successes"), (False, "failures")):
        if (won == outcome).any():
            right = float((said == outcome)[won == outcome].mean())
            checks.append(Check(f"share of simulated {name} that the judges see as such", right))
    return checks


def improvement(cells: Sequence[dict[str, Any]]) -> list[Check]:
    rates = {}
    for cell in (c for c in cells if c["part"] == "improvement"):
        if outcomes := cell["successes"]:
            rates[cell["arm"]] = (np.mean(outcomes), wilson(sum(outcomes), len(outcomes)))
    checks = [
        Check(f"success in the simulator in other words and from other places, {arm}", float(r), interval=i)
        for arm, (r, i) in rates.items()
    ]
    why = "imagined successes are not close enough to real ones"
    for arm in ("imagined", "planned", "critics"):
        if {"unchanged", arm} <= set(rates):
            checks.append(Check(f"gain by {arm} episodes", float(rates[arm][0] - rates["unchanged"][0]), 0.0, why=why))
        if {"real", arm} <= set(rates):
            checks.append(Check(f"{arm} less as many real demonstrations", float(rates[arm][0] - rates["real"][0])))
    return checks

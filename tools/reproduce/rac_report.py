"""Figures, checks and plot of ``rac.py`` from the records of its runs."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from results import RESULTS, Check, write
from vla_stack.statistics import Estimate, seeds_interval

Records = dict[str, dict[int, list[dict[str, Any]]]]  # arm -> seed -> iterations
MOST = 4  # recoveries of the capped curve


def log(about: dict[str, str], records: Records) -> None:
    """Print one line an arm."""
    for arm in about:
        rows = curve(records[arm]) if records.get(arm) else []
        print(f"{arm:<10}", *(f"{r['human_frames']:.0f}: {r['success']:.2f}" for r in rows), flush=True)


def report(name: str, about: dict[str, str], records: Records, kept: dict[str, Any]) -> None:
    """Write ``docs/results/<name>.json`` with ``kept`` beside the figures, and its plot."""
    table = {arm: curve(records[arm]) for arm in about if records.get(arm)}
    seeds = sorted({seed for runs in records.values() for seed in runs})
    capped = {arm: capped_curve(records[arm], table["rac"][-1]["iteration"]) for arm in finished(table)}
    write(name, checks(records, table), {"about": about, "arms": table, "capped": capped, **kept}, seeds)
    plot(name, about, table, capped)


def curve(runs: dict[int, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row an iteration that all seeds have done."""
    rows = []
    by_iteration = [{r["iteration"]: r for r in run} for run in runs.values()]
    for k in sorted(set.intersection(*map(set, by_iteration))):
        of = [run[k] for run in by_iteration]
        success = seeds_interval([r["success"] for r in of])
        frames = {s: sum(r["frames"][s] for r in of) for s in of[0]["frames"]}
        ticks = [t for r in of for t, s in zip(r["ticks"], r["success"], strict=True) if s]
        rows.append(
            {
                "iteration": k,
                "human_frames": float(np.mean([r["human_frames"] for r in of])),
                "operator_s": float(
                    np.mean([sum(p["supervision_s"] for p in run if p["iteration"] <= k) for run in runs.values()])
                ),
                "success": success.value,
                "interval": success.interval,
                "over": success.over,
                "by_seed": [float(np.mean(r["success"])) for r in of],
                "progress": float(np.mean([r["progress"] for r in of])),
                "recoveries": float(np.mean([r["recoveries"] for r in of])),
                "recoveries_of_successes": mean_where(of, 1),
                "recoveries_of_failures": mean_where(of, 0),
                "ticks_to_success": float(np.mean(ticks)) if ticks else None,
                "collected": frames,
                "corrections_per_recovery": frames["correction"] / frames["recovery"] if frames["recovery"] else None,
                "takeovers": float(np.mean([r["takeovers"] for r in of])),
                "discarded": sum(r["discarded"] for r in of) / max(1, sum(r["discarded"] + r["collected"] for r in of)),
            }
        )
    return rows


def finished(table: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Arms all seeds of which have done RaC's last iteration."""
    return [arm for arm, rows in table.items() if rows and rows[-1]["iteration"] == table["rac"][-1]["iteration"]]


def mean_where(records: list[dict[str, Any]], success: int) -> float | None:
    """Mean recoveries of the evaluation's episodes that ended so."""
    pairs = [p for r in records for p in zip(r["episode_recoveries"], r["success"], strict=True)]
    chosen = [n for n, s in pairs if s == success]
    return float(np.mean(chosen)) if chosen else None


def capped_success(run: list[dict[str, Any]], k: int, m: int) -> NDArray[np.bool_]:
    """Successes of iteration k's policy, bool [starts], were its episodes ended at recovery m + 1.

    A capped episode is the uncapped one up to that recovery, seeds and policy being the same, so it is read off.
    """
    (record,) = [r for r in run if r["iteration"] == k]
    return np.array(record["success"], bool) & (np.array(record["episode_recoveries"]) <= m)


def capped_curve(runs: dict[int, list[dict[str, Any]]], k: int) -> list[dict[str, Any]]:
    """S_m of iteration k's policies, for m = 0 … ``MOST``, with its interval."""
    curves = [seeds_interval([capped_success(run, k, m) for run in runs.values()]) for m in range(MOST + 1)]
    return [{"recoveries": m, "success": e.value, "interval": e.interval} for m, e in enumerate(curves)]


def rises(runs: dict[int, list[dict[str, Any]]], k: int) -> dict[int, NDArray[np.float64]]:
    """S_MOST minus S_0 of iteration k by seed and start: float [starts], 1 where a recovery made a success.

    It cannot be below 0, so what an arm has is held against the others'.
    """
    return {seed: capped_success(run, k, MOST).astype(float) - capped_success(run, k, 0) for seed, run in runs.items()}


def difference(a: dict[int, list], b: dict[int, list], iterations: list[int], of: Any) -> Estimate:
    """Mean of arm a minus arm b over iterations and common seeds, paired by start; ``of`` is what of a record."""
    seeds = sorted(set(a) & set(b))

    def outcomes(runs: dict[int, list], seed: int) -> np.ndarray:
        return np.mean([of(r) for r in runs[seed] if r["iteration"] in iterations], axis=0)

    return seeds_interval(*([outcomes(runs, s) for s in seeds] for runs in (a, b)))


def succeeded(record: dict[str, Any]) -> NDArray[np.float64]:
    """By start, 0 or 1."""
    return np.array(record["success"], float)


def progress(record: dict[str, Any]) -> NDArray[np.float64]:
    """By start, the share of the task's stages that was reached; says more than success where few episodes succeed."""
    stage = np.array(record["stage"], float)
    return stage * (record["progress"] / max(stage.mean(), 1e-9))


def checks(records: Records, table: dict[str, Any]) -> list[Check]:
    """The claims of the specification's section 9, where their arms are there."""
    base, final = table["rac"][0], table["rac"][-1]
    last = final["iteration"]
    out = [
        Check(
            *("success after iteration 0, at least", base["success"], 0.05, ">=", base["interval"]),
            why="" if base["success"] >= 0.05 else "weaker than meant: the share of the stages tells more than success",
            over=base["over"],
        ),
        Check("success after iteration 0, at most", base["success"], 0.30, "<=", base["interval"], over=base["over"]),
        Check(
            "RaC: success after the last iteration", final["success"], None, ">=", final["interval"], over=final["over"]
        ),
    ]
    for arm in table:
        half = max(1, (last + 1) // 2)  # of the budget
        iterations = [r["iteration"] for r in table[arm] if r["iteration"] >= half]
        if arm == "rac" or last not in iterations:
            continue
        apart = difference(records["rac"], records[arm], iterations, succeeded)
        why = "" if apart.value >= 0 else "seen so: on this task and with this operator the arm does better than RaC"
        out.append(Check(f"RaC minus {arm}, from mid-budget", apart.value, 0.0, ">=", apart, why))
        if arm in ("hg_dagger", "demos", "masked"):
            stages = difference(records["rac"], records[arm], iterations, progress)
            out.append(Check(f"RaC minus {arm}, from mid-budget, share of the stages", stages.value, interval=stages))
        if arm in ("hg_dagger", "demos"):
            seen = "is below 0 as a whole" if apart.high < 0 else "holds 0"
            why = "" if apart.low >= 0 else f"the interval over seeds and starts {seen}"
            out.append(Check(f"RaC minus {arm}, lower end", apart.low, 0.0, ">=", apart, why))
            ours, theirs = (rows[-1]["operator_s"] - rows[0]["operator_s"] for rows in (table["rac"], table[arm]))
            if theirs:
                out.append(Check(f"seconds of an operator after the demonstrations: RaC over {arm}", ours / theirs))
    if masked := [r for r in table.get("masked", ()) if r["iteration"] == last]:
        gain, lost = final["success"] - base["success"], final["success"] - masked[0]["success"]
        share = lost / gain if gain > 0 else 0.0
        why = "" if share >= 0.5 else "corrections and autonomous successes alone carry most of the gain here"
        out.append(Check("share of the gain that masking recovery removes", share, 0.5, ">=", None, why))
        first, end, without = (
            np.mean([r["progress"] for run in records[arm].values() for r in run if r["iteration"] == k])
            for arm, k in (("rac", 0), ("rac", last), ("masked", last))
        )
        share = float((end - without) / (end - first)) if end > first else 0.0
        out.append(Check("share of the gain in stages that masking recovery removes", share))
    rise = {arm: rises(records[arm], last) for arm in finished(table)}
    own = seeds_interval(list(rise["rac"].values()))
    why = "" if own.value >= 0.03 else "few successes of this policy come after a failed attempt"
    out.append(Check("RaC, capped recoveries: S_4 minus S_0", own.value, 0.03, ">=", own, why))
    for arm in [arm for arm in rise if arm != "rac"]:
        seeds = sorted(set(rise["rac"]) & set(rise[arm]))
        apart = seeds_interval(*([rise[side][s] for s in seeds] for side in ("rac", arm)))
        why = "" if apart.value >= 0 else "successes of that arm come after a failed attempt more often"
        out.append(Check(f"S_4 minus S_0: RaC minus {arm}", apart.value, 0.0, ">=", apart, why))
    for arm in ("rac", "hg_dagger"):
        ratios = [r["corrections_per_recovery"] for r in table.get(arm, ())[1:] if r["corrections_per_recovery"]]
        if ratios:
            out.append(Check(f"{arm}: corrections per recovery frame, first iteration", ratios[0]))
            out.append(Check(f"{arm}: corrections per recovery frame, last iteration", ratios[-1]))
    return out


def plot(name: str, about: dict[str, str], table: dict[str, Any], capped: dict[str, list[dict[str, Any]]]) -> None:
    """Success and progress against human frames, corrections per recovery by iteration, capped recoveries."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 4, figsize=(18, 3.8), layout="constrained")
    for arm, rows in table.items():
        x, iterations = [r["human_frames"] for r in rows], [r["iteration"] for r in rows]
        (line,) = panels[0].plot(x, [r["success"] for r in rows], "o-", label=about[arm])
        low, high = zip(*(r["interval"] for r in rows), strict=True)
        panels[0].fill_between(x, low, high, alpha=0.1, color=line.get_color())
        panels[1].plot(x, [r["progress"] for r in rows], "o-")
        ratio = [np.nan if r["corrections_per_recovery"] is None else r["corrections_per_recovery"] for r in rows]
        panels[2].plot(iterations, ratio, "o-")
        if arm in capped:
            low, high = zip(*(r["interval"] for r in capped[arm]), strict=True)
            panels[3].plot([r["success"] for r in capped[arm]], "o-", color=line.get_color())
            panels[3].fill_between(range(MOST + 1), low, high, alpha=0.1, color=line.get_color())
    panels[0].set(xlabel="human frames", ylabel="success", ylim=(0, 1))
    panels[0].legend(fontsize=7)
    panels[1].set(xlabel="human frames", ylabel="progress (share of stages)")
    panels[2].set(xlabel="iteration", ylabel="correction frames per recovery frame")
    panels[3].set(xlabel="m", ylabel="success with at most m recoveries")
    figure.savefig(RESULTS / f"{name}.svg")
    plt.close(figure)

"""Figures, checks and plot of ``rac.py`` from the records of its runs."""

from __future__ import annotations

from typing import Any

import numpy as np

from results import RESULTS, Check, write
from vla_stack.statistics import wilson

Records = dict[str, dict[int, list[dict[str, Any]]]]  # arm -> seed -> rounds
BOOTSTRAP = 4000


def report(name: str, about: dict[str, str], records: Records, quiet: bool = False) -> None:
    """Write ``docs/results/<name>.json`` and its plot; with ``quiet`` print one line an arm instead."""
    table = {arm: curve(records[arm]) for arm in about if records.get(arm)}
    if quiet:
        for arm, rows in table.items():
            print(f"{arm:<10}", *(f"{r['human_frames']:.0f}: {r['success']:.2f}" for r in rows), flush=True)
        return
    seeds = sorted({seed for runs in records.values() for seed in runs})
    capped = {arm: capped_curve(runs) for arm, runs in records.items() if arm in ("rac", "hg_dagger", "masked")}
    write(name, checks(records, table, capped), {"about": about, "arms": table, "capped": capped}, seeds)
    plot(name, about, table, capped)


def curve(runs: dict[int, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row a round that all seeds have done."""
    rows = []
    by_round = [{r["round"]: r for r in run} for run in runs.values()]
    for k in sorted(set.intersection(*map(set, by_round))):
        of = [run[k] for run in by_round]
        outcomes = np.array([r["success"] for r in of])
        frames = {s: sum(r["frames"][s] for r in of) for s in of[0]["frames"]}
        ticks = [t for r in of for t, s in zip(r["ticks"], r["success"], strict=True) if s]
        rows.append(
            {
                "round": k,
                "human_frames": float(np.mean([r["human_frames"] for r in of])),
                "operator_s": float(
                    np.mean([sum(p["supervision_s"] for p in run if p["round"] <= k) for run in runs.values()])
                ),
                "success": float(outcomes.mean()),
                "interval": wilson(int(outcomes.sum()), outcomes.size),
                "by_seed": outcomes.mean(1).tolist(),
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


def mean_where(records: list[dict[str, Any]], success: int) -> float | None:
    """Mean recoveries of the evaluation's episodes that ended so."""
    pairs = [p for r in records for p in zip(r["episode_recoveries"], r["success"], strict=True)]
    chosen = [n for n, s in pairs if s == success]
    return float(np.mean(chosen)) if chosen else None


def capped_curve(runs: dict[int, list[dict[str, Any]]], most: int = 4) -> list[float]:
    """S_m of the last round's policies: success where an episode ends at recovery m + 1, for m = 0 … ``most``.

    A capped episode is the uncapped one up to that recovery, seeds and policy being the same, so it is read off.
    """
    pairs = [p for run in runs.values() for p in zip(run[-1]["episode_recoveries"], run[-1]["success"], strict=True)]
    return [float(np.mean([s and n <= m for n, s in pairs])) for m in range(most + 1)]


def difference(a: dict[int, list], b: dict[int, list], rounds: list[int]) -> tuple[float, tuple[float, float]]:
    """Mean success of arm a minus arm b over rounds and common seeds, paired by start, and its bootstrap interval."""
    seeds = sorted(set(a) & set(b))

    def outcomes(runs: dict[int, list], seed: int) -> np.ndarray:
        return np.mean([r["success"] for r in runs[seed] if r["round"] in rounds], axis=0)

    pairs = np.array([outcomes(a, s) - outcomes(b, s) for s in seeds])  # [seeds, starts]
    rng, (n, m) = np.random.default_rng(0), pairs.shape
    draws = [pairs[np.ix_(rng.integers(n, size=n), rng.integers(m, size=m))].mean() for _ in range(BOOTSTRAP)]
    low, high = np.percentile(draws, (2.5, 97.5))
    return float(pairs.mean()), (float(low), float(high))


def checks(records: Records, table: dict[str, Any], capped: dict[str, list[float]]) -> list[Check]:
    """The claims of the specification's section 9, where their arms are there."""
    base, final = table["rac"][0], table["rac"][-1]
    last = final["round"]
    out = [
        Check("success after round 0, at least", base["success"], 0.05, ">=", base["interval"]),
        Check("success after round 0, at most", base["success"], 0.30, "<=", base["interval"]),
        Check("RaC: success after the last round", final["success"], None, ">=", final["interval"]),
    ]
    for arm in table:
        rounds = [r["round"] for r in table[arm] if r["round"] >= max(1, (last + 1) // 2)]  # from mid-budget on
        if arm == "rac" or last not in rounds:
            continue
        value, interval = difference(records["rac"], records[arm], rounds)
        why = "" if value >= 0 else "seen so: on this task and with this operator the arm does better than RaC"
        out.append(Check(f"RaC minus {arm}, from mid-budget", value, 0.0, ">=", interval, why))
        if arm in ("hg_dagger", "demos"):
            seen = "is below 0 as a whole" if interval[1] < 0 else "holds 0"
            why = "" if interval[0] >= 0 else f"the interval over seeds and starts {seen}"
            out.append(Check(f"RaC minus {arm}, lower end", interval[0], 0.0, ">=", None, why))
    if masked := [r for r in table.get("masked", ()) if r["round"] == last]:
        gain, lost = final["success"] - base["success"], final["success"] - masked[0]["success"]
        share = lost / gain if gain > 0 else 0.0
        why = "" if share >= 0.5 else "corrections and autonomous successes alone carry most of the gain here"
        out.append(Check("share of the gain that masking recovery removes", share, 0.5, ">=", None, why))
    rise = capped["rac"][-1] - capped["rac"][0]
    why = "" if rise >= 0.03 else "few successes of this policy come after a failed attempt"
    out.append(Check("RaC, capped recoveries: S_4 minus S_0", rise, 0.03, ">=", None, why))
    for arm in ("rac", "hg_dagger"):
        ratios = [r["corrections_per_recovery"] for r in table.get(arm, ())[1:] if r["corrections_per_recovery"]]
        if ratios:
            out.append(Check(f"{arm}: corrections per recovery frame, first round", ratios[0]))
            out.append(Check(f"{arm}: corrections per recovery frame, last round", ratios[-1]))
    return out


def plot(name: str, about: dict[str, str], table: dict[str, Any], capped: dict[str, list[float]]) -> None:
    """Success and progress against human frames, corrections per recovery by round, capped recoveries."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 4, figsize=(18, 3.8), layout="constrained")
    for arm, rows in table.items():
        x, rounds = [r["human_frames"] for r in rows], [r["round"] for r in rows]
        (line,) = panels[0].plot(x, [r["success"] for r in rows], "o-", label=about[arm])
        low, high = zip(*(r["interval"] for r in rows), strict=True)
        panels[0].fill_between(x, low, high, alpha=0.1, color=line.get_color())
        panels[1].plot(x, [r["progress"] for r in rows], "o-")
        ratio = [np.nan if r["corrections_per_recovery"] is None else r["corrections_per_recovery"] for r in rows]
        panels[2].plot(rounds, ratio, "o-")
        panels[3].plot(capped[arm], "o-", color=line.get_color()) if arm in capped else None
    panels[0].set(xlabel="human frames", ylabel="success", ylim=(0, 1))
    panels[0].legend(fontsize=7)
    panels[1].set(xlabel="human frames", ylabel="progress (share of stages)")
    panels[2].set(xlabel="round", ylabel="correction frames per recovery frame")
    panels[3].set(xlabel="m", ylabel="success with at most m recoveries")
    figure.savefig(RESULTS / f"{name}.svg")
    plt.close(figure)

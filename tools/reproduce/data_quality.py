"""What says before an episode is run how good a policy will be: open-loop error, validation loss, the data's quality?

    python tools/reproduce/data_quality.py                  # as many at once as processes are started; resumes
    python tools/reproduce/data_quality.py --smoke          # the same code, tiny, nothing written
    python tools/reproduce/data_quality.py --report

Picking from pictures and an instruction, out of one pool: an expert's episodes, and those of somebody clumsy who is off
by centimetres and drops things. *Policies* are trained on draws from the pool that differ in size, in the share of
clumsy episodes and in the length of training; success is set beside what could be known before: the open-loop error on
demonstrations that no policy saw, the validation loss on a tenth of its own data, and the mean quality score of its
episodes within the pool. *Selections* keep equally many episodes of the whole pool: at random, by their quality, and by
quality that also asks the policy of the random draw (``vla data quality --policy``).
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import numpy as np
from claims import Cell, adopt, claimed, published, same_settings
from progress import TASK, record, tested, vla

from results import ROOT, Check, parser, write
from vla_stack.data.layout import write_json
from vla_stack.statistics import drawn_interval, rates_difference, rates_interval
from vla_stack.world_model.ranking import spearman

HELD_SEED = 700_000  # of the expert's episodes that no policy sees
DRAWS = 4000  # bootstrap resamples of the policies
PREDICTORS = {  # what is known before an episode is run -> what it should do to success
    "open_loop": ("open-loop error on held-out demonstrations", -1),
    "validation": ("validation loss on a tenth of its own data", -1),
    "quality": ("mean quality score of its episodes, in the pool", -1),
    "frames": ("number of frames it was trained on", 1),
    "steps": ("length of training", 1),
}
ARMS = ("random", "quality", "quality-policy")


@dataclass(frozen=True)
class Settings:
    """Size of the experiment: the pool, the policies' data and training, the selections."""

    good: int = 200
    bad: int = 100
    held: int = 40
    episodes: tuple[int, ...] = (45, 150)
    shares: tuple[float, ...] = (0.0, 1 / 3, 2 / 3)
    steps: tuple[int, ...] = (500, 1500)
    draws: int = 2
    kept: int = 100
    kept_steps: int = 1500
    seeds: int = 5
    test: int = 100


SMOKE = Settings(4, 4, 2, (3, 4), (0.0, 2 / 3), (2,), 1, 3, 2, 2, 2)


def cells(s: Settings) -> list[tuple[Cell, dict[str, Any]]]:
    """Every policy and what it is trained on; of each kind a part, then the next."""
    policies = [
        (
            Cell("policies", f"{count}-{share:.2f}-{steps}", draw),
            {"share": share, "count": count, "steps": steps, "draw": draw},
        )
        for draw in range(s.draws)
        for steps in s.steps
        for share in s.shares
        for count in s.episodes
    ]
    selections = [
        (Cell("selection", arm, seed), {"arm": arm, "steps": s.kept_steps, "draw": seed})
        for seed in range(s.seeds)
        for arm in ARMS
    ]
    half, third = len(policies) // s.draws, len(selections) // s.seeds
    parts = max(s.draws, s.seeds)
    return [
        c for i in range(parts) for c in policies[i * half : (i + 1) * half] + selections[i * third : (i + 1) * third]
    ]


def run(cell: Cell, about: dict[str, Any], s: Settings, out: Path) -> dict[str, Any]:
    """Train a policy and roll it out: what was known before, and its outcomes."""
    from vla_stack.data.dataset import open_dataset
    from vla_stack.evaluation.open_loop import RECORDED, open_loop
    from vla_stack.policies.chunk_policy import load_policy
    from vla_stack.policies.directory import resolve_policy

    pool, held, folder = out / "pool", out / "held", out / "runs" / cell.name
    chosen, scores = episodes(about, s, out), pool_scores(out)
    words = [f"data.root={pool}", f"data.episodes={json.dumps(chosen, separators=(',', ':'))}", "data.validation=0.1"]
    words += [f"method.steps={about['steps']}", f"seed={cell.seed}", f"output_dir={folder}", "eval.every=0"]
    begun = (folder / "checkpoints" / "last").exists()
    vla("train", *(["--resume", str(folder)] if begun else [TASK, "threads=1", "processes=1", *words]))
    log = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    loss = [line["validation/loss"] for line in log if "validation/loss" in line][-1]
    policy = load_policy(resolve_policy(str(folder)), frozen=True)
    error = open_loop(policy, open_dataset(held), s.held)[RECORDED]
    frames = open_dataset(pool).columns["episode_index"]
    known = {
        "open_loop": float(np.nanmean(error.relative)),
        "validation": float(loss),
        "quality": float(np.mean([scores[e] for e in chosen])),
        "frames": int(np.isin(frames, chosen).sum()),
        "steps": about["steps"],
    }
    bad = float(np.mean([e >= s.good for e in chosen]))
    return {**asdict(cell), **known, "bad": bad, "outcomes": tested(folder, s.test)}


def episodes(about: dict[str, Any], s: Settings, out: Path) -> list[int]:
    """Those of the pool that a policy is trained on."""
    rng = np.random.default_rng([about["draw"], 7])
    if "arm" not in about:
        bad = round(about["share"] * about["count"])
        found = [*rng.permutation(s.good)[: about["count"] - bad], *(s.good + rng.permutation(s.bad)[:bad])]
    elif about["arm"] == "random":
        found = list(rng.permutation(s.good + s.bad)[: s.kept])
    else:
        asked = out / "runs" / Cell("selection", "random", about["draw"]).name if "policy" in about["arm"] else None
        found = list(np.argsort(pool_scores(out, asked), kind="stable")[: s.kept])
    return sorted(map(int, found))


def pool_scores(out: Path, policy: Path | None = None) -> list[float]:
    """Quality scores of the pool's episodes, as ``vla data quality`` writes them."""
    folder = out / ("scores" if policy is None else f"scores-{policy.name}")
    with claimed(folder.with_suffix(".lock"), wait=True):
        if not (folder / "quality.json").exists():
            vla(
                "data",
                "quality",
                str(out / "pool"),
                "--save",
                str(folder),
                *(["--policy", str(policy)] if policy else []),
            )
    return json.loads((folder / "quality.json").read_text())["score"]


def report(records: list[dict[str, Any]], s: Settings) -> list[Check]:
    """Rank correlations over the policies, and what selections gain over a random one."""
    policies = [r for r in records if r["task"] == "policies"]
    success = np.array([np.mean(r["outcomes"]) for r in policies])
    checks = [Check("policies", len(policies), 20)]
    draws = np.random.default_rng(0).integers(max(1, len(policies)), size=(DRAWS, len(policies)))
    for key, (words, sign) in (PREDICTORS if policies else {}).items():
        x = np.array([r[key] for r in policies], float)
        r = spearman(x, success)
        interval = drawn_interval(r, [spearman(x[d], success[d]) for d in draws], "policies", len(policies))
        checks.append(Check(f"{words}: rank correlation with success", r, interval=interval))
        told = interval.low * sign > 0 and interval.high * sign > 0
        checks.append(Check(f"{words}: predicts success, 1 for yes", float(told)))
    if policies:
        checks += [
            Check("worst policy: success", float(success.min())),
            Check("best policy: success", float(success.max())),
        ]
    arms: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    for r in (r for r in records if r["task"] == "selection"):
        arms[r["arm"]][r["seed"]] = r
    seeds = sorted(set.intersection(*(set(arms[arm]) for arm in ARMS)))
    rates = {arm: [float(np.mean(arms[arm][i]["outcomes"])) for i in seeds] for arm in ARMS}
    for arm in ARMS if seeds else ():
        checks.append(
            Check(f"{s.kept} kept, {arm}: success", np.mean(rates[arm]), interval=rates_interval(rates[arm], s.test))
        )
        checks.append(
            Check(f"{s.kept} kept, {arm}: share of bad", float(np.mean([arms[arm][i]["bad"] for i in seeds])))
        )
    for arm in ARMS[1:] if seeds else ():
        gain = rates_difference(rates[arm], s.test, rates["random"], s.test)
        low, name = gain.interval[0], f"{s.kept} kept, {arm} minus random: success, lower end"
        checks.append(Check(name, low, 0.0, ">", gain, "" if low > 0 else "no gain could be told"))
    return checks


def main() -> int:
    p = parser(__doc__)
    p.add_argument("--out", type=Path, default=ROOT / "outputs" / "reproduce" / "data_quality")
    p.add_argument("--report", action="store_true", help="write what is there, run nothing")
    p.add_argument("--smoke", action="store_true", help="the same code, tiny, nothing written")
    args = p.parse_args()
    s = SMOKE if args.smoke else Settings()
    same_settings(args.out, asdict(s))
    adopt("data_quality", args.out, asdict(s))
    if not args.report:
        with claimed(args.out / "pool.lock", wait=True):
            record(args.out / "pool", s.good, s.bad)
            record(args.out / "held", s.held, 0, HELD_SEED)
        for cell, about in cells(s):
            file = args.out / "cells" / f"{cell.name}.json"
            if (
                "policy" in about.get("arm", "")
                and not file.with_name(f"selection-random-seed{cell.seed}.json").exists()
            ):
                continue  # another process is at the policy that it asks; the next run makes up for it
            with claimed(file.with_suffix(".lock")) as mine:
                if mine and not file.exists():
                    write_json(file, run(cell, about, s, args.out))
    records = [json.loads(path.read_text()) for path in sorted((args.out / "cells").glob("*.json"))]
    checks = report(records, s)
    if not args.smoke:
        write("data_quality", checks, published(asdict(s), records), seeds=sorted({r["seed"] for r in records}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

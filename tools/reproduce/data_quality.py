"""What says before an episode is run how good a policy will be: open-loop error, validation loss, the data's quality?

    python tools/reproduce/data_quality.py                  # as many at once as processes are started; resumes
    python tools/reproduce/data_quality.py --smoke          # the same code, tiny, nothing written
    python tools/reproduce/data_quality.py --report

From pictures and an instruction, three tasks, each with a pool: an expert's episodes, and those of somebody clumsy who
is off by centimetres and drops things. *Policies* are trained on draws from their task's pool that differ in size, in
the share of clumsy episodes and in the length of training; success is set beside what could be known before: the
open-loop error on demonstrations that no policy saw, the validation loss on a tenth of its own data, and the mean
quality score of its episodes within the pool. Ranks are within a task. *Selections* keep equally many episodes of one
whole pool: at random, by their quality, and by quality that also asks the policy of the random draw (``vla data quality
--policy``).
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
from claims import Cell, adopt, cell_file, claimed, published, run_cells, same_settings
from numpy.typing import NDArray
from progress import record, tested, trained, vla

from results import ROOT, Check, parser, write
from vla_stack.statistics import drawn_interval, rates_difference, rates_interval
from vla_stack.world_model.ranking import pearson, ranks

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
    """Size of the experiment: pools, the policies' data and training, the selections of the first task's pool."""

    tasks: tuple[str, ...] = ("pick", "place", "push")
    good: int = 200
    bad: int = 100
    most: int = 100  # control steps of a recorded episode
    held: int = 40
    episodes: tuple[int, ...] = (45, 150)
    shares: tuple[float, ...] = (0.0, 2 / 3)
    steps: tuple[int, ...] = (500, 1500)
    kept: int = 100
    kept_steps: int = 1500
    seeds: int = 5
    test: int = 100


SMOKE = Settings(("pick", "place"), 4, 4, 30, 2, (3, 4), (0.0,), (2,), 3, 2, 2, 2)


@dataclass(frozen=True)
class About:
    """What a policy is trained on: so many episodes of which this share is bad; or those that a selection keeps."""

    steps: int
    count: int
    share: float = 0.0
    selection: str = ""


def cells(s: Settings) -> list[tuple[Cell, About]]:
    """Every policy and what it is trained on: selections of a seed after a part of the others."""
    policies = [
        (Cell(task, f"{count}-{share:.2f}-{steps}", 0), About(steps, count, share))
        for steps in s.steps
        for share in s.shares
        for count in s.episodes
        for task in s.tasks
    ]
    kept = [
        (Cell(s.tasks[0], arm, seed), About(s.kept_steps, s.kept, 0, arm)) for seed in range(s.seeds) for arm in ARMS
    ]
    part = -(-len(policies) // s.seeds)
    return [
        c
        for i in range(s.seeds)
        for c in policies[i * part : (i + 1) * part] + kept[i * len(ARMS) : (i + 1) * len(ARMS)]
    ]


def run(cell: Cell, about: About, s: Settings, out: Path) -> dict[str, Any]:
    """Train a policy and roll it out: what was known before, and its outcomes."""
    from vla_stack.data.dataset import open_dataset
    from vla_stack.evaluation.open_loop import RECORDED, open_loop
    from vla_stack.policies.chunk_policy import load_policy
    from vla_stack.policies.directory import resolve_policy

    pool, folder = out / f"{cell.task}-pool", out / "runs" / cell.name
    chosen = episodes(cell, about, s, out)
    words = [f"data.root={pool}", f"data.episodes={json.dumps(chosen, separators=(',', ':'))}", "data.validation=0.1"]
    words += [f"task=sim/{cell.task}-v0", f"method.steps={about.steps}", f"seed={cell.seed}", f"output_dir={folder}"]
    trained(folder, "pick", "threads=1", "processes=1", "eval.every=0", *words)
    log = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    policy = load_policy(resolve_policy(str(folder)), frozen=True)
    error = open_loop(policy, open_dataset(out / f"{cell.task}-held"), s.held)[RECORDED]
    known = {
        "open_loop": float(np.nanmean(error.relative)),
        "validation": float([line["validation/loss"] for line in log if "validation/loss" in line][-1]),
        "quality": float(np.mean(np.array(scores(pool))[chosen])),
        "frames": int(np.isin(open_dataset(pool).columns["episode_index"], chosen).sum()),
        "steps": about.steps,
        "bad": float(np.mean([e >= s.good for e in chosen])),
    }
    kind = {"selection": about.selection}
    return {**asdict(cell), **kind, **known, "outcomes": tested(folder, s.test, cell.task)}


def episodes(cell: Cell, about: About, s: Settings, out: Path) -> list[int]:
    """Those of the pool that a policy is trained on."""
    pool, rng = out / f"{cell.task}-pool", np.random.default_rng([cell.seed, 7])
    if not about.selection:
        bad = round(about.share * about.count)
        found = [*rng.permutation(s.good)[: about.count - bad], *(s.good + rng.permutation(s.bad)[:bad])]
    elif about.selection == "random":
        found = list(rng.permutation(s.good + s.bad)[: about.count])
    else:
        asked = asked_policy(cell, out) if about.selection == "quality-policy" else None
        found = list(np.argsort(scores(pool, asked), kind="stable")[: about.count])
    return sorted(map(int, found))


def asked_policy(cell: Cell, out: Path) -> Path:
    """The run of the random draw of a selection's seed; where another process is at it, when that is done."""
    random = Cell(cell.task, "random", cell.seed)
    with claimed(cell_file(random, out).with_suffix(".lock"), wait=True):
        if not cell_file(random, out).exists():
            sys.exit(f"{random.name} ended before it was done: run this again")
    return out / "runs" / random.name


def scores(pool: Path, policy: Path | None = None) -> list[float]:
    """Quality scores of a pool's episodes, as ``vla data quality`` writes them."""
    folder = pool.with_name(f"{pool.name}-scores" + ("" if policy is None else f"-{policy.name}"))
    with claimed(folder.with_suffix(".lock"), wait=True):
        if not (folder / "quality.json").exists():
            asked = ["--policy", str(policy)] if policy else []
            vla("data", "quality", str(pool), "--save", str(folder), *asked)
    return json.loads((folder / "quality.json").read_text())["score"]


def report(records: list[dict[str, Any]], s: Settings) -> list[Check]:
    """Rank correlations over the policies, within tasks, and what selections gain over a random one."""
    policies = [r for r in records if not r["selection"]]
    checks = [Check("policies", len(policies), 20)]
    success = np.array([np.mean(r["outcomes"]) for r in policies])
    groups = [np.flatnonzero([r["task"] == task for r in policies]) for task in s.tasks]
    rng = np.random.default_rng(0)
    draws = [np.concatenate([rng.choice(g, len(g)) for g in groups if len(g)]) for _ in range(DRAWS if policies else 0)]
    for key, (words, sign) in (PREDICTORS if policies else {}).items():
        x = np.array([r[key] for r in policies], float)
        r = within(x, success, groups)
        several = [within(x[d], success[d], _same(d, groups)) for d in draws]
        interval = drawn_interval(r, several, "policies", len(policies))
        checks.append(Check(f"{words}: rank correlation with success", r, interval=interval))
        told = interval.low * sign > 0 and interval.high * sign > 0
        checks.append(Check(f"{words}: predicts success, 1 for yes", float(told)))
    for task, group in zip(s.tasks, groups, strict=True):
        for which, of in (("worst", np.min), ("best", np.max)) if len(group) else ():
            checks.append(Check(f"{task}, {which} policy: success", float(of(success[group]))))
    arms: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    for cell in (r for r in records if r["selection"]):
        arms[cell["selection"]][cell["seed"]] = cell
    seeds = sorted(set.intersection(*(set(arms[arm]) for arm in ARMS)))
    rates = {arm: [float(np.mean(arms[arm][i]["outcomes"])) for i in seeds] for arm in ARMS}
    for arm in ARMS if seeds else ():
        name, bad = f"{s.kept} kept, {arm}", float(np.mean([arms[arm][i]["bad"] for i in seeds]))
        interval = rates_interval(rates[arm], s.test)
        checks.append(Check(f"{name}: success", float(np.mean(rates[arm])), interval=interval))
        checks.append(Check(f"{name}: share of bad", bad))
    for arm in ARMS[1:] if seeds else ():
        gain = rates_difference(rates[arm], s.test, rates["random"], s.test)
        low, name = gain.interval[0], f"{s.kept} kept, {arm} minus random: success, lower end"
        checks.append(Check(name, low, 0.0, ">", gain, "" if low > 0 else "no gain could be told"))
    return checks


def within(x: NDArray[np.float64], y: NDArray[np.float64], groups: list[NDArray[np.int64]]) -> float:
    """Correlation of ranks, where ranks are within groups, from -1/2 to 1/2 each."""
    a, b = (np.concatenate([_centred(v[g]) for g in groups if len(g)]) for v in (x, y))
    return pearson(a, b)


def _centred(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return ranks(values) / max(1, len(values) - 1) - 0.5


def _same(drawn: NDArray[np.int64], groups: list[NDArray[np.int64]]) -> list[NDArray[np.int64]]:
    """Places of each group's members among those drawn."""
    return [np.flatnonzero(np.isin(drawn, g)) for g in groups]


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
        with claimed(args.out / "pools.lock", wait=True):
            for task in s.tasks:
                record(args.out / f"{task}-pool", s.good, s.bad, task=task, most=s.most)
                record(args.out / f"{task}-held", s.held, 0, HELD_SEED, task, s.most)
    about = {} if args.report else dict(cells(s))
    records = run_cells(about, lambda cell: run(cell, about[cell], s, args.out), args.out)
    checks = report(records, s)
    if not args.smoke:
        write("data_quality", checks, published(asdict(s), records), seeds=sorted({r["seed"] for r in records}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

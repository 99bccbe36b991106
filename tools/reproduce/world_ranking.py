"""Does a world model order policies that nobody chose for it, and may its judges be believed?

    python tools/reproduce/data_quality.py                       # trains the policies
    vla collect --task pick --mixed --image-mode image --episodes 1800 --root outputs/world/data
    python tools/reproduce/world_ranking.py                      # as many at once as processes are started; resumes
    python tools/reproduce/world_ranking.py --world outputs/train/RUN --out outputs/reproduce/other --report

From pictures and an instruction. *Policies* are those of ``data_quality.py`` for picking, each trained by itself on
another draw from a pool of an expert's and a clumsy person's episodes; success from the same starts, imagined and
simulated. Beside imagination what costs less: the open-loop error on held-out demonstrations, and fitted Q evaluation
on the recorded mixture. The claim is held over policies that succeed in 10 to 90 % of the simulated episodes, as any
model orders the best and the worst; intervals are over policies and starts. *Judges* look at simulated films of arms
that wander, visit things, drop them, and grasp beside them, and of experts under another instruction.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import gymnasium as gym
import numpy as np
import torch
from claims import Cell, adopt, published, run_cells, same_settings
from numpy.typing import NDArray
from torch import Tensor
from world_policies import episodes, imagined, judged, plan, simulated, wandering

from results import ROOT, Check, parser, write
from sim.behaviours import BESIDE, Behaviour
from vla_stack.methods.fitted_q import FittedQ, policy_value
from vla_stack.policies.chunk_policy import load_policy
from vla_stack.policies.directory import resolve_policy
from vla_stack.rollout.agents import PolicyAgent
from vla_stack.statistics import success_interval
from vla_stack.world_model.clips import Recording, encode_all, open_recording
from vla_stack.world_model.model import CONFIG, WorldModel, load, resolve
from vla_stack.world_model.ranking import bias, mmrv, over_policies, pearson, spearman
from vla_stack.world_model.rehearsal import REHEARSED, Rehearsed
from vla_stack.world_model.success import SuccessDetector
from vla_stack.world_model.world_backend import max_steps_of

TASK, SEED, FILMS_SEED = "pick", 40_000, 990_000
MIDDLE = (0.1, 0.9)  # success in the simulator of policies whose order says something
FILMS = ("wandering", "waypoints", "look_away", "drops", "beside", "beside_25mm", "other_instruction")
BOUNDS = {"wandering": 0.02, "waypoints": 0.02, "look_away": 0.02, "beside_25mm": 0.05, "other_instruction": 0.05}
OFFSET = 0.025  # m


@dataclass(frozen=True)
class Settings:
    """Size: paired starts of a policy, films of a kind, recorded chunks and steps of fitted Q."""

    starts: int = 50
    films: int = 100
    rows: int = 8000
    steps: int = 2000


SMOKE = Settings(2, 2, 64, 2)


def digest(world: Path) -> str:
    """Of a world model's networks and limits: figures of one are not another's."""
    files = sorted(p for p in world.iterdir() if p.suffix == ".safetensors" or p.name == CONFIG)
    return sha256(b"".join(sha256(p.read_bytes()).digest() for p in files)).hexdigest()[:12]


def rolled_out(run: Path, world: Path, model: WorldModel, s: Settings) -> dict[str, Any]:
    """A policy's successes from the same starts: simulated, as judges see those, and imagined."""
    policy = load_policy(resolve_policy(str(run)), frozen=True)
    seeds = range(SEED, SEED + s.starts)
    real, ours = (
        episodes(policy, plan(where, PolicyAgent, policy, driven=0), seeds)
        for where in (simulated(model), imagined(world, "cpu"))
    )
    films: list[Rehearsed] = [e.attached[REHEARSED] for e in ours]
    return {
        "real": [int(e.success) for e in real],
        "judged": [int(judged(model, e)) for e in real],
        "imagined": [int(e.success) for e in ours],
        "guards": [list(film.guards) for film in films],
        "instructions": [e.task for e in real],
    }


def filmed(kind: str, model: WorldModel, s: Settings) -> dict[str, Any]:
    """Simulated films of a behaviour: which succeeded, and which the judges and guards call successes."""
    env_id, options = simulated(model)
    env: Any = gym.make(env_id, **options)
    won, called = [], []
    for seed in range(FILMS_SEED, FILMS_SEED + s.films):
        raw, info = env.reset(seed=seed)
        task = info["task"]
        if kind == "other_instruction":
            others = [t for t in model.config.tasks if t != task]
            task = others[seed % len(others)]
        act = actor(kind, env, seed, max_steps_of(model))
        detector, over, said, done = SuccessDetector(model, task), False, False, False
        detector.see(raw["pixels"], env.unwrapped.tool)
        while not over:
            raw, _, terminated, truncated, info = env.step(act())
            said |= detector.see(raw["pixels"], env.unwrapped.tool, env.unwrapped.tool_command)[0]
            done, over = done or info["is_success"], terminated or truncated
        won.append(int(done and kind != "other_instruction"))
        called.append(int(said))
    env.close()
    return {"real": won, "judged": called}


def actor(kind: str, env: gym.Env, seed: int, steps: int) -> Any:
    """Who acts in a film: a function without arguments that returns the next action."""
    if kind == "wandering":
        return iter(wandering(seed, steps)).__next__
    does: Any = {"beside_25mm": "beside", "other_instruction": "expert"}.get(kind, kind)
    behaviour = Behaviour(env, does, seed, (OFFSET, OFFSET) if kind == "beside_25mm" else BESIDE)
    return lambda: behaviour.perturb(behaviour.act())


@cache
def data(root: Path, world: Path) -> tuple[Recording, Tensor]:
    """The recorded mixture, and its latents, which are kept beside it."""
    recording, model = open_recording(root), load(world)
    weights = sha256((resolve(world) / "vae.safetensors").read_bytes()).hexdigest()[:12]
    kept = root / f"latents-{weights}-{len(recording.end)}.npy"  # of this autoencoder, and of all that is there
    if not kept.exists():
        partial = kept.with_suffix(f".{os.getpid()}.npy")
        np.save(partial, encode_all(model.vae, recording, torch.device("cpu")).numpy())
        partial.replace(kept)
    return recording, torch.from_numpy(np.load(kept))


def fitted(run: Path, world: Path, model: WorldModel, root: Path, s: Settings) -> dict[str, Any]:
    """A policy's value by fitted Q evaluation, over the first frames of episodes that nothing was fitted to."""
    policy = load_policy(resolve_policy(str(run)), frozen=True)
    recording, latents = data(root, world)
    starts = np.unique(recording.start[recording.held_out])

    def ask(observations: Any, seeds: list[int]) -> NDArray[np.float32]:
        return policy.infer(observations, seeds).actions

    return {"value": policy_value(model, recording, latents, ask, starts, FittedQ(rows=s.rows, steps=s.steps))}


def report(records: Sequence[dict[str, Any]]) -> list[Check]:
    """Correlations over policies, of imagination and what costs less; false positives of the judges; precision."""
    by = {kind: {r["of"]: r for r in records if r["kind"] == kind} for kind in ("rolled_out", "filmed", "fitted")}
    policies = sorted(by["rolled_out"])
    checks = [Check("policies", len(policies))]
    if len(policies) >= 3:
        checks += ranked(policies, by)
    checks += precise([by["rolled_out"][p] for p in policies])
    for kind, r in by["filmed"].items():
        checks.append(false_positives(f"simulated films, {kind}", r, BOUNDS.get(kind)))
    worst = [
        (false_positives(f"simulated films of {p}", by["rolled_out"][p], 0.1), sum(by["rolled_out"][p]["judged"]))
        for p in policies
        if not all(by["rolled_out"][p]["real"])
    ]
    if worst:
        check = max((c for c, _ in worst), key=lambda c: c.value)
        name = "simulated films of the policy of which most are: share of failures that the judges call successes"
        checks.append(Check(name, check.value, 0.1, "<=", check.interval, "its failures are near misses"))
    return checks


def ranked(policies: Sequence[str], by: dict[str, dict[str, Any]]) -> list[Check]:
    """Correlation of what is known of policies with their success in the simulator, over all and the middle ones."""
    real, said = (np.array([by["rolled_out"][p][k] for p in policies], float) for k in ("real", "imagined"))
    tripped = np.array([[bool(g) for g in by["rolled_out"][p]["guards"]] for p in policies])
    rates = real.mean(1)
    middle = (rates >= MIDDLE[0]) & (rates <= MIDDLE[1])
    label = f"that succeed in {MIDDLE[0]:.0%} to {MIDDLE[1]:.0%}".replace("%", " %")
    checks = [Check(f"policies {label}", float(middle.sum()), 15)]
    checks.append(Check("share of imagined rollouts that no guard ended", float(1 - tripped.mean())))
    cheap = {
        "open-loop error": [-by["rolled_out"][p]["open_loop"] for p in policies],
        "validation loss": [-by["rolled_out"][p]["validation"] for p in policies],
    }
    if set(policies) <= set(by["fitted"]):
        cheap["fitted Q"] = [by["fitted"][p]["value"] for p in policies]
    for some, who in ((middle, label), (np.ones(len(policies), bool), "of all rates")):
        if some.sum() < 3:
            continue
        r, m = real[some], said[some]
        for name, statistic, bound, sense in (
            ("pearson", pearson, 0.8, ">="),
            ("spearman", spearman, None, ">="),
            ("mmrv", mmrv, 0.1, "<="),
            ("bias", bias, None, ">="),
        ):
            e = over_policies(statistic, r, m)
            bounded = bound if who == label else None
            checks.append(Check(f"imagination, policies {who}: {name}", e.value, bounded, sense, e, WHY))  # type: ignore[arg-type]
            if name == "pearson" and bounded is not None:
                checks.append(Check(f"imagination, policies {who}: pearson, lower end", e.low, 0.6, ">", e, WHY))
            if name == "bias" and who == label:
                checks.append(Check(f"imagination, policies {who}: size of the bias", abs(e.value), 0.05, "<=", e, WHY))
        left = np.where(tripped[some], np.nan, m)
        if (counted := ~np.isnan(left).all(1)).sum() >= 3:
            e = over_policies(pearson, r[counted], left[counted])
            name = f"imagination, rollouts that a guard ended left out, policies {who}: pearson"
            checks.append(Check(name, e.value, interval=e))
        for other, values in cheap.items():
            column = np.repeat(np.array(values)[some, None], r.shape[1], 1)
            checks.append(
                Check(f"{other}, policies {who}: pearson", (e := over_policies(pearson, r, column)).value, interval=e)
            )
            if who == label:
                gain = over_policies(lambda a, b, c: pearson(a, b) - pearson(a, c), r, m, column)
                checks.append(Check(f"imagination minus {other}: pearson, lower end", gain.low, 0.0, ">", gain, CLOSE))
    return checks


WHY = "a small model trained for an hour on one CPU core"
CLOSE = "no difference could be told over so few policies"


def precise(records: Sequence[dict[str, Any]]) -> list[Check]:
    """Of imagined successes the share that succeed in the simulator from the same start, for each instruction."""
    won: Counter[str] = Counter()
    of: Counter[str] = Counter()
    for r in records:
        for task, real, ours in zip(r["instructions"], r["real"], r["imagined"], strict=True):
            of[task] += ours
            won[task] += ours * real
    return [
        Check(
            f"precision of imagined successes, '{task}'",
            won[task] / of[task],
            0.9,
            interval=success_interval(won[task], of[task]),
            why="what a policy does from a start is chance for weak ones: the simulator itself, other noise, differs",
        )
        for task in sorted(of)
        if of[task]
    ]


def false_positives(name: str, record: dict[str, Any], bound: float | None) -> Check:
    """Share of failed episodes that the judges call successes."""
    called = [said for real, said in zip(record["real"], record["judged"], strict=True) if not real]
    name = f"{name}: share of {len(called)} failures that the judges call successes"
    interval = success_interval(sum(called), len(called)) if called else None
    return Check(name, float(np.mean(called)) if called else 0.0, bound, "<=", interval, WHY)


def main() -> int:
    p = parser(__doc__)
    p.add_argument("--world", default="shipped", help="a world model (default: %(default)s)")
    p.add_argument("--policies", type=Path, default=ROOT / "outputs" / "reproduce" / "data_quality")
    p.add_argument("--data", type=Path, default=ROOT / "outputs" / "world" / "data", help="the recorded mixture")
    p.add_argument("--out", type=Path, default=ROOT / "outputs" / "reproduce" / "world_ranking")
    p.add_argument("--only", choices=("rolled_out", "filmed", "fitted"), help="of the three, this alone")
    p.add_argument("--report", action="store_true", help="write what is there, run nothing")
    p.add_argument("--smoke", action="store_true", help="two policies, tiny, nothing written")
    args = p.parse_args()
    torch.set_num_threads(1)
    s = SMOKE if args.smoke else Settings()
    world = resolve(args.world)
    settings = asdict(s) | {"world": digest(world)}
    same_settings(args.out, settings)
    adopt("world_ranking", args.out, settings)
    files = sorted((args.policies / "cells").glob(f"{TASK}-*.json"))[: 2 if args.smoke else None]
    known = {path.stem: json.loads(path.read_text()) for path in files}
    model = load(world)
    kinds = {"filmed": FILMS, "rolled_out": tuple(known), "fitted": tuple(known)}
    asked = {
        Cell(TASK, f"{kind}-{arm}", 0): (kind, arm)
        for kind, arms in kinds.items()
        for arm in arms
        if not args.report and args.only in (None, kind)
    }

    def run(cell: Cell) -> dict[str, Any]:
        kind, arm = asked[cell]
        folder = args.policies / "runs" / arm
        if kind == "filmed":
            found = filmed(arm, model, s)
        elif kind == "fitted":
            found = fitted(folder, world, model, args.data, s)
        else:
            found = rolled_out(folder, world, model, s) | {k: known[arm][k] for k in ("open_loop", "validation")}
        print(f"{kind} {arm}", flush=True)
        return {**asdict(cell), "kind": kind, "of": arm, **found}

    records = run_cells(asked, run, args.out)
    checks = report(records)
    if not args.smoke:
        write("world_ranking", checks, published(settings, records), seeds=[0])
    return 0


if __name__ == "__main__":
    sys.exit(main())

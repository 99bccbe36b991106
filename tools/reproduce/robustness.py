"""How the shipped policy holds up where only the pictures change, beside the one that shipped before augmentation.

    git worktree add ../before 71abb01
    python tools/reproduce/robustness.py --before ../before/vla_stack/assets/policies/native_multitask

60 paired episodes a row on scenes that training never saw: the same starts and the same noise of the policy, what is
executed included; asynchronous execution with one step (100 ms) of delay under the virtual clock. A row that has been
run is kept in ``--out``, so the command goes on where it was stopped; rows of the policy before are adopted from the
published file where ``--before`` is not given.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from results import RESULTS, Check, parser, write
from vla_stack.data.layout import write_json
from vla_stack.evaluation.evaluate import evaluate
from vla_stack.policies.chunk_policy import ChunkPolicy, load_policy
from vla_stack.policies.shipped import resolve_policy
from vla_stack.rollout.latency import Latency
from vla_stack.runtime.executor import ExecutorConfig
from vla_stack.schema import Chunks, Continuation, Observation
from vla_stack.statistics import wilson

TASKS = ("pick", "place")
EPISODES, SEED, DELAY = 60, 30_000, 1
BOUND = 57 / 60  # of pick, in every row
SHADOW, PATCH, SHIFT = 0.5, 12, 3
Picture = NDArray[np.uint8]  # [h, w, 3]
Change = Callable[[Picture, np.random.Generator], Picture]


def light(*factors: float) -> Change:
    """Every channel times a factor."""
    return lambda picture, _: np.clip(picture * np.array(factors), 0, 255).astype(np.uint8)


def shadow(picture: Picture, _: np.random.Generator) -> Picture:
    """The left half with half the light."""
    out = picture.copy()
    half = out[:, : out.shape[1] // 2]
    half[:] = (half * SHADOW).astype(np.uint8)
    return out


def patch(picture: Picture, rng: np.random.Generator) -> Picture:
    """A grey square somewhere, at another place in each picture."""
    out = picture.copy()
    y, x = (int(rng.integers(n - PATCH + 1)) for n in out.shape[:2])
    out[y : y + PATCH, x : x + PATCH] = 128
    return out


def moved(picture: Picture, _: np.random.Generator) -> Picture:
    """The picture moved right and down, its border repeated."""
    return np.pad(picture, ((SHIFT, 0), (SHIFT, 0), (0, 0)), "edge")[: picture.shape[0], : picture.shape[1]]


CHANGES: dict[str, Change | None] = {
    "as trained": None,
    "40 % darker": light(0.6, 0.6, 0.6),
    "40 % brighter": light(1.4, 1.4, 1.4),
    "warmer by 15 %": light(1.15, 1.0, 0.85),
    "half of it in shadow": shadow,
    "12 px patch": patch,
    "shifted by 3 px": moved,
    "randomisation 2": None,  # of the simulator: colours, light, camera and dynamics
}


class Changed:
    """A policy that is shown changed pictures."""

    def __init__(self, policy: ChunkPolicy, change: Change) -> None:
        self.policy, self.spec, self._change = policy, policy.spec, change

    def infer(
        self,
        observations: Sequence[Observation],
        seeds: Sequence[int],
        continuations: Sequence[Continuation | None] = (),
    ) -> Chunks:
        """The chunks of the policy for what it sees."""
        seen = []
        for obs, seed in zip(observations, seeds, strict=True):
            rng = np.random.default_rng(seed)
            images = {camera: self._change(picture, rng) for camera, picture in obs.images.items()}
            seen.append(Observation(obs.state, images, obs.task, obs.step, obs.t_capture_ns))
        return self.policy.infer(seen, seeds, continuations)


def row(policy: ChunkPolicy, task: str, name: str) -> list[bool]:
    """Outcome of each episode."""
    change = CHANGES[name]
    seen: Any = policy if change is None else Changed(policy, change)
    result = evaluate(
        seen,
        f"sim/{task}-v0",
        EPISODES,
        SEED,
        ExecutorConfig(mode="naive"),
        latency=Latency(DELAY / policy.spec.robot.rate_hz),
        env_options={"randomisation": 2} if name == "randomisation 2" else None,
    )
    return [bool(outcome) for outcome in result.outcomes]


def main() -> int:
    p = parser(__doc__)
    p.add_argument("--before", type=Path, help="directory of the policy that shipped before")
    p.add_argument("--policy", default="shipped", help="the policy (shipped)")
    p.add_argument("--tasks", nargs="+", default=TASKS, choices=TASKS)
    p.add_argument("--out", type=Path, default=Path("outputs/robustness"), help="folder of finished rows")
    args = p.parse_args()
    torch.set_num_threads(1)
    published = RESULTS / "robustness.json"
    rows: dict[str, dict[str, dict[str, list[bool]]]] = {}
    if published.exists():
        rows = {arm: r for arm, r in json.loads(published.read_text())["data"]["rows"].items() if arm == "before"}
    args.out.mkdir(parents=True, exist_ok=True)
    for arm, source in (("shipped", args.policy), ("before", args.before)):
        if source is None:
            continue
        policy = load_policy(resolve_policy(str(source)))
        for task in args.tasks:
            for name in CHANGES:
                file = args.out / f"{arm}-{task}-{name.replace(' ', '_')}.json"
                if not file.exists():
                    write_json(file, row(policy, task, name))
                outcomes = json.loads(file.read_text())
                rows.setdefault(arm, {}).setdefault(task, {})[name] = outcomes
                print(f"{arm:<8} {task:<6} {name:<22} {sum(outcomes)} of {len(outcomes)}", flush=True)
    checks = []
    for task in args.tasks:
        for name in CHANGES:
            now = rows["shipped"][task][name]
            bound = BOUND if task == "pick" else None
            interval = wilson(sum(now), len(now))
            checks.append(Check(f"{task}, {name}: success", float(np.mean(now)), bound, interval=interval))
            if before := rows.get("before", {}).get(task, {}).get(name):
                interval = wilson(sum(before), len(before))
                checks.append(Check(f"{task}, {name}: of the policy before", float(np.mean(before)), interval=interval))
    write("robustness", checks, {"episodes": EPISODES, "rows": rows}, seeds=[SEED])
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""One policy for two robots: the arm commanded in task space by two cameras, and by its joints with one camera.

    python tools/reproduce/embodiments.py [--out outputs/embodiments]

Demonstrations of `pick` for both, one training run on the mixture (recipe `mixture` without its third robot), and
100 unseen scenes for each robot, with one step (100 ms) of delay under the virtual clock. A policy that takes any of
the three cubes, deaf to the instruction, succeeds in one scene of three: the lower end of each interval has to lie
above.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from results import ROOT, Check, parser, write
from vla_stack.evaluation.evaluate import evaluate
from vla_stack.policies.chunk_policy import load_policy
from vla_stack.rollout.collect import CollectConfig, collect
from vla_stack.rollout.latency import Latency
from vla_stack.runtime.executor import ExecutorConfig
from vla_stack.statistics import success_interval
from vla_stack.training.recipe import load
from vla_stack.training.train import train

ROBOTS = {
    "arm7_tool": ({}, {"front": "front", "hand": "wrist"}),
    "arm7_joints": ({"control_mode": "joint_abs", "cameras": ("front",)}, {"front": "front"}),
}
DEMONSTRATIONS, STEPS = 600, 3000
EPISODES, SEED, DELAY = 100, 20_000, 1


def main() -> int:
    p = parser(__doc__)
    p.add_argument("--out", type=Path, default=Path("outputs/embodiments"))
    out = p.parse_args().out
    sources = []
    for name, (options, cameras) in ROBOTS.items():
        root = out / name
        collect(CollectConfig("pick", noise=0.3, options=options), root, DEMONSTRATIONS, workers=1)
        sources.append({"root": str(root), "weight": 1, "embodiment": name, "cameras": cameras})
    overrides = [f"data.sources={json.dumps(sources)}", f"method.steps={STEPS}", "threads=1", "device=cpu"]
    recipe = load(ROOT / "vla_stack/configs/mixture.yaml", overrides)
    begin = time.process_time()
    checkpoint = train(recipe, recipe.method.loss(), out / "run")
    minutes = (time.process_time() - begin) / 60

    torch.set_num_threads(1)
    checks, data = [], {"training, CPU-minutes": minutes, "recipe": recipe.to_yaml()}
    for name in ROBOTS:
        policy = load_policy(checkpoint / "pretrained_model", embodiment=name)
        executor = ExecutorConfig(mode="naive")
        result = evaluate(
            policy, "sim/pick-v0", EPISODES, SEED, executor, latency=Latency(DELAY / policy.spec.robot.rate_hz)
        )
        low, high = success_interval(result.successes, EPISODES).interval
        checks.append(Check(f"{name}: success", float(result.outcomes.mean()), interval=(low, high)))
        checks.append(Check(f"{name}: lower end of the interval, against chance", low, 1 / 3))
        data[name] = [e.to_json() for e in result.episodes]
        print(checks[-2].name, checks[-2].value, (low, high), flush=True)
    log = (out / "run" / "metrics.jsonl").read_text().splitlines()
    data["last record"] = json.loads(log[-1])
    write("embodiments", checks, data, seeds=[recipe.seed, SEED])
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The native VLA on a benchmark that others made: MetaWorld's MT10 in one policy.

    python tools/reproduce/external.py

Collects the experts' demonstrations, trains from pixels and the robot's own state (which holds nothing of the scene),
and evaluates on scenes that training never saw, drawn by the benchmark: 100 episodes a task, no delay,
pictures without shadows. What is there already under outputs/reproduce/external is continued. gym-aloha has a script of
its own, aloha.py; its expert is tried here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from results import ROOT, Check, parser, write
from sim import external
from vla_stack.evaluation.evaluate import evaluate
from vla_stack.policies.chunk_policy import load_policy
from vla_stack.statistics import success_interval

OUT = ROOT / "outputs" / "reproduce" / "external"
EPISODES, SEED = 100, 50_000
KEPT = ("seed", "success", "steps", "stage")  # of an episode's record


NAMES = (  # MT10 (Yu et al. 2019, arXiv:1910.10897)
    *("reach", "push", "pick-place", "door-open", "drawer-open", "drawer-close", "button-press-topdown"),
    *("peg-insert-side", "window-open", "window-close"),
)
TASKS = tuple(f"metaworld/{name}-v3" for name in NAMES)
DEMOS = 120  # of each task
COLLECT = {"control-hz": "20", "control-mode": "ee_abs", "cameras": "corner2 gripperPOV", "noise": "0.3"}
LIMIT = 50  # control steps of an evaluated episode, 200 of MetaWorld's 500: stricter, and what fails costs less


def main() -> int:
    p = parser(__doc__)
    p.add_argument("--out", type=Path, default=OUT, help="folder of data, run and evaluations (default: %(default)s)")
    out = p.parse_args().out
    torch.set_num_threads(1)
    checks, policy = experts(), trained(out)
    records = {task: measured(policy, task, out) for task in TASKS}
    wins = {task: sum(e["success"] for e in r["episodes"]) for task, r in records.items()}
    mean, n = sum(wins.values()) / (EPISODES * len(TASKS)), EPISODES * len(TASKS)
    checks.append(Check("MT10: mean success", mean, interval=success_interval(sum(wins.values()), n)))
    checks.append(Check("MetaWorld: success on the best of the tasks", max(wins.values()) / EPISODES, 0.5))
    for task, won in wins.items():
        checks.append(Check(f"{task}: success", won / EPISODES, interval=success_interval(won, EPISODES)))
    for record in records.values():
        record["episodes"] = [{k: e[k] for k in KEPT if k in e} for e in record["episodes"]]
    about = {"collect": COLLECT, "episodes": DEMOS, **training(policy), "tasks": records}
    write("external", checks, {"metaworld": about}, seeds=[SEED])
    return 0


def experts() -> list[Check]:
    """The scripted experts at the policies' control rates, without noise: what demonstrations can teach."""
    from metaworld.env_dict import ENV_CLS_MAP

    wins = [expert(f"metaworld/{task}", seed, control_hz=20.0) for task in sorted(ENV_CLS_MAP) for seed in range(4)]
    transfer = [expert("aloha/transfer_cube", seed, control_hz=10.0) for seed in range(50)]
    return [
        Check(
            "MetaWorld's experts at 20 Hz, 50 tasks: success",
            np.mean(wins),
            0.9,
            interval=success_interval(sum(wins), len(wins)),
        ),
        Check(
            "transfer expert: success", np.mean(transfer), 0.95, interval=success_interval(sum(transfer), len(transfer))
        ),
    ]


def expert(env_id: str, seed: int, **options: Any) -> bool:
    env = external.make(env_id, cameras=(), **options)
    env.reset(seed=seed)
    script, over = external.make_expert(env), False
    while not over:
        _, _, terminated, truncated, info = env.step(script.act())
        over = terminated or truncated
    env.close()
    return bool(info["is_success"])


def trained(out: Path) -> Path:
    """Directory of the policy that the recipe makes of the demonstrations."""
    root, run = out / "metaworld-data", out / "metaworld"
    flags = [word for key, value in COLLECT.items() for word in (f"--{key}", *value.split())]
    vla("collect", "--env", *TASKS, *flags, "--episodes", str(DEMOS), "--root", str(root))
    recipe = ("metaworld", f"data.root={root}", f"output_dir={run}")
    vla("train", *(("--resume", str(run)) if (run / "recipe.yaml").exists() else recipe))
    return run / "checkpoints" / "last" / "pretrained_model"


def training(policy: Path) -> dict[str, Any]:
    """What a policy was trained with, and for how many steps."""
    run, step = policy.parents[2], int(policy.parent.resolve().name)
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    kept = {key: recipe[key] for key in ("policy", "method", "precision", "seed") if key in recipe}
    return {"recipe": kept | {"cameras": recipe["data"]["cameras"]}, "step": step}


def measured(policy: Path, task: str, out: Path) -> dict[str, Any]:
    """Settings and episodes of the evaluation on a task; read from its file where it is done already."""
    path = out / "evaluations" / f"{task.replace('/', '-')}.json"
    if not path.exists():
        options = {"max_episode_steps": LIMIT}
        result = evaluate(load_policy(policy, frozen=True), task, EPISODES, SEED, env_options=options)
        print(f"{task}: {result.successes}/{EPISODES}", flush=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        record = {"settings": result.settings, "stages": result.stages}
        path.write_text(json.dumps(record | {"episodes": [e.to_json() for e in result.episodes]}))
    return json.loads(path.read_text())


def vla(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "vla_stack.cli", *arguments], cwd=ROOT, check=True)


if __name__ == "__main__":
    sys.exit(main())

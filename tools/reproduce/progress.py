"""Demonstrations of which a third are bad: does it help to draw frames by what they are worth?

    python tools/reproduce/progress.py                  # the first seed of all arms, then the others, then reports
    python tools/reproduce/progress.py --seeds 1 --steps 300 --test 20 --name progress_small
    python tools/reproduce/progress.py --report

Picking from pictures and an instruction. Two thirds of the episodes are an expert's; in the others somebody clumsy is
off by centimetres, grasps beside the cube, drops it, and succeeds now and then; the dataset says which succeeded. Arms,
at equal steps: all frames alike; drawn by what ``vla train progress`` finds them worth, with the eyes of the first
arm's policy; episodes that succeeded alone, which costs nothing; both of these; and the expert's alone, which nobody
knows in earnest.
What was done is not done again: interrupt and continue as you like.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import numpy as np
from claims import same_settings

import freshness
from results import RESULTS, ROOT, Check, parser, write
from vla_stack.data.layout import read_json, write_json
from vla_stack.statistics import rates_difference, rates_interval
from vla_stack.verbs.demo import VLA

MOST = 60  # control steps of an episode; the expert needs 15 to 20
TASK, TEST_SEED, GOOD_SEED, BAD_SEED = "pick", 800_000, 0, 50_000
ARMS = ("all", "worth", "succeeded", "both", "expert")
LABELS = {
    "all": "all frames alike",
    "worth": "drawn by worth",
    "succeeded": "episodes that succeeded alone",
    "both": "episodes that succeeded alone, drawn by worth",
    "expert": "the expert's alone",
}


def main() -> int:
    p = parser(__doc__)
    p.add_argument("--name", default="progress", help="stem of the result file (default: %(default)s)")
    p.add_argument("--out", type=Path, help="folder of recordings and runs (outputs/reproduce/<name>)")
    p.add_argument("--good", type=int, default=200, help="the expert's episodes (default: %(default)s)")
    p.add_argument("--bad", type=int, default=100, help="the others (default: %(default)s)")
    p.add_argument("--steps", type=int, default=1500)
    p.add_argument("--test", type=int, default=100, help="episodes of a test (default: %(default)s)")
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument("--report", action="store_true", help="run nothing")
    args = p.parse_args()
    args.out = args.out or ROOT / "outputs" / "reproduce" / args.name
    data = args.out / "data"
    same_settings(args.out, settings(args))
    adopt(args)
    if not args.report:
        record(data, args.good, args.bad)
        for seed in range(args.seeds):
            for arm in ARMS:
                cell(args, data, arm, seed)
    report(args, data)
    return 0


def record(root: Path, good: int, bad: int, first: int = GOOD_SEED, task: str = TASK, most: int = MOST) -> None:
    """The expert's episodes, from the ``first`` seed on, then the others; what is recorded is what was executed."""
    import gymnasium as gym

    import sim
    from sim.behaviours import make_behaviour
    from vla_stack.data.recorder import EpisodeRecorder
    from vla_stack.envs.making import observe

    env: Any = gym.make(f"sim/{task}-v0").unwrapped
    robot = env.spec_robot
    recorder = EpisodeRecorder(root, robot, image_mode="image")
    try:
        for i in range(recorder.num_episodes, good + bad):
            clumsy = i >= good
            seed = BAD_SEED + i - good if clumsy else first + i
            raw, info = env.reset(seed=seed)
            acting: Any = make_behaviour(env, "clumsy", seed) if clumsy else sim.make_expert(env, seed=seed)
            for k in range(most):
                seen, action = observe(raw, robot, info["task"], k), np.asarray(acting.act(), np.float32)
                raw, _, terminated, truncated, info = env.step(action)
                recorder.add_frame(seen, action)
                if terminated or truncated:
                    break
            recorder.save_episode(bool(info["is_success"]))
    finally:
        recorder.close()
        env.close()


def adopt(args: argparse.Namespace) -> None:
    """Lay what was published, with these settings, among what is here, seed by seed; not where all is to be anew."""
    path = RESULTS / f"{args.name}.json"
    known = read_json(path)["data"] if path.exists() and not os.environ.get(freshness.ANEW) else {}
    if not known or {"test": 100} | known["settings"] != settings(args):
        return
    found = {f"{arm}-{s}/test.json": {"success": won} for arm in ARMS for s, won in enumerate(known["tests"][arm])}
    found |= {f"values-{s}/progress.json": {"held_out": told} for s, told in enumerate(known["held_out"])}
    for name, content in found.items():
        if not (file := args.out / name).exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json(file, content)


def settings(args: argparse.Namespace) -> dict[str, int]:
    return {"good": args.good, "bad": args.bad, "steps": args.steps, "test": args.test}


def cell(args: argparse.Namespace, data: Path, arm: str, seed: int) -> None:
    """Train and test one arm of one seed."""
    out = args.out / f"{arm}-{seed}"
    if (out / "test.json").exists():
        return
    words = [f"data.root={data}", f"method.steps={args.steps}", f"seed={seed}", "threads=1", "eval.every=0"]
    if arm in ("worth", "both"):
        values, eyes = args.out / f"values-{seed}", args.out / f"all-{seed}"
        if not (values / "progress.json").exists():
            vla("train", "progress", f"policy={eyes}", f"data.root={data}", f"output_dir={values}", "threads=1")
        words.append(f"data.progress={values}")
    if arm in ("succeeded", "both"):
        words.append("data.interventions=succeeded")
    elif arm == "expert":
        words.append(f"data.episodes={list(range(args.good))}".replace(" ", ""))
    trained(out, TASK, f"output_dir={out}", *words)
    write_json(out / "test.json", {"success": tested(out, args.test)})


def succeeded(data: Path) -> np.ndarray:
    from vla_stack.data.dataset import open_dataset
    from vla_stack.schema import SUCCESS

    dataset = open_dataset(data)
    return np.asarray(dataset.columns[SUCCESS])[dataset.episode_to - 1].ravel().astype(bool)


def tested(policy: Path, episodes: int, task: str = TASK) -> list[int]:
    from vla_stack.evaluation.evaluate import evaluate
    from vla_stack.policies.chunk_policy import load_policy
    from vla_stack.policies.directory import resolve_policy
    from vla_stack.runtime.executor import ExecutorConfig

    loaded = load_policy(resolve_policy(str(policy)))
    result = evaluate(loaded, f"sim/{task}-v0", episodes, TEST_SEED, ExecutorConfig(mode="sync"))
    return [int(episode.success) for episode in result.episodes]


def report(args: argparse.Namespace, data: Path) -> None:
    from vla_stack.data.dataset import open_dataset

    dataset, won = open_dataset(data), succeeded(data)
    bad_frames = float((dataset.columns["episode_index"] >= args.good).mean())
    found = {
        arm: [read_json(f)["success"] for s in range(args.seeds) if (f := args.out / f"{arm}-{s}/test.json").exists()]
        for arm in ARMS
    }
    rates = {arm: [float(np.mean(s)) for s in tests] for arm, tests in found.items() if tests}
    files = [args.out / f"values-{s}" / "progress.json" for s in range(args.seeds)]
    heads = [read_json(file)["held_out"] for file in files if file.exists()]
    auc, noticed = ([float(head[name]) for head in heads] for name in ("auc", "done_f1"))
    checks = [
        Check("bad: share of the frames", bad_frames),
        Check("bad: episodes that succeed", float(won[args.good :].mean())),
    ]
    for arm, r in rates.items():
        checks.append(Check(f"{LABELS[arm]}: success", float(np.mean(r)), interval=rates_interval(r, args.test)))
    if {"all", "worth"} <= rates.keys() and len(rates["all"]) == len(rates["worth"]):
        times = float(np.mean(rates["worth"])) / max(1e-9, float(np.mean(rates["all"])))
        checks.append(Check("by worth over all alike, times the success", times, 1.5))
    if {"succeeded", "worth"} <= rates.keys() and len(rates["succeeded"]) == len(rates["worth"]):
        gain = rates_difference(rates["worth"], args.test, rates["succeeded"], args.test)
        checks.append(Check("by worth minus successes alone, success", gain.value, interval=gain))
    if {"succeeded", "both"} <= rates.keys() and len(rates["succeeded"]) == len(rates["both"]):
        gain = rates_difference(rates["both"], args.test, rates["succeeded"], args.test)
        checks.append(Check("both minus successes alone, success", gain.value, interval=gain))
    if heads:
        checks += [
            Check("successes told from failures, AUC on held-out episodes", float(np.mean(auc))),
            Check("success noticed within 3 frames, F1 on held-out episodes", float(np.mean(noticed)), 0.95),
        ]
    found_by = {"settings": settings(args), "tests": found, "held_out": heads}
    seeds = [s for s in range(args.seeds) if (args.out / f"all-{s}/test.json").exists()]
    write(args.name, checks, found_by, seeds=seeds)


def trained(run: Path, *words: str) -> None:
    """Train a run, or go on with it; what one that was killed before its first checkpoint has left is removed."""
    if (run / "checkpoints" / "last").exists():
        vla("train", "--resume", str(run))
    else:
        shutil.rmtree(run, ignore_errors=True)
        vla("train", *words)


def vla(*words: str) -> None:
    print(" ".join(words), flush=True)
    subprocess.run([*VLA, *words], check=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())

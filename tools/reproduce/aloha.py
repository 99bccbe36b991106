"""gym-aloha's cube transfer from pictures: success by CPU hours of training, and ACT on the same demonstrations.

    python tools/reproduce/aloha.py                     # recipe `aloha` as it ships, ACT for as long
    python tools/reproduce/aloha.py --arms native-4h    # one arm more; what is there already is kept

Demonstrations are the scripted expert's, recorded at 10 Hz under noise from camera ``top`` alone, 96 pixels. ``native``
is the recipe as it ships; ``native-4h`` four times its steps; ``act`` LeRobot's ACT at its own sizes, with chunks of 16
steps, as ours, a learning rate for short trainings and no weights of ImageNet (a download), stopped at the CPU time
that ``native`` took.
CPU hours are those of all processes of `vla train`, loading included. Success is of 500 episodes whose scenes training
never saw, no delay; checkpoints on the way are evaluated on the first 100. The 87.6 % that gym-aloha's ACT is
published with are of pictures of 480x640 at 50 Hz and of hours on a GPU.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from results import ROOT, Check, parser, write
from vla_stack.data.layout import write_json
from vla_stack.evaluation.evaluate import evaluate
from vla_stack.policies.chunk_policy import load_policy
from vla_stack.statistics import success_interval

TASK = "aloha/transfer_cube"
DEMOS, RECORDERS = 720, 2
EPISODES, ON_THE_WAY, SEED = 500, 100, 50_000
COLLECT = ("--control-hz", "10", "--image-size", "96", "--noise", "0.3")
STEPS = 7_500  # of the recipe
EVERY = STEPS // 3
ACT = "{type: act, options: {chunk_size: 16, n_action_steps: 8, pretrained_backbone_weights: null}}"
ARMS = {
    "native": (f"method.save_every={EVERY}",),
    "act": (
        f"policy={ACT}",
        "method.name=own_loss",
        "method.batch_size=16",
        "method.steps=1000000",  # it is stopped
        "method.save_every=1000000",
        "method.optimizer.lr=1e-4",
        "method.optimizer.final_lr_ratio=1.0",
    ),
    "native-4h": (f"method.steps={4 * STEPS}", f"method.save_every={STEPS}"),
}
PUBLISHED = 0.876
WHY = "one CPU hour is short for it"


def collected(out: Path) -> list[Path]:
    """Datasets of the demonstrations, recorded side by side."""
    roots = [out / "data" / str(seed) for seed in range(1, RECORDERS + 1)]
    share = ("--episodes", str(DEMOS // RECORDERS), "--workers", "1")
    recorders = [
        subprocess.Popen(vla("collect", "--env", TASK, *COLLECT, *share, "--seed", root.name, "--root", str(root)))
        for root in roots
    ]
    if any([recorder.wait() for recorder in recorders]):
        raise SystemExit("recording failed; the same command goes on with it")
    return roots


def trained(run: Path, data: list[Path], overrides: tuple[str, ...], hours: float) -> float:
    """CPU hours of an arm's training, at most ``hours``; a run that was stopped goes on."""
    spent = run.parent / f"{run.name}.hours.json"
    before = json.loads(spent.read_text()) if spent.exists() else {"hours": 0.0, "over": False}
    if before["over"]:
        return float(before["hours"])
    new = ("aloha", f"data.root=[{','.join(map(str, data))}]", f"output_dir={run}", *overrides)
    command = vla("train", *(("--resume", str(run)) if (run / "checkpoints").exists() else new))
    begun = of_children()
    process = subprocess.Popen(command, start_new_session=True)
    ended = False
    while process.poll() is None:
        time.sleep(5.0)
        if before["hours"] + of_group(process.pid) / 3600 > hours:
            os.killpg(process.pid, signal.SIGINT)  # it saves a checkpoint and ends
            ended = True
            process.wait()
    if process.returncode and not ended:
        raise SystemExit(f"training of {run.name} failed; the same command goes on with it")
    now = {"hours": before["hours"] + (of_children() - begun) / 3600, "over": True}
    write_json(spent, now)
    return float(now["hours"])


def of_children() -> float:
    """CPU seconds of processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def of_group(group: int) -> float:
    """CPU seconds of a group of processes that runs."""
    import psutil

    total = 0.0
    for process in psutil.process_iter(["pid"]):
        try:
            if os.getpgid(process.pid) == group:
                total += sum(process.cpu_times()[:2])
        except (psutil.Error, ProcessLookupError):
            continue  # it has ended
    return total


def successes(checkpoint: Path, episodes: int) -> list[dict[str, Any]]:
    """Episodes of an evaluation; read from its file where it is done already."""
    done = checkpoint / f"evaluation-{episodes}.json"
    if not done.exists():
        policy = load_policy(checkpoint / "pretrained_model", frozen=True)
        result = evaluate(policy, TASK, episodes, SEED, num_envs=10, workers=os.cpu_count() or 1)
        print(f"{checkpoint}: {result.successes} of {episodes}", flush=True)
        write_json(done, [{"seed": e.seed, "success": e.success, "stage": e.stage} for e in result.episodes])
    return json.loads(done.read_text())


def vla(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "vla_stack.cli", *arguments]


def main(out: Path, arms: list[str]) -> int:
    os.chdir(ROOT)
    data, checks, found = collected(out), [], {}
    for arm in arms:
        limit = found["native"]["cpu_hours"] if arm == "act" else float("inf")
        hours = trained(out / arm, data, ARMS[arm], limit)
        checkpoints = sorted(p for p in (out / arm / "checkpoints").iterdir() if p.name.isdigit())
        curve = {int(p.name): successes(p, ON_THE_WAY) for p in checkpoints[:-1]}
        last = successes(checkpoints[-1], EPISODES)
        found[arm] = {"cpu_hours": hours, "curve": curve, "steps": int(checkpoints[-1].name), "episodes": last}
        checks += told(arm, found[arm])
    write("aloha", checks, {"demonstrations": DEMOS, "published": PUBLISHED, "arms": found}, seeds=[SEED])
    return 0


def told(arm: str, found: dict[str, Any]) -> list[Check]:
    """An arm's checks."""
    wins, n = sum(e["success"] for e in found["episodes"]), len(found["episodes"])
    bound = {"native": 0.75, "native-4h": 0.88}.get(arm)
    why = WHY if bound and wins / n < bound else ""
    rows = [
        Check(f"{arm}: success", wins / n, bound, interval=success_interval(wins, n), why=why),
        Check(f"{arm}: CPU hours of training", found["cpu_hours"], {"native": 1.0, "native-4h": 4.0}.get(arm), "<="),
    ]
    for steps, episodes in found["curve"].items():
        wins = sum(e["success"] for e in episodes)
        interval = success_interval(wins, len(episodes))
        rows.append(
            Check(f"{arm}: success at {steps} of {found['steps']} steps", wins / len(episodes), interval=interval)
        )
    return rows


if __name__ == "__main__":
    p = parser(__doc__)
    p.add_argument("--out", type=Path, default=ROOT / "outputs" / "reproduce" / "aloha", help="folder")
    p.add_argument("--arms", nargs="+", default=["native", "act"], choices=ARMS, help="what is trained (native act)")
    args = p.parse_args()
    sys.exit(main(args.out, args.arms))

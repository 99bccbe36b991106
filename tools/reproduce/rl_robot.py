"""Reinforcement learning on a robot while it runs: an emulated SO-101 in real time, from pictures and a sentence.

    python tools/reproduce/rl_robot.py                   # the first seed of all arms, then the others, then reports
    python tools/reproduce/rl_robot.py --seeds 1 --arms dsrl_na --minutes 5
    python tools/reproduce/rl_robot.py --report          # what is there by now

Claim asked for: from an imitation that succeeds in at most half of the episodes to 95 of 100 in 20 robot minutes.
Imitation learns from demonstrations in simulation. Of the robot somebody has put two horns back one tooth off, the
elbow's and the gripper's: those joints are 14 degrees from where they say they are. The policy acts through LeRobot's
driver, a bus, servos and cameras that are emulated, records, and a learner beside it learns; the server goes over to
what was learnt. Learner and actor are killed (-9) now and then and started again. In the end the policy that is left
does 100 episodes on scenes that nobody learnt from. In other arms of the experiment an operator, who is simulated too,
takes over where the policy takes longer than two of the three seconds that there are, and has three more; RLPD on the
same features with such help, as in HIL-SERL, is the baseline. What was done is not done again: interrupt and continue
as you like. Nothing else may run beside it: a robot does not wait.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing as mp
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import freshness
from results import RESULTS, ROOT, Check, parser, write
from vla_stack.data.layout import read_json
from vla_stack.schema import Observation
from vla_stack.statistics import rates_interval, success_interval
from vla_stack.verbs.demo import VLA, server

TASK, COLOUR, RATE_HZ = "so101_pick", "red", 10.0
OFF = (2, 5)  # joints whose horn is one tooth off: elbow and gripper
SECONDS, HELP_S = 3.0, 3.0  # of an episode, twice what an expert needs; more where there is an operator
LIVE_SEED, FINAL_SEED, START_SEED = 40_000, 60_000, 70_000  # scenes: learnt from, of the last test, of the first
STEPS = 1500  # of imitation
PATIENCE = 20  # control steps after which an operator takes over; most that succeed have done so
ARMS = {  # method, whether there is an operator, label
    "dsrl_na": ("dsrl_na", False, "DSRL-NA"),
    "dsrl_na_helped": ("dsrl_na", True, "DSRL-NA with an operator"),
    "rlpd_vla_helped": ("rlpd_vla", True, "RLPD with an operator"),
    "expo_vla": ("expo_vla", False, "EXPO"),
}
OPTIONS = "iterations: 100000, episodes: 2, warmup: 10, save_every: 1, keep: 3"
WINDOW = 20  # episodes of which the learning curve is a mean
PATIENCE_S = 600.0
WHY = "in simulation too it was 71 to 86 % after as many steps, of three temperatures and two rewards, a seed each"


def main() -> int:
    p = parser(__doc__)
    p.add_argument("--out", type=Path, default=ROOT / "outputs" / "reproduce" / "rl_robot")
    p.add_argument("--policy", type=Path, help="begin with this policy instead of training one")
    p.add_argument("--data", type=Path, help="with --policy: its demonstrations")
    # Reinforcement learning keeps the eyes: from those of 60, which lift half of the cubes, it got to 83 % of them.
    p.add_argument("--demonstrations", type=int, default=300, help="in simulation (default: %(default)s)")
    p.add_argument("--minutes", type=float, default=20.0, help="of the robot, learning (default: %(default)g)")
    p.add_argument("--episodes", type=int, default=100, help="of the tests before and after (default: %(default)s)")
    p.add_argument("--kills", type=int, default=10, help="of learner and actor each, in a run (default: %(default)s)")
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    p.add_argument("--report", action="store_true", help="run nothing")
    args = p.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.report:
        policy, data = start(args)
        measure(args.out / "start.jsonl", policy, START_SEED, args.episodes)
        for seed in range(args.seeds):
            for arm in args.arms:
                run(args, args.out / f"{arm}-{seed}", policy, data, arm, seed)
    report(args)
    return 0


def start(args: argparse.Namespace) -> tuple[Path, Path]:
    """The policy to begin with, and its demonstrations."""
    if args.policy:
        return args.policy, args.data
    data, run = args.out / "data", args.out / "train"
    if not (run / "checkpoints").exists():
        vla("collect", "--task", TASK, "--episodes", str(args.demonstrations), "--noise", "0.3", "--root", str(data))
        keys = (f"method.steps={STEPS}", f"method.save_every={STEPS}", "eval.every=0", "threads=1")
        vla("train", TASK, f"data.root={data}", f"output_dir={run}", *keys)
    return run / "checkpoints/last/pretrained_model", data


# -- the robot ---------------------------------------------------------------------------------------------------------


def measure(file: Path, policy: Path, seed: int, wanted: int) -> None:
    """Episodes of a policy as it is."""
    if len(read(file)) < wanted:
        with server(policy, file.with_suffix(".log"), "--max-batch", "1") as endpoint:
            act(file, endpoint, seed, lambda done: len(done) >= wanted)


def act(file: Path, endpoint: str, seed: int, enough: Any, live: Path | None = None, helped: bool = False) -> None:
    """Episodes on the emulated robot until there are enough; each is a line of ``file``, and recorded into ``live``."""
    from robot_operator import Helper

    from robot_drivers import make_driver
    from robot_drivers.lerobot_health import JUMP_S
    from robot_drivers.so101_emulator import Emulator
    from vla_stack.console.run_recording import RunRecording
    from vla_stack.runtime.executor import ExecutorConfig
    from vla_stack.runtime.node import Operator, RobotNode

    if enough(done := read(file)):
        return
    with tempfile.TemporaryDirectory() as folder, Emulator(Path(folder), TASK) as arm:
        for joint in OFF:
            arm.inject("tooth", joint)
        fields = {**arm.device(), "cameras": arm.cameras, "rate_hz": RATE_HZ, "robot_type": "so101_follower"}
        maker = partial(make_driver, "lerobot", task=f"pick up the {COLOUR} cube", **fields)
        limit, channels = round((SECONDS + helped * HELP_S) * RATE_HZ), f"ipc://{folder}/operator"
        operator = Operator(channels) if helped else None
        with (
            RobotNode(endpoint, maker, ExecutorConfig(mode="sync"), rearm=lambda: True, operator=operator) as node,
            Helper(channels, arm, PATIENCE) if helped else contextlib.nullcontext() as helper,
        ):
            recording = RunRecording(live, node.robot, node.joints) if live else None
            while not enough(done):
                scene = seed + len(done)
                arm.reset(scene, {"colour": COLOUR})
                time.sleep(JUMP_S)  # the driver believes no arm that is elsewhere at once, as this one is
                if recording:
                    recording.begin(scene)

                if helper:
                    helper.begin()

                def watch(obs: Observation) -> None:
                    if helper:
                        helper.see(obs.step)
                    late = helper and helper.since is not None and obs.step - helper.since >= limit
                    if late or arm.status()["success"]:
                        node.abort()

                found = node.run_episode(scene, limit, watch, recording.frame if recording else None).summary
                status, waited = arm.status(), (helper.since or 0) if helper else 0
                done.append(
                    {
                        "seed": scene,
                        "success": bool(status["success"]),
                        "seconds": (found["steps"] - waited) / RATE_HZ,
                        "helped": bool(helper and found["operator"]["takeovers"]),
                        "overruns": found["ticks"]["overrun"],
                        "stops": found["ticks"].get("stop", 0),
                        "why": f"{found['safety']} {found['operator'] or ''}" * ("stop" in found["ticks"]),
                        "stalled_s": status["skipped_s"],
                        "model": node.model_version,
                    }
                )
                if recording:  # first what is learnt from: a line without its episode would tell of what nobody learns
                    done[-1]["recorded"] = recording.end(done[-1]["success"])
                with file.open("a") as lines:
                    lines.write(json.dumps(done[-1]) + "\n")
                print(f"{len(done)}: {'success' if done[-1]['success'] else 'failure'}", flush=True)
            if recording:
                recording.close()


# -- the robot and the learner -----------------------------------------------------------------------------------------


def run(args: argparse.Namespace, out: Path, policy: Path, data: Path, arm: str, seed: int) -> None:
    """One arm and seed: acting and learning side by side, both killed now and then; then the last test."""
    out.mkdir(parents=True, exist_ok=True)
    episodes, live, learnt = out / "episodes.jsonl", out / "live", out / "run"
    kills = out / "kills.json"
    method, helped, _ = ARMS[arm]
    remembered = ",".join(map(str, range(args.demonstrations)))
    begin = [f"policy={policy}", f"data.root={data}", f"data.episodes=[{remembered}]"]
    if minutes(read(episodes)) < args.minutes:
        learner = learn(out, begin, live, learnt, method, seed)
        wait_for(learnt / "checkpoints" / "last", learner)
        rng, killed = random.Random(seed), json.loads(kills.read_text()) if kills.exists() else []
        with server(learnt, out / "server.log", "--max-batch", "1", "--follow") as endpoint:
            while minutes(read(episodes)) < args.minutes:
                left = args.minutes - minutes(read(episodes))
                actor = mp.get_context("spawn").Process(
                    target=act_for,
                    args=(episodes, endpoint, LIVE_SEED + 10_000 * seed, args.minutes, live, helped),
                )
                actor.start()
                doomed = len(killed) < 2 * args.kills
                gap_s = 60.0 * left / max(1, 2 * args.kills - len(killed))
                actor.join(gap_s * rng.uniform(0.7, 1.3) if doomed else None)
                if learner.poll() is not None:
                    raise SystemExit(f"the learner ended: {out / 'learner.log'}")
                if not doomed or not actor.is_alive():
                    if actor.exitcode:
                        raise SystemExit(f"the actor ended with {actor.exitcode}")
                    continue
                if len(killed) % 2:  # one of them, and then the other
                    learner.kill()
                    learner.wait()
                    learner = learn(out, begin, live, learnt, method, seed)
                    killed.append("learner")
                else:
                    killed.append("actor")
                actor.kill()  # also where the learner was: it begins anew below
                actor.join()
                kills.write_text(json.dumps(killed))
        catch_up(learner, learnt, live)
        learner.send_signal(signal.SIGTERM)
        learner.wait()
    measure(out / "final.jsonl", learnt, FINAL_SEED, args.episodes)


def act_for(file: Path, endpoint: str, seed: int, most: float, live: Path, helped: bool) -> None:
    act(file, endpoint, seed, lambda done: minutes(done) >= most, live, helped)


def learn(out: Path, begin: list[str], live: Path, run: Path, method: str, seed: int) -> subprocess.Popen[bytes]:
    """The learner, begun or gone on with."""
    words = ["--resume", str(run)]
    if not (run / "checkpoints" / "last").exists():
        words = ["rl_robot", *begin, f"output_dir={run}", f"seed={seed}"]
        words.append(f"method={{name: {method}, live: {live}, {OPTIONS}}}")
    with (out / "learner.log").open("ab") as log:
        return subprocess.Popen([*VLA, "train", *words], stdout=log, stderr=log)


def wait_for(path: Path, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not path.exists():
        if process.poll() is not None or time.monotonic() > end:
            raise SystemExit(f"the learner did not begin; see learner.log beside {path.parents[2]}")
        time.sleep(0.5)


def catch_up(learner: subprocess.Popen[bytes], run: Path, live: Path) -> None:
    """Wait until the learner has learnt from all that was recorded."""
    from vla_stack.data.layout import read_info

    end, per = time.monotonic() + PATIENCE_S, 2
    whole = read_info(live)["total_episodes"] // per
    while (learnt := max((row["step"] for row in read(run / "metrics.jsonl")), default=0)) < whole:
        if learner.poll() is not None or time.monotonic() > end:
            raise SystemExit(f"the learner stands at iteration {learnt} of {whole}")
        time.sleep(0.5)


def read(file: Path) -> list[dict[str, Any]]:
    """Lines of JSON; of one that was cut off, those before."""
    found = []
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


def minutes(episodes: list[dict[str, Any]]) -> float:
    return sum(e["seconds"] for e in episodes) / 60.0


# -- the report --------------------------------------------------------------------------------------------------------


def report(args: argparse.Namespace) -> None:
    starts, arms = known()
    if begun := [bool(episode["success"]) for episode in read(args.out / "start.jsonl")]:
        starts = [*(start for start in starts if start != begun), begun]
    if not starts:
        sys.exit(f"{args.out} holds no runs yet")
    for arm in ARMS:
        here = [cell for seed in range(args.seeds) if (cell := read_cell(args.out / f"{arm}-{seed}", args, seed))]
        there = {cell["seed"]: cell for cell in arms.get(arm, [])} | {cell["seed"]: cell for cell in here}
        arms[arm] = [there[seed] for seed in sorted(there)]
    first = max(starts, key=sum)  # of several machines, whose starts differ by rounding
    checks = [
        Check("start: success", sum(first) / len(first), 0.5, "<=", interval=success_interval(sum(first), len(first)))
    ]
    for arm, cells in arms.items():
        if not cells:
            continue
        rates = [cell["final"] for cell in cells]
        method, helped, label = ARMS[arm]
        asked = method == "dsrl_na"
        checks += [
            Check(f"{label}: success after {args.minutes:g} robot minutes", sum(rates) / len(rates),
                  0.95 if asked else None, interval=rates_interval(rates, args.episodes), why=WHY),
            Check(f"{label}: episodes in that time", sum(cell["episodes"] for cell in cells) / len(cells)),
            Check(f"{label}: kills -9 of learner and actor", sum(cell["kills"] for cell in cells)),
            Check(f"{label}: episodes that were not learnt from", sum(cell["lost"] for cell in cells), 0, "<="),
            Check(f"{label}: ticks that were missed, share", max(cell["overruns"] for cell in cells)),
            Check(f"{label}: stops", sum(cell["stops"] for cell in cells), 0, "<="),
        ]  # fmt: skip
        if helped:
            share = sum(cell["helped"] for cell in cells) / len(cells)
            checks.append(Check(f"{label}: episodes in which it took over, share", share))
    data = {"starts": starts, "cells": {arm: cells for arm, cells in arms.items() if cells}}
    write("rl_robot", checks, data, seeds=[LIVE_SEED, FINAL_SEED, START_SEED])
    plot(sum(first) / len(first), data["cells"])


def known() -> tuple[list[list[bool]], dict[str, list[dict[str, Any]]]]:
    """First tests and cells that were published, from other machines among them; none where all is measured anew."""
    path = RESULTS / "rl_robot.json"
    if not path.exists() or os.environ.get(freshness.ANEW):
        return [], {}
    data = read_json(path)["data"]
    return data["starts"], data["cells"]


def plot(start: float, arms: dict[str, list[dict[str, Any]]]) -> None:
    """Write ``docs/results/rl_robot.svg``: success in the course of a run, and in its last test."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.4), layout="constrained")
    axes = figure.subplots()
    axes.axhline(start, color="grey", linewidth=1, linestyle="--", label="before")
    for i, (arm, cells) in enumerate(arms.items()):
        for n, cell in enumerate(cells):
            colour, label = f"C{i}", ARMS[arm][2] if not n else None
            axes.plot(cell["minutes"], cell["curve"], "o-", color=colour, linewidth=1, markersize=3, label=label)
            axes.plot(cell["minutes"][-1:], [cell["final"]], "D", color=colour)
    axes.set(
        xlabel="robot minutes", ylabel=f"success of {WINDOW} episodes; \N{BLACK DIAMOND} the last test", ylim=(0, 1)
    )
    axes.grid(alpha=0.2)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(RESULTS / "rl_robot.svg", metadata={"Date": None})


def read_cell(out: Path, args: argparse.Namespace, seed: int) -> dict[str, Any] | None:
    """Figures of a run; None where it is not over."""
    from vla_stack.data.layout import read_info

    lived, final = read(out / "episodes.jsonl"), read(out / "final.jsonl")
    if len(final) < args.episodes:
        return None
    won = [e["success"] for e in lived]
    rows = read(out / "run" / "metrics.jsonl")
    recorded, learnt = read_info(out / "live")["total_episodes"], 2 * max(row["step"] for row in rows)
    return {
        "seed": seed,
        "final": sum(e["success"] for e in final) / len(final),
        "episodes": len(lived),
        "curve": [sum(won[i : i + WINDOW]) / len(won[i : i + WINDOW]) for i in range(0, len(won), WINDOW)],
        "minutes": [minutes(lived[: i + WINDOW]) for i in range(0, len(won), WINDOW)],
        "kills": len(json.loads((out / "kills.json").read_text())) if (out / "kills.json").exists() else 0,
        "lost": recorded - learnt - recorded % 2 + len(lived) - sum(e["recorded"] for e in lived),
        "helped": sum(e["helped"] for e in lived) / len(lived),
        "overruns": sum(e["overruns"] for e in lived) / (RATE_HZ * 60 * minutes(lived)),
        "stops": sum(e["stops"] > 0 for e in lived),
        "models": len({e["model"] for e in lived}),
    }


def vla(*words: str) -> None:
    subprocess.run([*VLA, *words], check=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())

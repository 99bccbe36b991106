"""From simulation to a real driver without a robot: a policy trained in simulation picks through the emulated SO-101.

    python tools/reproduce/hil_so101.py [--out outputs/hil] [--policy DIR] [--episodes 24]

Demonstrations of the scripted expert, training, and an evaluation in simulation; then the same policy, served, drives
LeRobot's unmodified SO-101 driver in real time: asynchronous executor, serial protocol on a pseudo-terminal, servos'
registers, MuJoCo arm, cameras over ZeroMQ. The policy sees pictures and joint readings; the emulator judges success
from where the cubes are. What is there already is not done again: interrupt and continue as you like.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from results import ROOT, Check, parser, write
from robot_drivers import make_driver
from robot_drivers.lerobot_health import JUMP_S
from robot_drivers.so101_emulator import Emulator
from vla_stack.runtime.executor import ExecutorConfig
from vla_stack.runtime.node import RobotNode
from vla_stack.statistics import success_interval
from vla_stack.verbs.demo import server

TASK, COLOURS = "so101_pick", ("red", "green", "blue")
RATE_HZ, SECONDS = 10.0, 8.0  # an expert needs one and a half
EXPERT_SEEDS, SIM_EPISODES, SIM_SEED, SEED = 200, 100, 20_000, 30_000
SIM_BOUND, BOUND = 0.8, 0.8


def main() -> int:
    p = parser(__doc__)
    p.add_argument("--out", type=Path, default=Path("outputs/hil"))
    p.add_argument("--policy", type=Path, help="deploy this policy instead of training one")
    p.add_argument("--demonstrations", type=int, default=1000)
    p.add_argument("--episodes", type=int, default=24)
    args = p.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    expert = cached(args.out / "expert.json", expert_success)
    policy = args.policy or train(args)
    sim = cached(args.out / "sim.json", lambda: evaluate(policy))
    episodes = deploy(policy, args.out / "episodes.json", args.episodes)
    report(expert, sim, episodes)
    return 0


def expert_success() -> dict[str, Any]:
    """The scripted expert on seeds that nothing else uses."""
    import gymnasium as gym

    import sim

    env = gym.make(sim.TASKS[TASK].id, cameras=())
    successes = 0
    for seed in range(EXPERT_SEEDS):
        _, info = env.reset(seed=seed)
        expert, done = sim.make_expert(env, seed=seed), False
        while not done:
            _, _, terminated, truncated, info = env.step(expert.act())
            done = terminated or truncated
        successes += bool(info["is_success"])
    return {"successes": successes, "episodes": EXPERT_SEEDS}


def train(args: argparse.Namespace) -> Path:
    """Collect and train as a person would; returns the policy's directory."""
    data, run = args.out / "data", args.out / "train"
    vla("collect", "--task", TASK, "--episodes", str(args.demonstrations), "--noise", "0.3", "--root", str(data))
    policy = run / "checkpoints/last/pretrained_model"
    if (run / "checkpoints").exists():
        vla("train", "--resume", str(run))
    else:
        vla("train", str(ROOT / "vla_stack/configs/so101_pick.yaml"), f"data.root={data}", f"output_dir={run}")
    return policy


def evaluate(policy: Path) -> dict[str, Any]:
    """In simulation, asynchronously with a step of delay."""
    from vla_stack.evaluation.evaluate import evaluate as rollouts
    from vla_stack.policies.chunk_policy import load_policy
    from vla_stack.rollout.latency import Latency

    result = rollouts(
        load_policy(policy), f"sim/{TASK}-v0", SIM_EPISODES, SIM_SEED, ExecutorConfig(), Latency(1 / RATE_HZ)
    )
    return {"successes": int(result.successes), "episodes": SIM_EPISODES}


def deploy(policy: Path, file: Path, wanted: int) -> list[dict[str, Any]]:
    """Episodes through driver, bus and plant; as many of each colour."""
    episodes = json.loads(file.read_text()) if file.exists() else []
    if len(episodes) >= wanted:
        return episodes
    log = file.with_suffix(".log")
    with tempfile.TemporaryDirectory() as folder, server(policy, log) as endpoint, Emulator(Path(folder), TASK) as arm:
        for colour in COLOURS:
            fields = {**arm.device(), "cameras": arm.cameras, "rate_hz": RATE_HZ, "robot_type": "so101_follower"}
            maker = partial(make_driver, "lerobot", task=f"pick up the {colour} cube", **fields)
            done = {e["seed"] for e in episodes}
            seeds = [s for s in range(SEED, SEED + wanted) if COLOURS[s % 3] == colour and s not in done]
            if not seeds:
                continue
            with RobotNode(endpoint, maker, ExecutorConfig(), rearm=lambda: True) as node:
                for seed in seeds:
                    episodes.append(one(node, arm, seed, colour))
                    file.write_text(json.dumps(episodes, indent=1))
                    print(len(episodes), colour, episodes[-1]["success"], round(episodes[-1]["seconds"], 1), flush=True)
    return episodes


def one(node: RobotNode, arm: Emulator, seed: int, colour: str) -> dict[str, Any]:
    """One episode; it ends at success or when time is over."""
    arm.reset(seed, {"colour": colour})
    time.sleep(JUMP_S)  # the driver believes no arm that is elsewhere at once, as this one is

    def watch(_: object) -> None:
        if arm.status()["success"]:
            node.abort()

    summary = node.run_episode(seed, round(SECONDS * RATE_HZ), watch).summary
    status = arm.status()
    return {
        "seed": seed,
        "instruction": f"pick up the {colour} cube",
        "success": bool(status["success"]),
        "seconds": status["success_s"] if status["success"] else SECONDS,
        "stage": status["stage"],
        "steps": summary["steps"],
        "idle_ticks": summary["idle_ticks"],
        "delay_ticks": summary["delay_ticks"]["mean"],
        "lateness_ms": summary["lateness_ms"]["p99"],
        "stalled_s": status["skipped_s"],
    }


def report(expert: dict[str, Any], sim: dict[str, Any], episodes: list[dict[str, Any]]) -> None:
    n, successes = len(episodes), sum(e["success"] for e in episodes)
    idle = sum(e["idle_ticks"] for e in episodes) / sum(e["steps"] for e in episodes)
    rate, sim_rate = successes / n, sim["successes"] / sim["episodes"]
    failed = [f"{e['instruction']}: stage {e['stage']}" for e in episodes if not e["success"]]
    checks = [
        Check("expert in simulation: success", expert["successes"] / expert["episodes"], 0.95,
              interval=success_interval(expert["successes"], expert["episodes"])),
        Check("policy in simulation: success", sim_rate, SIM_BOUND,
              interval=success_interval(sim["successes"], sim["episodes"])),
        Check("policy through LeRobot's driver, emulated bus and arm: success", rate, BOUND,
              interval=success_interval(successes, n), why="" if rate >= BOUND else "; ".join(failed)),
        Check("episodes through the driver", n, 20),
        Check("mean delay of a chunk, steps", sum(e["delay_ticks"] for e in episodes) / n),
        Check("control ticks without an action", idle),
    ]  # fmt: skip
    write("hil_so101", checks, {"expert": expert, "simulation": sim, "episodes": episodes}, seeds=[SIM_SEED, SEED])


def cached(file: Path, make: Any) -> Any:
    if not file.exists():
        file.write_text(json.dumps(make()))
    return json.loads(file.read_text())


def vla(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "vla_stack.cli", *words], check=True)


if __name__ == "__main__":
    sys.exit(main())

"""Our soft actor-critic against stable-baselines3's on a gymnasium MuJoCo task: equal steps, final return and speed.

    python tools/bench/sac.py [seeds]

Same networks, rates, batch and schedule (stable-baselines3's defaults), one thread each, in turns in one process, which
keeps its memory as ``vla train`` does. Speed
counts environment and update steps together, after the first random ones, in a second of this process's CPU time: what
else the machine does weighs little in it. How fast it could be in float32, say the matrix products of one update, each
as it is in there, done again without anything between them. The final return is the mean of 20 episodes
of the mode, on the same starts; the interval is over seeds and starts, paired.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import gymnasium as gym
import numpy as np
import torch
from stable_baselines3 import SAC
from torch.utils._python_dispatch import TorchDispatchMode

from results import Check, parser, write
from vla_stack.methods.replay_buffer import Batch, ReplayBuffer, Transition
from vla_stack.methods.sac import Sac, SacRecipe
from vla_stack.statistics import seeds_interval
from vla_stack.training.placement import use_threads

ENV, STEPS, START, EPISODES, EVAL_SEED = "InvertedPendulum-v5", 10_000, 100, 20, 50_000
ASKED = 2.5  # times the steps of stable-baselines3
REPEATS = 300  # of an update, and of its products
PRODUCTS = {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm}


def ours(seed: int) -> tuple[float, list[float]]:
    env, rng = gym.make(ENV), np.random.default_rng(seed)
    scale = float(env.action_space.high[0])  # type: ignore[attr-defined]
    widths = int(np.prod(env.observation_space.shape or ())), int(np.prod(env.action_space.shape or ()))
    agent, buffer = Sac(SacRecipe(), *widths, seed), ReplayBuffer(STEPS, *widths)
    seeds, zero = iter(range(10_000 * seed, 10_000 * (seed + 1))), np.zeros(1, np.int64)
    obs, began, over = np.zeros(widths[0], np.float32), 0.0, True
    for t in range(STEPS):
        if over:
            obs = env.reset(seed=next(seeds))[0].astype(np.float32)
        if t < START:
            action = rng.uniform(-1.0, 1.0, (1, widths[1])).astype(np.float32)
        else:
            action = agent.act(torch.from_numpy(obs[None])).numpy()
        raw, reward, terminated, truncated, _ = env.step(scale * action[0])
        after = raw.astype(np.float32)
        ends = np.array([terminated]), np.array([truncated])
        buffer.add(Transition(obs[None], action, np.full(1, reward), *ends, after[None], zero, zero, zero))
        obs, over = after, terminated or truncated
        if t == START:
            began = time.process_time()
        if t >= START:
            agent.update(buffer.sample(agent.recipe.batch, 1, rng))
    speed = (STEPS - START) / (time.process_time() - began)
    return speed, returns(lambda o: agent.act(torch.from_numpy(o[None]), explore=False)[0].numpy())


class Products(TorchDispatchMode):
    """Keeps the matrix products that are done under it, with what they multiply."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in PRODUCTS:
            self.found.append((func, args))
        return func(*args, **(kwargs or {}))


def update_s() -> tuple[float, float]:
    """CPU seconds of one of our updates, and of its matrix products alone."""
    env, n = gym.make(ENV), SacRecipe().batch
    widths = int(np.prod(env.observation_space.shape or ())), int(np.prod(env.action_space.shape or ()))
    agent, rng = Sac(SacRecipe(), *widths, 0), torch.Generator().manual_seed(0)
    obs, after = torch.randn(2, n, widths[0], generator=rng)
    actions, each = torch.rand(n, widths[1], generator=rng), torch.rand(n, generator=rng)
    batch = Batch(obs, actions, each, after, each, each, torch.arange(n))
    agent.update(batch)
    with Products() as products:
        agent.update(batch)

    def multiply() -> None:
        with torch.no_grad():
            for func, args in products.found:
                func(*args)

    return seconds(lambda: agent.update(batch)), seconds(multiply)


def seconds(work: Any) -> float:
    """CPU seconds that ``work`` takes, a mean."""
    work()
    began = time.process_time()
    for _ in range(REPEATS):
        work()
    return (time.process_time() - began) / REPEATS


def peer(seed: int) -> tuple[float, list[float]]:
    model = SAC("MlpPolicy", gym.make(ENV), learning_starts=START, seed=seed, device="cpu", buffer_size=STEPS)
    model.learn(START)
    began = time.process_time()
    model.learn(STEPS - START, reset_num_timesteps=False)
    speed = (STEPS - START) / (time.process_time() - began)
    scale = float(gym.make(ENV).action_space.high[0])
    return speed, returns(lambda o: model.predict(o, deterministic=True)[0] / scale)


def returns(act: Any) -> list[float]:
    """Return of each evaluation episode under actions in [-1, 1]."""
    env, out = gym.make(ENV), []
    scale = float(env.action_space.high[0])  # type: ignore[attr-defined]
    for i in range(EPISODES):
        obs, total, over = env.reset(seed=EVAL_SEED + i)[0], 0.0, False
        while not over:
            obs, reward, terminated, truncated, _ = env.step(scale * np.clip(act(obs.astype(np.float32)), -1.0, 1.0))
            total, over = total + float(reward), terminated or truncated
        out.append(total)
    return out


def main(seeds: int) -> int:
    use_threads(1)
    runs: dict[str, list[tuple[float, list[float]]]] = {"ours": [], "stable-baselines3": []}
    for seed in range(seeds):
        for name, run in (("ours", ours), ("stable-baselines3", peer)):
            runs[name].append(run(seed))
            speed, earned = runs[name][-1]
            print(f"seed {seed} {name:<18} {speed:7.1f} steps/s  return {np.mean(earned):.1f}", flush=True)
    speeds = {name: np.array([r[0] for r in rows]) for name, rows in runs.items()}
    final = {name: np.array([r[1] for r in rows]) for name, rows in runs.items()}
    ratio = float(np.median(speeds["ours"] / speeds["stable-baselines3"]))
    apart = seeds_interval(final["ours"], final["stable-baselines3"])
    why = "the interval of the difference in final return lies below 0"
    update, products = update_s()
    could = 1.0 / (1.0 / float(np.median(speeds["ours"])) - update + products)
    could /= float(np.median(speeds["stable-baselines3"]))
    limit = f"matrix products in float32 are {products / update:.0%} of an update; alone they would be at {could:.2f}"
    checks = [
        Check("steps a CPU second, ours over stable-baselines3, median of seeds", ratio, ASKED, why=limit),
        Check("the same if an update were its matrix products alone", could),
        Check("CPU time of an update over that of its matrix products", update / products),
        Check("final return, ours minus stable-baselines3, upper end", apart.high, 0.0, interval=apart, why=why),
        Check("final return, ours minus stable-baselines3", apart.value, interval=apart),
        *(Check(f"{name}: final return", float(r.mean())) for name, r in final.items()),
        *(Check(f"{name}: steps a CPU second", float(np.median(s))) for name, s in speeds.items()),
    ]
    data = {"env": ENV, "steps": STEPS, "episodes": EPISODES, "torch_threads": 1}
    runs_data = {name: [{"steps_per_s": s, "returns": r} for s, r in rows] for name, rows in runs.items()}
    write("sac", checks, data | {"runs": runs_data}, seeds=range(seeds))
    return 0


if __name__ == "__main__":
    p = parser(__doc__)
    p.add_argument("seeds", type=int, nargs="?", default=5, help="number of seeds (default: %(default)d)")
    sys.exit(main(p.parse_args().seeds))

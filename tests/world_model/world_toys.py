"""A recorded arm in noise, small enough to train on in a test."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from sim.arm import ARM7
from vla_stack.data.features import Column
from vla_stack.data.recorder import EpisodeRecorder
from vla_stack.rollout.collect import COMMAND_SENT, SEED
from vla_stack.schema import Observation, RobotSpec

SIZE = 16
TASKS = ("pick up the red cube", "pick up the blue cube")
ROBOT = ARM7.spec("ee_abs", ("front", "wrist"), SIZE, 10.0)
RECIPE = """
task: sim/pick-v0
method:
  name: world_model
  vae: {stem: 2, widths: [8], channels: 4}
  dynamics: {history: 2, future: 2, width: 8, blocks: 1, heads: 2, patch: 2, members: 2}
  heads: {width: 8, judges: 2, window: 4, rollout: 6}
  generated: 4
  save_every: 1
  train_vae: {steps: 2, batch_size: 4}
  train_dynamics: {steps: 2, batch_size: 2}
  train_heads: {steps: 2, batch_size: 4}
eval: {every: 2}
threads: 1
precision: fp32
device: cpu
"""


def record(
    root: Path, episodes: int = 10, frames: int = 8, robot: RobotSpec = ROBOT, tasks: tuple[str, ...] = TASKS
) -> Path:
    """Episodes of random poses and pictures; every second one succeeds in its last two steps."""
    rng = np.random.default_rng(0)
    names = tuple(d.name for d in robot.action)
    extra = {SEED: Column("int64"), COMMAND_SENT: Column("float32", (len(names),), names)}
    low, high = robot.action_low, robot.action_high
    further = len(robot.state) - len(robot.action)
    with EpisodeRecorder(root, robot, "image", (), extra) as recorder:
        for e in range(episodes):
            for k in range(frames):
                state = np.concatenate([rng.uniform(low, high), rng.normal(size=further)]).astype(np.float32)
                pictures = {c: rng.integers(0, 255, (SIZE, SIZE, 3), dtype=np.uint8) for c in ("front", "wrist")}
                action = rng.uniform(low, high).astype(np.float32)
                obs = Observation(state, pictures, tasks[e % len(tasks)], k, k * 100_000_000)
                won = bool(e % 2) and k >= frames - 3
                recorder.add_frame(obs, action, None, float(won), **{SEED: e, COMMAND_SENT: action})  # type: ignore[arg-type]
            recorder.save_episode(bool(e % 2))
    return root

"""Episodes of the memory proof of ``world_model.py``: what is out of sight has a colour."""

from __future__ import annotations

import colorsys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

import sim
from sim.behaviours import Behaviour
from vla_stack.data.dataset import open_dataset
from vla_stack.data.features import Column
from vla_stack.data.recorder import EpisodeRecorder
from vla_stack.rollout.collect import COMMAND_SENT, SEED
from vla_stack.schema import Observation

HUES = 6
CUBES = ("cube_red", "cube_green", "cube_blue")


def hue(episode: int) -> int:
    """Class of an episode; every tenth one, which is held out, has another."""
    return (episode + episode // 10) % HUES


def colour(episode: int) -> tuple[float, float, float]:
    return colorsys.hsv_to_rgb(hue(episode) / HUES, 0.75, 0.85)


def record(root: Path, episodes: int) -> None:
    """Episodes of looking away from a cube and back; it alone is there and has the episode's hue, and the front camera
    sees nothing."""
    env = gym.make(sim.TASKS["pick"].id, image_size=64)
    arm: Any = env.unwrapped
    names = tuple(d.name for d in arm.spec_robot.action)
    extra = {SEED: Column("int64"), COMMAND_SENT: Column("float32", (len(names),), names)}
    done = open_dataset(root).num_episodes if (root / "meta" / "info.json").exists() else 0
    with EpisodeRecorder(root, arm.spec_robot, "image", (), extra) as recorder:
        for seed in range(done, episodes):
            _, info = env.reset(seed=seed)
            behaviour = Behaviour(env, "look_away", seed)
            for cube in CUBES:  # a reset restores the colours
                arm.model.geom(cube).rgba[:] = (*colour(seed), float(cube == behaviour.subject))
            raw = arm._observe()
            for k in range(4 * 9):
                pictures = raw["pixels"] | {"front": np.zeros_like(raw["pixels"]["front"])}
                action = behaviour.act()
                observed = Observation(raw["agent_pos"], pictures, info["task"], k, k * 100_000_000)
                raw, _, _, _, info = env.step(action)
                recorder.add_frame(observed, action, None, 0.0, **{SEED: seed, COMMAND_SENT: action})
            recorder.save_episode(False)
    env.close()

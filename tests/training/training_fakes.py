"""A tiny policy on data made up in memory: a run takes a second, so that it can be killed and resumed in a test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lerobot.configs import FeatureType, PolicyFeature

from vla_stack.data.recorder import EpisodeRecorder
from vla_stack.methods.imitation.loss import loss
from vla_stack.policies.configuration_vla import VlaConfig
from vla_stack.policies.modeling_vla import VlaPolicy
from vla_stack.policies.processor_vla import make_vla_pre_post_processors
from vla_stack.schema import Camera, Dim, Observation, RobotSpec
from vla_stack.training.build import Parts
from vla_stack.training.policies import restore
from vla_stack.training.recipe import Recipe

STATE, ACTION, HORIZON, SIDE = 4, 3, 4, 16
KEY = "observation.images.front"


class MadeUp:
    """Loader of random batches; the n-th batch is a function of n alone."""

    def __init__(self, batch_size: int, poison: int | None = None) -> None:
        self.batch_size, self.poison, self.count = batch_size, poison, 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            rng, b = np.random.default_rng(self.count), self.batch_size
            action = rng.standard_normal((b, HORIZON, ACTION), np.float32)
            if self.count == self.poison:
                action[0, 0, 0] = np.nan
            self.count += 1
            yield {
                KEY: rng.integers(0, 256, (b, SIDE, SIDE, 3), np.uint8),
                "observation.state": rng.standard_normal((b, STATE), np.float32),
                "action": action,
                "action_is_pad": np.zeros((b, HORIZON), bool),
                "task": ["pick the red cube"] * b,
                "weight": np.ones(b, np.float32),
            }

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def tiny_config() -> VlaConfig:
    sizes: dict[str, Any] = dict(width=16, expert_width=16, depth=1, heads=2, head_dim=8)
    return VlaConfig(
        chunk_size=HORIZON,
        n_action_steps=2,
        vision_channels=(4, 8),
        vocabulary=257,
        max_tokens=32,
        device="cpu",
        push_to_hub=False,
        action_feature_names=["x", "y", "gripper"],
        input_features={
            KEY: PolicyFeature(FeatureType.VISUAL, (3, SIDE, SIDE)),
            "observation.state": PolicyFeature(FeatureType.STATE, (STATE,)),
        },
        output_features={"action": PolicyFeature(FeatureType.ACTION, (ACTION,))},
        **sizes,
    )


def tiny_parts(recipe: Recipe, checkpoint: Path | None = None, poison: int | None = None) -> Parts:
    """Parts of a run on made-up data; with ``poison``, that batch holds a NaN."""
    torch.manual_seed(recipe.seed)
    config = tiny_config()
    if checkpoint is not None:
        policy, pre, post = restore(checkpoint, config, recipe.policy)
    else:
        policy = VlaPolicy(config)
        pre, post = make_vla_pre_post_processors(config, None)
    return Parts(policy, pre, post, MadeUp(recipe.method.batch_size, poison), loss)


def record(
    root: Path, episodes: int = 3, frames: int = 12, seed: int = 0, task: str = "pick the red cube", rate_hz: int = 10
) -> Path:
    """A small dataset of smooth random motions."""
    dims = tuple(Dim(name, "m") for name in ("x", "y", "gripper"))
    spec = RobotSpec("test/arm", (*dims, Dim("joint", "rad")), dims, (Camera("front", SIDE, SIDE),), rate_hz=rate_hz)
    rng = np.random.default_rng(seed)
    with EpisodeRecorder(root, spec, image_mode="image") as recorder:
        for _ in range(episodes):
            state = rng.standard_normal(4).astype(np.float32)
            for step in range(frames):
                image = rng.integers(0, 256, (SIDE, SIDE, 3), np.uint8)
                action = state[:3] + rng.normal(0, 0.1, 3).astype(np.float32)
                recorder.add_frame(Observation(state, {"front": image}, task, step, step * 10**9 // rate_hz), action)
                state = np.append(action, state[3])
            recorder.save_episode(success=True)
    return root

"""A small native VLA with two 32-pixel cameras, its processors, and observations to feed it."""

import numpy as np
import torch
from lerobot.configs import FeatureType, PolicyFeature

from vla_stack.policies.configuration_vla import VlaConfig
from vla_stack.policies.modeling_vla import VlaPolicy
from vla_stack.schema import ACTION, OBS_STATE, Camera, Dim, Observation, RobotSpec, image_key

SIZE, STATES, ACTIONS = 32, 7, 5
ROBOT = RobotSpec(
    name="test/arm",
    state=tuple(Dim(f"s_{i}", "m") for i in range(STATES)),
    action=tuple(Dim(n, "m") for n in ("x.pos", "y.pos", "z.pos", "yaw.pos", "gripper.pos")),
    cameras=(Camera("front", SIZE, SIZE), Camera("wrist", SIZE, SIZE)),
    rate_hz=10.0,
)


def make_config(**options) -> VlaConfig:
    features = {image_key(c.name): PolicyFeature(FeatureType.VISUAL, (3, SIZE, SIZE)) for c in ROBOT.cameras}
    defaults = {"chunk_size": 8, "n_action_steps": 4, "num_inference_steps": 3, "width": 32, "expert_width": 32}
    small = {"depth": 2, "heads": 2, "head_dim": 16, "vision_channels": (8, 8, 8), "vision_maps": 2}
    return VlaConfig(
        **{
            "device": "cpu",
            "push_to_hub": False,
            "input_features": features | {OBS_STATE: PolicyFeature(FeatureType.STATE, (STATES,))},
            "output_features": {ACTION: PolicyFeature(FeatureType.ACTION, (ACTIONS,))},
            "action_feature_names": [d.name for d in ROBOT.action],
            "robot": ROBOT.to_json(),
            **defaults,
            **small,
            **options,
        }
    )


def make_stats() -> dict[str, dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return {
        key: {"mean": rng.normal(size=n).astype(np.float32), "std": rng.uniform(0.5, 2.0, n).astype(np.float32)}
        for key, n in ((OBS_STATE, STATES), (ACTION, ACTIONS))
    }


def make_policy(**options) -> VlaPolicy:
    """A policy whose gates are open, as after training: at initialisation the expert ignores its context."""
    torch.manual_seed(0)
    policy = VlaPolicy(make_config(**options))
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "modulation" in name or "film" in name:
                parameter.normal_(std=0.3)
    return policy.eval()


def make_observations(n: int, seed: int = 0, task: str = "pick up the red cube") -> list[Observation]:
    rng = np.random.default_rng(seed)
    return [
        Observation(
            state=rng.normal(size=STATES).astype(np.float32),
            images={c.name: rng.integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8) for c in ROBOT.cameras},
            task=task,
        )
        for _ in range(n)
    ]


def make_batch(n: int, horizon: int = 8, seed: int = 0) -> dict:
    """A raw training batch as a loader gives it."""
    generator = torch.Generator().manual_seed(seed)
    images = {image_key(c.name): torch.rand(n, 3, SIZE, SIZE, generator=generator) for c in ROBOT.cameras}
    return images | {
        OBS_STATE: torch.randn(n, STATES, generator=generator),
        ACTION: torch.randn(n, horizon, ACTIONS, generator=generator),
        "action_is_pad": torch.zeros(n, horizon, dtype=torch.bool),
        "task": [("pick up the red cube", "push the blue cube")[i % 2] for i in range(n)],
    }

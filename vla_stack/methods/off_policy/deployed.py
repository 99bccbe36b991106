"""What networks observe, and what is left of a learner when it is deployed: a LeRobot policy, directory and memory."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from vla_stack.errors import UserError
from vla_stack.lerobot_core import FeatureType, PolicyFeature, PreTrainedPolicy
from vla_stack.methods.replay_buffer import Source
from vla_stack.policies.chunk_policy import ChunkPolicy, load_policy
from vla_stack.policies.contract import FlowPolicy
from vla_stack.policies.observer import Observer
from vla_stack.policies.processor_state import CLIP, state_processors
from vla_stack.schema import ACTION, OBS_STATE, Observation, PolicySpec, RobotSpec, image_key

Vector = NDArray[np.float32]


@cache
def frozen_policy(path: str) -> ChunkPolicy | None:
    """The flow policy, native or LeRobot's, whose features are observed, once a process; None where ``path`` is empty.

    Raises:
        UserError: There is no policy, or none with features.
    """
    if not path:
        return None
    policy = load_policy(path)
    if not isinstance(policy.policy, FlowPolicy):
        raise UserError(f"'method.features': {path} is no flow policy", "give a vla, moh, smolvla, pi0 or pi05 policy")
    return policy


def measured(observations: Sequence[Observation], frozen: ChunkPolicy | None) -> Vector:
    """What is observed [n, o], not normalised: the encoder's features, where there is one, and the state."""
    state = np.stack([o.state for o in observations])
    if frozen is None:
        return state
    robot, policy = frozen.spec.robot, frozen.policy
    shown = [replace(o, state=o.state[: len(robot.state)]) for o in observations]
    with torch.inference_mode():
        features = policy.features(policy.encode(frozen.preprocess(shown)))
    return np.concatenate([features.float().numpy(force=True), state], -1)


def normalised(obs: Vector, mean: Vector, std: Vector) -> Vector:
    """Observations [..., o] in standard deviations, at most ``CLIP`` of them."""
    return np.clip((obs - mean) / std, -CLIP, CLIP).astype(np.float32)


def in_range(robot: RobotSpec, commands: Vector) -> Vector:
    """Commands [n, a] as actions in [-1, 1] of a robot's range."""
    low, high = robot.action_low, robot.action_high
    return np.clip((commands - (high + low) / 2) / ((high - low) / 2), -1.0, 1.0).astype(np.float32)


@dataclass(frozen=True)
class Seen:
    """What a policy observes, and what of it.

    Attributes:
        robot: The environment's embodiment, as the policy has to find it wherever it runs.
        mean: Of the vector that networks see, float32 [o]: features of the encoder, then the state.
        std: Likewise.
        frozen: The policy that encodes pictures and instruction; None: the state alone is seen.
    """

    robot: RobotSpec
    mean: Vector
    std: Vector
    frozen: ChunkPolicy | None = None

    def vectors(self, observations: Sequence[Observation]) -> Vector:
        """What networks see [n, o] of observations, as the processors of the policy have it."""
        return normalised(measured(observations, self.frozen), self.mean, self.std)

    @property
    def encoder(self) -> PreTrainedPolicy | None:
        return None if self.frozen is None else self.frozen.policy

    @property
    def feature_dim(self) -> int:
        """Width of the encoder's features, 0 without one."""
        return len(self.mean) - len(self.robot.state)

    def fields(self, device: str) -> dict[str, Any]:
        """Fields of a policy's configuration."""
        inputs = {OBS_STATE: PolicyFeature(FeatureType.STATE, (len(self.robot.state),))}
        inputs |= {
            image_key(c.name): PolicyFeature(FeatureType.VISUAL, (3, c.height, c.width)) for c in self.robot.cameras
        }
        encoder = None
        if self.frozen is not None:
            encoder = copy.copy(self.frozen.policy.config)
            encoder.pretrained_path = None  # its weights are part of the policy's own
        return {
            "input_features": inputs,
            "output_features": {ACTION: PolicyFeature(FeatureType.ACTION, (len(self.robot.action),))},
            "action_feature_names": [d.name for d in self.robot.action],
            "robot": self.robot.to_json(),
            "encoder": encoder,
            "feature_dim": self.feature_dim,
            "device": device,
            "push_to_hub": False,
        }


class Deployable(Protocol):
    """A learner that has something to deploy."""

    def network(self, seen: Seen, source: Source | None = None) -> PreTrainedPolicy: ...


def deployed(learner: Deployable, seen: Seen, source: Source | None = None) -> ChunkPolicy:
    """The policy of a learner, with its present weights and, as they are shared, with those to come.

    Args:
        learner: The learner.
        seen: What it observes.
        source: None: as it is deployed; else as it explores for transitions of that kind.
    """
    network = learner.network(seen, source).eval()
    config: Any = network.config
    own = config.base if config.type == "expo" else config
    width = seen.feature_dim
    for module in network.modules():
        if isinstance(module, Observer) and module.encoder is not None:
            module.mean.copy_(torch.from_numpy(seen.mean[:width]))
            module.std.copy_(torch.from_numpy(seen.std[:width]))
    limits = seen.robot.action_low, seen.robot.action_high
    before = None if seen.frozen is None else seen.frozen.preprocessor
    pre, post = state_processors(own, seen.mean[width:], seen.std[width:], *limits, before)
    horizon = len(config.action_delta_indices)
    extras = {"type": config.type, "n_action_steps": config.n_action_steps, "continues": []}
    return ChunkPolicy(network, pre, post, PolicySpec(seen.robot, horizon, extras=extras))


def save(policy: ChunkPolicy, directory: Path) -> None:
    """Write the policy directory."""
    for part in (policy.policy, policy.preprocessor, policy.postprocessor):
        part.save_pretrained(directory)

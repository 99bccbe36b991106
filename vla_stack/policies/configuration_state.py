"""Configurations of small policies on states, LeRobot policy types ``state_gaussian`` and ``state_flow``.

What reinforcement learning trains at CPU scale. Both see ``observation.state``; with ``encoder`` they see a frozen flow
policy's features of the pictures and the instruction in front of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vla_stack.errors import UserError
from vla_stack.lerobot_core import AdamWConfig, FeatureType, NormalizationMode, PolicyFeature, PreTrainedConfig
from vla_stack.policies.critics import NORM_EPS
from vla_stack.policies.gaussian import LOG_STD
from vla_stack.policies.nested_config import OptionalPolicy
from vla_stack.schema import ACTION, OBS_STATE


@dataclass
class StateConfig(PreTrainedConfig):
    """What both have.

    Attributes:
        chunk_size: Actions of a chunk, h.
        n_action_steps: Actions of a chunk that are executed before the next one is asked for.
        hidden: Widths of the hidden layers.
        encoder: A flow policy whose features are seen beside the state; its weights are part of this policy's. Its
            state are the first entries of this one's.
        feature_dim: Width of its features; 0 without one.
        action_feature_names: Names of the action dimensions.
        robot: ``RobotSpec.to_json()`` of the embodiment.
        normalization_mapping: Not read: the steps of ``processor_state.py`` normalise.
    """

    chunk_size: int = 4
    n_action_steps: int = 4
    hidden: tuple[int, ...] = (256, 256)
    encoder: OptionalPolicy = None
    feature_dim: int = 0
    action_feature_names: list[str] | None = None
    robot: dict[str, Any] | None = None
    normalization_mapping: dict[str, NormalizationMode] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.hidden = tuple(self.hidden)
        if not 1 <= self.n_action_steps <= self.chunk_size:
            raise UserError(
                f"n_action_steps is {self.n_action_steps}, it must lie in 1 ... chunk_size={self.chunk_size}"
            )
        if bool(self.feature_dim) != (self.encoder is not None):
            raise UserError(
                f"feature_dim is {self.feature_dim}, {'with' if self.encoder else 'without'} an encoder",
                "set it to the width of the encoder's features, or to 0 without one",
            )
        if self.encoder is not None:
            self.encoder.device = self.device

    @property
    def obs_dim(self) -> int:
        """Width of what the network sees, o."""
        assert self.robot_state_feature is not None
        return self.feature_dim + self.robot_state_feature.shape[0]

    @property
    def encoder_state_dim(self) -> int:
        """First entries of the state that are the encoder's; all of them without one."""
        own = self.robot_state_feature if self.encoder is None else self.encoder.robot_state_feature
        return own.shape[0] if own else 0

    def validate_features(self) -> None:
        """Check that there is a state to see and an action to give.

        Raises:
            UserError: There is none, or it has fewer entries than the encoder reads.
        """
        if self.robot_state_feature is None or self.action_feature is None:
            raise UserError(f"the policy '{self.type}' needs the features observation.state and action")
        if self.encoder_state_dim > self.robot_state_feature.shape[0]:
            raise UserError(
                f"observation.state has {self.robot_state_feature.shape[0]} entries, the encoder reads "
                f"{self.encoder_state_dim}"
            )

    @property
    def observation_delta_indices(self) -> None:
        return None

    @property
    def action_delta_indices(self) -> list[int]:
        return list(range(self.chunk_size))

    @property
    def reward_delta_indices(self) -> None:
        return None

    def get_optimizer_preset(self) -> AdamWConfig:
        return AdamWConfig(lr=3e-4, weight_decay=0.0)

    def get_scheduler_preset(self) -> None:
        return None


@PreTrainedConfig.register_subclass("state_gaussian")
@dataclass
class StateGaussianConfig(StateConfig):
    """A squashed Gaussian over chunks, the actor of soft actor-critic.

    Attributes:
        layer_norm: Layer norm before each ReLU.
        norm_eps: Added to the variance of a layer norm.
        log_std: Bounds of log sigma.
        noise_scale: Standard deviation of the noise that is drawn with: 0 acts by the mode, 1 explores.
    """

    layer_norm: bool = True
    norm_eps: float = NORM_EPS
    log_std: tuple[float, float] = LOG_STD
    noise_scale: float = 0.0


@PreTrainedConfig.register_subclass("state_flow")
@dataclass
class StateFlowConfig(StateConfig):
    """A flow policy, of one network of state, noisy chunk and time.

    Attributes:
        num_inference_steps: Euler steps of one chunk.
    """

    hidden: tuple[int, ...] = (256, 256, 256)
    num_inference_steps: int = 4


def vector_features(state: int, action: int) -> tuple[dict[str, PolicyFeature], dict[str, PolicyFeature]]:
    """Input and output features of a policy that sees a state alone."""
    inputs = {OBS_STATE: PolicyFeature(FeatureType.STATE, (state,))}
    return inputs, {ACTION: PolicyFeature(FeatureType.ACTION, (action,))}

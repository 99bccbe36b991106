"""Configuration of the native VLA, LeRobot policy type ``vla``. The defaults are the preset ``tiny``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lerobot.configs import FeatureType, NormalizationMode, PreTrainedConfig
from lerobot.optim import AdamWConfig, CosineDecayWithWarmupSchedulerConfig

from vla_stack.errors import UserError


@PreTrainedConfig.register_subclass("vla")
@dataclass
class VlaConfig(PreTrainedConfig):
    """A vision-language-action policy with a flow-matching action expert.

    Attributes:
        chunk_size: Actions per chunk, H.
        n_action_steps: Actions of a chunk that ``select_action`` executes before it asks for the next chunk.
        num_inference_steps: Euler steps of one chunk.
        noise_scale: Standard deviation of the noise that sampling starts from; training always uses 1. Below 1 chunks
            keep to the likely ones, and consecutive chunks agree with each other: a policy that is drawn anew every few
            steps otherwise hesitates wherever the demonstrations leave the moment of a grasp open. 0 is deterministic.
        width: Width of prefix tokens; also of the pooled features.
        expert_width: Width of action tokens.
        depth: Layers of prefix transformer and expert; layer l of the expert reads keys and values of prefix layer l.
        heads: Attention heads, of ``head_dim`` each, the same in prefix and expert.
        head_dim: Width of one head.
        vision_channels: Output channels of an image encoder's convolutions; all but the last halve the resolution.
        vision_maps: Maps that an image encoder's features are squeezed to.
        tokens_per_camera: Prefix tokens a camera.
        vocabulary: Buckets of the word hash.
        max_words: Longest instruction.
        use_relative_actions: Learn actions relative to the state at the chunk's start.
        relative_exclude_joints: Action dimensions that stay absolute (LeRobot matches substrings of names).
        action_feature_names: Names of the action dimensions; filled in from the dataset.
        robot: ``RobotSpec.to_json()`` of the embodiment; filled in from the dataset.
        embodiments: ``Embodiment.to_json()`` of each robot of a policy that drives several; filled in from the recipe's
            sources. The features are then camera slots and the padded sizes of state and action; ``robot`` is unset.
        max_state_dim: Least padded size of the state of such a policy, room for robots that it is to learn later.
        max_action_dim: Likewise of the action.
    """

    chunk_size: int = 16
    n_action_steps: int = 8
    num_inference_steps: int = 10
    noise_scale: float = 1.0

    width: int = 128
    expert_width: int = 128
    depth: int = 3
    heads: int = 4
    head_dim: int = 32
    vision_channels: tuple[int, ...] = (32, 64, 64)
    vision_maps: int = 8
    tokens_per_camera: int = 2
    vocabulary: int = 1024
    max_words: int = 16

    use_relative_actions: bool = True
    relative_exclude_joints: list[str] = field(default_factory=lambda: ["gripper"])
    action_feature_names: list[str] | None = None
    robot: dict[str, Any] | None = None
    embodiments: list[dict[str, Any]] = field(default_factory=list)
    max_state_dim: int = 0
    max_action_dim: int = 0

    optimizer_lr: float = 1e-3
    optimizer_weight_decay: float = 1e-4
    optimizer_grad_clip_norm: float = 1.0
    scheduler_warmup_steps: int = 50
    scheduler_decay_steps: int = 2000
    scheduler_decay_lr: float = 1e-5

    normalization_mapping: dict[str, NormalizationMode] = field(
        default_factory=lambda: {
            "VISUAL": NormalizationMode.IDENTITY,
            "STATE": NormalizationMode.MEAN_STD,
            "ACTION": NormalizationMode.MEAN_STD,
        }
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.n_action_steps <= self.chunk_size:
            raise UserError(
                f"n_action_steps is {self.n_action_steps}, it must lie in 1 ... chunk_size={self.chunk_size}"
            )

    def validate_features(self) -> None:
        """Check that the features describe a robot that this policy can drive.

        Raises:
            UserError: There is no state or action, or the state is too short to anchor relative actions.
        """
        if self.robot_state_feature is None or self.action_feature is None:
            raise UserError("the policy 'vla' needs the features observation.state and action")
        states, actions = self.robot_state_feature.shape[0], self.action_feature.shape[0]
        if self.use_relative_actions and states < actions and not self.embodiments:
            raise UserError(
                f"observation.state has {states} entries, action {actions}: relative actions need each one measured",
                "set use_relative_actions=false",
            )

    @property
    def camera_keys(self) -> list[str]:
        """Feature keys of the cameras, in the order in which the policy consumes them."""
        return [key for key, ft in (self.input_features or {}).items() if ft.type is FeatureType.VISUAL]

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
        return AdamWConfig(
            lr=self.optimizer_lr,
            betas=(0.9, 0.99),
            weight_decay=self.optimizer_weight_decay,
            grad_clip_norm=self.optimizer_grad_clip_norm,
        )

    def get_scheduler_preset(self) -> CosineDecayWithWarmupSchedulerConfig:
        return CosineDecayWithWarmupSchedulerConfig(
            peak_lr=self.optimizer_lr,
            decay_lr=self.scheduler_decay_lr,
            num_warmup_steps=self.scheduler_warmup_steps,
            num_decay_steps=self.scheduler_decay_steps,
        )

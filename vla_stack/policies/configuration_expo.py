"""Configuration of EXPO's policy (arXiv:2507.07986), LeRobot policy type ``expo``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lerobot.configs import NormalizationMode, PreTrainedConfig
from lerobot.optim import LRSchedulerConfig, OptimizerConfig

from vla_stack.errors import UserError
from vla_stack.policies.configuration_state import StateFlowConfig
from vla_stack.policies.nested_config import AnyPolicy

WIDE = 4.0  # standard deviations, where actions are normalised by these


@PreTrainedConfig.register_subclass("expo")
@dataclass
class ExpoConfig(PreTrainedConfig):
    """What acts is the best, by the critics, of several chunks of ``base`` and of edits of some of them.

    Attributes:
        base: A flow policy. Features and device are those of this configuration.
        feature_dim: Width of its ``features``, which are what critics and edits see.
        samples: N, chunks of the base that are chosen from.
        edits: How many of them are edited as well; 0 is best-of-N, and with one sample the base alone.
        beta: Largest edit, in normalised action units.
        unedited: Whether chunks of the base themselves may be chosen.
        edit_hidden: Hidden widths of the edit policy.
        critic_hidden: Hidden widths of each critic.
        num_critics: Critics.
        subset: Critics that judge, drawn anew for each observation.
        layer_norm: Layer norm in edit policy and critics.
        n_action_steps: Actions of a chunk that are executed before the next one is asked for.
        robot: ``RobotSpec.to_json()`` of the embodiment.
    """

    base: AnyPolicy = field(default_factory=lambda: StateFlowConfig(device="cpu"))
    feature_dim: int = 0
    samples: int = 8
    edits: int = 8
    beta: float = 0.1
    unedited: bool = True
    edit_hidden: tuple[int, ...] = (256, 256, 256)
    critic_hidden: tuple[int, ...] = (256, 256, 256)
    num_critics: int = 10
    subset: int = 2
    layer_norm: bool = True
    n_action_steps: int = 4
    robot: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.edit_hidden, self.critic_hidden = tuple(self.edit_hidden), tuple(self.critic_hidden)
        if not 0 <= self.edits <= self.samples or not (self.unedited or self.edits):
            raise UserError(
                f"samples={self.samples}, edits={self.edits}, unedited={self.unedited}: nothing to choose from",
                "set edits to 0 ... samples, and unedited=true where it is 0",
            )
        if not 1 <= self.subset <= self.num_critics:
            raise UserError(f"subset is {self.subset}, it must lie in 1 ... num_critics={self.num_critics}")
        for name in ("input_features", "output_features"):
            if not getattr(self, name):
                setattr(self, name, getattr(self.base, name))
        self.base.input_features, self.base.output_features = self.input_features, self.output_features
        self.base.device = self.device

    @property
    def action_limit(self) -> float:
        """Bound of a normalised action, as the base normalises."""
        mapping = getattr(self.base, "normalization_mapping", {})
        return WIDE if mapping.get("ACTION") is NormalizationMode.MEAN_STD else 1.0

    @property
    def action_feature_names(self) -> list[str] | None:
        """Names of the action dimensions."""
        return getattr(self.base, "action_feature_names", None)

    @action_feature_names.setter
    def action_feature_names(self, names: list[str] | None) -> None:
        self.base.action_feature_names = names  # type: ignore[attr-defined]

    def validate_features(self) -> None:
        """Check that the width of the base's features is known.

        Raises:
            UserError: It is not.
        """
        self.base.validate_features()
        if self.feature_dim < 1:
            raise UserError(f"feature_dim is {self.feature_dim}", "set it to the width of the base's features")

    @property
    def observation_delta_indices(self) -> list[int] | None:
        return self.base.observation_delta_indices

    @property
    def action_delta_indices(self) -> list[int] | None:
        return self.base.action_delta_indices

    @property
    def reward_delta_indices(self) -> list[int] | None:
        return self.base.reward_delta_indices

    def get_optimizer_preset(self) -> OptimizerConfig:
        return self.base.get_optimizer_preset()

    def get_scheduler_preset(self) -> LRSchedulerConfig | None:
        return self.base.get_scheduler_preset()

"""Policies that hold a policy: a field for the configuration of any, and what such a configuration takes from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import draccus

from vla_stack.lerobot_core import LRSchedulerConfig, OptimizerConfig, PreTrainedConfig

if TYPE_CHECKING:
    from vla_stack.lerobot_core import PreTrainedConfig as AnyPolicy

    OptionalPolicy = AnyPolicy | None
else:

    class AnyPolicy:
        """Type of a field that holds the configuration of any policy.

        Were it ``PreTrainedConfig``, LeRobot's parser would unroll all policy types inside each other, this one inside
        itself, without end.
        """

    class OptionalPolicy:
        """Likewise, or None; the parser would write a union without the policy's type."""

    def _decode(raw, path):
        return None if raw is None else draccus.decode(PreTrainedConfig, raw)

    def _encode(config, _):
        return None if config is None else draccus.encode(config, PreTrainedConfig)

    for field in (AnyPolicy, OptionalPolicy):
        draccus.decode.register(field, _decode)
        draccus.encode.register(field, _encode)


class OnBase(PreTrainedConfig):
    """A configuration with a field ``base``, the configuration of the policy that it is built on.

    Features and device are this configuration's, and handed down; what LeRobot asks of time and training is the base's.
    """

    base: Any

    def share(self) -> None:
        """Take features of the base where there are none, and hand features and device down to it."""
        for name in ("input_features", "output_features"):
            if not getattr(self, name):
                setattr(self, name, getattr(self.base, name))
        self.base.input_features, self.base.output_features = self.input_features, self.output_features
        self.base.device = self.device

    @property
    def action_feature_names(self) -> list[str] | None:
        """Names of the action dimensions; LeRobot sets them from the dataset."""
        return getattr(self.base, "action_feature_names", None)

    @action_feature_names.setter
    def action_feature_names(self, names: list[str] | None) -> None:
        self.base.action_feature_names = names

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

    def validate_features(self) -> None:
        self.base.validate_features()

"""Configuration of EXPO's policy (arXiv:2507.07986), LeRobot policy type ``expo``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vla_stack.errors import UserError
from vla_stack.lerobot_core import NormalizationMode, PreTrainedConfig
from vla_stack.policies.configuration_state import StateFlowConfig
from vla_stack.policies.critics import NORM_EPS
from vla_stack.policies.gaussian import LOG_STD
from vla_stack.policies.nested_config import AnyPolicy, OnBase

WIDE = 4.0  # standard deviations, where actions are normalised by these


@PreTrainedConfig.register_subclass("expo")
@dataclass
class ExpoConfig(OnBase):
    """What acts is the best, by the critics, of several chunks of ``base`` and of edits of some of them.

    Attributes:
        base: A flow policy. Features and device are those of this configuration.
        feature_dim: Width of what it ``observed``, which is what critics and edits see.
        edited_steps: First steps of a chunk, those that are executed, which edits and critics are about; 0: all.
        samples: N, chunks of the base that are chosen from.
        edits: How many of them are edited as well; 0 is best-of-N, and with one sample the base alone.
        beta: Largest edit, in normalised action units.
        unedited: Whether chunks of the base themselves may be chosen.
        edit_hidden: Hidden widths of the edit policy.
        critic_hidden: Hidden widths of each critic.
        num_critics: Critics.
        subset: Critics that judge, drawn anew for each observation.
        layer_norm: Layer norm in edit policy and critics.
        norm_eps: Added to the variance of a layer norm.
        log_std: Bounds of the edit policy's log sigma.
        n_action_steps: Actions of a chunk that are executed before the next one is asked for.
        robot: ``RobotSpec.to_json()`` of the embodiment.
    """

    base: AnyPolicy = field(default_factory=lambda: StateFlowConfig(device="cpu"))
    feature_dim: int = 0
    edited_steps: int = 0
    samples: int = 8
    edits: int = 8
    beta: float = 0.1
    unedited: bool = True
    edit_hidden: tuple[int, ...] = (256, 256, 256)
    critic_hidden: tuple[int, ...] = (256, 256, 256)
    num_critics: int = 10
    subset: int = 2
    layer_norm: bool = True
    norm_eps: float = NORM_EPS
    log_std: tuple[float, float] = LOG_STD
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
        self.share()

    @property
    def action_limit(self) -> float:
        """Bound of a normalised action, as the base normalises."""
        return action_limit(self.base)

    def validate_features(self) -> None:
        """Check that the width of the base's features is known.

        Raises:
            UserError: It is not.
        """
        super().validate_features()
        if self.feature_dim < 1:
            raise UserError(f"feature_dim is {self.feature_dim}", "set it to the width of what the base observed")


def action_limit(base: PreTrainedConfig) -> float:
    """Bound of a normalised action of a policy."""
    mapping = getattr(base, "normalization_mapping", {})
    return WIDE if mapping.get("ACTION") is NormalizationMode.MEAN_STD else 1.0

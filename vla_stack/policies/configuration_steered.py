"""Configuration of a frozen flow policy that a small actor steers, LeRobot policy type ``steered``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from vla_stack.errors import UserError
from vla_stack.lerobot_core import PreTrainedConfig
from vla_stack.policies.configuration_expo import action_limit
from vla_stack.policies.configuration_state import StateFlowConfig
from vla_stack.policies.critics import NORM_EPS
from vla_stack.policies.gaussian import LOG_STD
from vla_stack.policies.nested_config import AnyPolicy, OnBase


@PreTrainedConfig.register_subclass("steered")
@dataclass
class SteeredConfig(OnBase):
    """An actor on what a frozen flow policy observes gives that policy its noise (DSRL), or acts in its place.

    Attributes:
        base: A flow policy. Features and device are those of this configuration.
        feature_dim: Width of what it ``observed``, which is what the actor sees.
        gives: ``noise``: the noise that the base's chunk starts from; ``actions``: the executed steps of the chunk, of
            which the last is repeated after them.
        alone: Whether the base acts from its own noise, as it does while the actor has learnt nothing.
        magnitude: Largest entry of the noise that is given.
        noise_scale: Of the actor's noise: 0 gives its mode, 1 what it explores with.
        hidden: Hidden widths of the actor.
        layer_norm: Layer norm in it.
        norm_eps: Added to the variance of a layer norm.
        log_std: Bounds of its log sigma.
        n_action_steps: Actions of a chunk that are executed before the next one is asked for.
        robot: ``RobotSpec.to_json()`` of the embodiment.
    """

    base: AnyPolicy = field(default_factory=lambda: StateFlowConfig(device="cpu"))
    feature_dim: int = 0
    gives: Literal["noise", "actions"] = "noise"
    alone: bool = False
    magnitude: float = 1.5
    noise_scale: float = 0.0
    hidden: tuple[int, ...] = (256, 256)
    layer_norm: bool = True
    norm_eps: float = NORM_EPS
    log_std: tuple[float, float] = LOG_STD
    n_action_steps: int = 4
    robot: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.hidden, self.log_std = tuple(self.hidden), (self.log_std[0], self.log_std[1])
        if not self.magnitude > 0:
            raise UserError(f"magnitude is {self.magnitude}, it must be larger than 0")
        self.share()

    @property
    def action_limit(self) -> float:
        """Bound of a normalised action, as the base normalises."""
        return action_limit(self.base)

    def validate_features(self) -> None:
        """Check that the width of what the base observes is known.

        Raises:
            UserError: It is not.
        """
        super().validate_features()
        if self.feature_dim < 1:
            raise UserError(f"feature_dim is {self.feature_dim}", "set it to the width of what the base observed")

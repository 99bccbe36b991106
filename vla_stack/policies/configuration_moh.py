"""Configuration of a mixture of horizons over any flow policy, LeRobot policy type ``moh``."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vla_stack.errors import UserError
from vla_stack.lerobot_core import PreTrainedConfig
from vla_stack.policies.configuration_vla import VlaConfig
from vla_stack.policies.mixture_of_horizons import Fusion, Rule
from vla_stack.policies.nested_config import AnyPolicy, OnBase

HORIZONS = tuple(range(3, 31, 3))


@PreTrainedConfig.register_subclass("moh")
@dataclass
class MohConfig(OnBase):
    """A mixture of horizons; what is not a field here is read from ``base``.

    Attributes:
        base: The policy whose action transformer all branches share; features and device are those of this
            configuration. With ``pretrained_path`` a new mixture starts from that policy's weights.
        horizons: Branch lengths in ascending order; the last one is the base's chunk length.
        fusion: ``gate`` mixes by the learnt gate, ``mean`` equally, ``last`` takes the longest branch alone.
        gate_noise: Noise on the gate's scores in training.
        bidirectional: Let the base's action tokens read later ones although it was pretrained otherwise (SmolVLA); its
            predictions are no longer those of its weights, so it has to be trained.
        consensus_ratio: r of dynamic inference: how far branches may disagree, relative to their disagreement over the
            first ``consensus_min_steps``, for a further action to be executed; null executes ``n_action_steps``.
        consensus_min_steps: Actions that are executed in any case, n; at least 1.
        consensus_min_active: Branches that must predict an action, m.
        consensus_rule: ``code`` or ``paper``, see :func:`~vla_stack.policies.mixture_of_horizons.consensus_steps`; for
            one-step branches also ``votes``, see :func:`~vla_stack.policies.mixture_of_horizons.vote_steps`, which
            does not read m. Its authors have a ratio of 1, a minimum of 1 and a maximum of 20.
        consensus_max_steps: Most actions that dynamic inference executes; null: no bound of its own.
        padded_positions: Count action tokens' positions from the end of the padded prefix, as the authors' code does
            and their checkpoints were trained, and not from its last real token, as openpi does. For pi0 and pi0.5.
    """

    base: AnyPolicy = field(default_factory=lambda: VlaConfig(chunk_size=HORIZONS[-1], device="cpu"))
    horizons: tuple[int, ...] = HORIZONS
    fusion: Fusion = "gate"
    gate_noise: bool = True
    bidirectional: bool = False
    consensus_ratio: float | None = None
    consensus_min_steps: int = 5
    consensus_min_active: int = 5
    consensus_rule: Rule = "code"
    consensus_max_steps: int | None = None
    padded_positions: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.horizons, chunk = tuple(self.horizons), len(self.base.action_delta_indices or [0])
        if not self.horizons or self.horizons[0] < 1 or list(self.horizons) != sorted(self.horizons):
            raise UserError(f"horizons are {list(self.horizons)}, expected whole numbers in ascending order")
        if self.horizons[-1] != chunk:
            raise UserError(
                f"the longest horizon is {self.horizons[-1]}, the base '{self.base.type}' predicts {chunk} actions",
                f"end horizons with {chunk}, or set base.chunk_size={self.horizons[-1]}",
            )
        if self.base.type == self.type:
            raise UserError("the base of a mixture of horizons is one itself", "give another base.type")
        for name in ("consensus_min_steps", "consensus_max_steps"):
            if (steps := getattr(self, name)) is not None and steps < 1:
                raise UserError(
                    f"{name} is {steps}, expected at least 1", "some action of a chunk is executed: set 1 or more"
                )
        self.started_from: Path | None = None  # the base's weights, whose words the processors of a new mixture take
        self.share()

    def __getattr__(self, name: str) -> Any:
        # Reached for what is not found here: LeRobot's tools ask a configuration for a good many names
        # (n_action_steps, normalization_mapping, use_relative_actions, ...), each policy type for its own.
        if name.startswith("_") or "base" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.base, name)


def base_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration of the policy itself, without a mixture of horizons around it."""
    return config.base if isinstance(config, MohConfig) else config

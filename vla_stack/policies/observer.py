"""What a small policy sees: the normalised state, behind the features of a frozen encoder where it has one."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vla_stack.lerobot_core import PreTrainedPolicy
from vla_stack.policies.configuration_state import StateConfig
from vla_stack.policies.processor_state import ACTOR_STATE, CLIP
from vla_stack.policies.registry import blank_policy
from vla_stack.schema import OBS_STATE


class Observer(nn.Module):
    """Vectors [o] of preprocessed observations.

    Args:
        config: The policy's configuration.
        encoder: Its encoder; None makes one whose weights are about to be read.
    """

    def __init__(self, config: StateConfig, encoder: PreTrainedPolicy | None = None) -> None:
        super().__init__()
        self.encoder: Any = None
        if config.encoder is not None:
            made = blank_policy(config.encoder) if encoder is None else encoder
            self.encoder = made.requires_grad_(False).eval()
            self.register_buffer("mean", torch.zeros(config.feature_dim))
            self.register_buffer("std", torch.ones(config.feature_dim))

    def forward(self, batch: dict[str, Any]) -> Float[Tensor, "b o"]:
        """What the networks see."""
        if self.encoder is None:
            return batch[OBS_STATE]
        with torch.no_grad():
            features = self.encoder.features(self.encoder.encode(batch)).float()
            scaled = ((features - self.mean) / self.std).clamp(-CLIP, CLIP)
            return torch.cat([scaled, batch[ACTOR_STATE]], -1)

    def train(self, mode: bool = True) -> Observer:
        """The encoder is never trained."""
        super().train(mode)
        if self.encoder is not None:
            self.encoder.eval()
        return self

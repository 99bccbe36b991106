"""A steered policy that also tells, at each decision, what chunks other noises would have become."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from vla_stack.lerobot_core import PreTrainedPolicy
from vla_stack.policies.configuration_steered import SteeredConfig
from vla_stack.policies.decided import Decided
from vla_stack.policies.gaussian import GaussianActor
from vla_stack.policies.modeling_steered import SteeredPolicy


class SteeredPairs(SteeredPolicy):
    """What a critic of noise is distilled from: see ``methods/dsrl_na.py``. It decides as its parent does.

    Its decisions name the executed actions, not the noise they began with, so that those of a recording, whose noise
    nobody knows, are of the same kind; their ``drawn`` are [noise in [-1, 1] of its bound, executed actions] side by
    side. Of the noises the first half is of a unit normal, the other half what the actor would have given.

    Args:
        config: Configuration with features filled in; it gives noise.
        base: A flow policy.
        actor: The actor, of what the base observed.
        pairs: Noises of each decision.
    """

    def __init__(self, config: SteeredConfig, base: PreTrainedPolicy, actor: GaussianActor, pairs: int) -> None:
        super().__init__(config, base, actor)
        self.pairs = pairs
        self.noise_dim = self.base.noise_dim * (1 + pairs)

    def decided(self, context: Any, seen: Tensor, noise: Float[Tensor, "b h w"], alone: bool) -> Decided:
        first, others = noise.split((self.base.noise_dim, self.base.noise_dim * self.pairs), -1)
        own = super().decided(context, seen, first, alone)
        draws = others.unflatten(-1, (self.pairs, -1)).transpose(1, 2).flatten(2)  # [b, n, h * w]
        prior, rest = draws.split((self.pairs // 2, self.pairs - self.pairs // 2), 1)
        many = seen[:, None].expand(-1, rest.shape[1], -1)
        given = super().bounded(prior), self.drawn(many.flatten(0, 1), rest.flatten(0, 1)).unflatten(0, (len(seen), -1))
        noises = torch.cat(given, 1)
        starts = self.config.magnitude * noises.flatten(0, 1).unflatten(1, self.given)
        chunks = self.flow(context.repeat(self.pairs), starts)
        became = self._executed(chunks).unflatten(0, (len(seen), self.pairs))
        return Decided(seen, self._executed(own.chunk), own.chunk, torch.cat([noises, became], -1))

    def bounded(self, given: Float[Tensor, "b d"]) -> Float[Tensor, "b d"]:
        """Executed actions as the base could have given them."""
        return given.clamp(-self.config.action_limit, self.config.action_limit)

    def _executed(self, chunk: Float[Tensor, "b h a"]) -> Float[Tensor, "b d"]:
        return self.bounded(chunk[:, : self.config.n_action_steps].flatten(1))

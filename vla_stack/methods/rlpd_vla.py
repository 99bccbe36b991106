"""RLPD on what a frozen VLA sees: soft actor-critic whose actor gives the actions, with half of each batch recorded.

Ball et al., "Efficient Online Reinforcement Learning with Offline Data" (arXiv:2302.02948). The baseline of methods
that keep the policy: features, critics, rates and demonstrations are the same, but what acts, after the first
iterations that the policy acts in, is a Gaussian that begins knowing nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from vla_stack.methods.dsrl import SteeringLearner
from vla_stack.methods.on_flow.decisions import Decisions
from vla_stack.methods.on_flow.recipe import OnFlow, small_sac
from vla_stack.methods.sac import SacRecipe


@dataclass(frozen=True)
class RlpdVla(OnFlow):
    """RLPD (arXiv:2302.02948) on the features of a frozen flow policy."""

    name: Literal["rlpd_vla"] = "rlpd_vla"
    sac: SacRecipe = field(default_factory=lambda: small_sac(0.1))

    def learner(self, base: Any, seen: int, steps: int, offline: Decisions | None, seed: int) -> SteeringLearner:
        width = steps * base.action_dim
        return SteeringLearner(self.sac, base, seen, width, steps, offline, seed, gives="actions", magnitude=1.0)

"""What learners around a frozen flow policy share: decisions that are drawn, critic steps, and what is deployed."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vla_stack.lerobot_core import PreTrainedPolicy
from vla_stack.methods.on_flow.decisions import Decisions, Drawn, mixed
from vla_stack.methods.sac import Sac, SacRecipe


class FlowLearner(ABC):
    """A learner.

    Args:
        sac: Sizes and rates.
        base: The frozen flow policy.
        seen: Width of what it observes, f.
        width: Entries of what the critics judge, d.
        offered: Chunks of the base that are kept of each decision.
        offline: Demonstrations, half of each batch; None: what was lived is all.
        seed: Of weights, noise and batches.
        actor_inputs: Width of what the actor sees where that is more.

    Attributes:
        store: What was lived.
        pretrained: Offline steps done; there are none.
    """

    def __init__(
        self,
        sac: SacRecipe,
        base: Any,
        seen: int,
        width: int,
        offered: int,
        offline: Decisions | None,
        seed: int,
        actor_inputs: int | None = None,
    ) -> None:
        self.sac, self.base, self.seen, self.width, self.offline = sac, base, seen, width, offline
        device = str(base.config.device)
        self.agent = Sac(sac, seen, width, seed, actor_inputs, device)
        self.store = Decisions.none(seen, offered, width)
        self.rng = np.random.default_rng(seed)
        self.optimizers = {"actor": self.agent.actor_optimizer, "critic": self.agent.critic_optimizer}
        self.pretrained = 0
        self.modules: dict[str, nn.Module] = {"agent": self.agent}

    present = False  # whether what was offered matters at a decision, not at the one that follows

    @abstractmethod
    def network(self, learnt: bool, explores: bool = False) -> PreTrainedPolicy:
        """The policy, whose weights are the learner's; the base alone as long as nothing is ``learnt``."""

    @abstractmethod
    def target(self, drawn: Drawn) -> Tensor:
        """What the critics' values go towards, [b]."""

    @abstractmethod
    def actor_step(self, drawn: Drawn) -> dict[str, Tensor]:
        """One step of the actor and of the temperature."""

    def update(self) -> dict[str, Tensor]:
        """The updates of one decision: ``utd`` critic steps, then one of the actor on the last one's rows."""
        sac = self.sac
        drawn = self.draw(sac.batch * sac.utd).to(self.agent.device)
        for i in range(sac.utd):
            part = drawn.part(i * sac.batch, (i + 1) * sac.batch)
            metrics = self.critic_step(part)
        return metrics | self.actor_step(part)

    def critic_step(self, drawn: Drawn) -> dict[str, Tensor]:
        """One step of the critics."""
        return self.agent.critic_step(drawn.batch, self.target(drawn))

    def explorer(self) -> Any:
        """The policy that practises, and that decides at recorded observations."""
        return self.network(learnt=False, explores=True)

    def draw(self, n: int) -> Drawn:
        """Decisions, half of them demonstrations where there are any."""
        if self.offline is None:
            return self.store.sample(n, self.rng, self.present)
        own, other = (kept.sample(n // 2, self.rng, self.present) for kept in (self.store, self.offline))
        return mixed(own, other)

    def shared(self) -> dict[str, Any]:
        """Fields of a configuration around the base, whose weights are part of the policy's own."""
        base = copy.copy(self.base.config)
        base.pretrained_path = None
        given: dict[str, Any] = {"base": base, "feature_dim": self.seen, "robot": getattr(base, "robot", None)}
        given |= {"input_features": base.input_features, "output_features": base.output_features}
        sac = self.sac
        given |= {"layer_norm": sac.layer_norm, "norm_eps": sac.norm_eps, "log_std": sac.log_std}
        return given | {"device": base.device, "push_to_hub": False}


def means(metrics: list[dict[str, Tensor]]) -> dict[str, float]:
    """Mean of each value that was logged."""
    keys = metrics[-1] if metrics else ()
    return {k: float(torch.stack([m[k] for m in metrics]).mean()) for k in keys}

"""EXPO around any flow policy: a native VLA, SmolVLA, pi0.5, from pictures and sentences.

Dong et al., "EXPO: Stable Reinforcement Learning with Expressive Policies" (arXiv:2507.07986), as ``methods/expo.py``
has it, with what EXPO-FT (arXiv:2605.25477) does to reach VLAs: critics and edits see the policy's own features, an
action is the executed part of a chunk, and the discount counts its steps. Two things differ. The base is frozen: it
does not imitate online. And the N chunks that the target chooses from are those that were drawn when the state was
lived through, kept with it: of the same distribution as chunks drawn anew, as the base does not change, at no cost.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from vla_stack.errors import UserError
from vla_stack.methods.expo import ALONE, Editing
from vla_stack.methods.on_flow.decisions import Decisions, Drawn
from vla_stack.methods.on_flow.learner import FlowLearner
from vla_stack.methods.on_flow.recipe import OnFlow, small_sac
from vla_stack.methods.sac import SacRecipe
from vla_stack.policies.critics import best
from vla_stack.training.recipe_tree import Count, Natural, NotNegative


@dataclass(frozen=True)
class ExpoVla(OnFlow):
    """EXPO (arXiv:2507.07986) around a frozen flow policy.

    Attributes:
        samples: N, chunks of the policy that are chosen from.
        edits: How many of them are edited as well; 0 is best-of-N.
        beta: Largest edit, in normalised action units.
        unedited: Whether the policy's own chunks may be chosen.
    """

    name: Literal["expo_vla"] = "expo_vla"
    sac: SacRecipe = field(default_factory=lambda: small_sac(0.01))
    samples: Count = 8
    edits: Natural = 8
    beta: NotNegative = 0.05
    unedited: bool = True

    def check(self) -> None:
        """There is something to choose; raises :class:`UserError`."""
        if self.edits > self.samples:
            raise UserError(
                f"'method.edits' is {self.edits}, there are {self.samples} samples to edit, 'method.samples'",
                f"set method.edits={self.samples} or less",
            )
        if not self.edits and not self.unedited:
            raise UserError(
                "'method.edits' is 0 and 'method.unedited' is false: there is nothing to choose",
                "set method.unedited=true",
            )

    def learner(self, base: Any, seen: int, steps: int, offline: Decisions | None, seed: int) -> ExpoVlaLearner:
        return ExpoVlaLearner(self, base, seen, steps, offline, seed)


class ExpoVlaLearner(Editing, FlowLearner):
    """The learner; see :class:`FlowLearner`.

    Args:
        method: Options.
        base: The frozen flow policy.
        seen: Width of what it observes.
        steps: Actions of a chunk that are executed.
        offline: Demonstrations.
        seed: Of weights, noise and batches.
    """

    def __init__(self, method: ExpoVla, base: Any, seen: int, steps: int, offline: Decisions | None, seed: int) -> None:
        width = steps * base.action_dim
        FlowLearner.__init__(self, method.sac, base, seen, width, method.samples, offline, seed, seen + width)
        self.method, self.steps = method, steps
        self.limit = self.network(learnt=False).config.action_limit

    @torch.no_grad()
    def target(self, drawn: Drawn) -> Tensor:
        """R + gamma^k Q'(o', OTF(o')); the subset that evaluates is drawn anew after the one that chose."""
        batch, g = drawn.batch, self.agent.generator
        offered = self.offered(batch.next_obs, drawn.offered, g)
        actions = best(offered, self.values(batch.next_obs, offered, g))
        return batch.reward + batch.discount * self.agent.target_value(batch.next_obs, actions)

    def actor_step(self, drawn: Drawn) -> dict[str, Tensor]:
        return self.edit_step(drawn.batch) if self.method.edits else {}

    def network(self, learnt: bool, explores: bool = False) -> Any:
        """The on-the-fly policy, which explores by what it draws; while nothing is learnt its first chunk is taken."""
        from vla_stack.policies.configuration_expo import ExpoConfig  # on demand: LeRobot is heavy, and this module is
        from vla_stack.policies.modeling_expo import ExpoPolicy  # read for its recipe as well

        r, sac = self.method, self.sac
        chosen: dict[str, Any] = {"samples": r.samples, "edits": r.edits, "unedited": r.unedited}
        config = ExpoConfig(
            **self.shared(),
            **(chosen if learnt or explores else ALONE),
            edited_steps=self.steps,
            beta=r.beta,
            edit_hidden=sac.actor,
            critic_hidden=sac.critic,
            num_critics=sac.num_critics,
            subset=sac.subset,
            n_action_steps=self.steps,
        )
        return ExpoPolicy(config, self.base, self.agent.actor, self.agent.target)

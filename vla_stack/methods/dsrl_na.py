"""DSRL-NA: steering a frozen flow policy by its noise, learnt from actions whose noise nobody knows.

Wagenmaker et al., "Steering Your Diffusion Policy with Latent Space Reinforcement Learning" (arXiv:2506.15799), the
form with noise aliasing. ``methods/dsrl.py`` learns the value of noise from noise that was chosen, which recordings do
not tell: a robot's, a person's, demonstrations. Here critics Q^A judge executed actions, whoever gave them, and critics
Q^W of noise are distilled from them through the policy pi, whose chunk of a noise can be asked for:

    Q^A(o, a) <- R + gamma^k min Q^W'(o', w'),  w' ~ actor(o')
    Q^W(o, w) <- Q^A(o, pi(o, w)),              w of a unit normal, and of the actor
    the actor maximises Q^W, as in ``methods/dsrl.py``.

Two things are ours. The pairs of w and pi(o, w) are made when a decision is, and kept with it: an update computes no
flow. Therefore the target asks Q^W', where the paper asks Q^A' of the chunk that w' becomes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from vla_stack.methods.dsrl import SteeringLearner
from vla_stack.methods.on_flow.decisions import Decisions, Drawn
from vla_stack.methods.on_flow.recipe import OnFlow, small_sac
from vla_stack.methods.sac import SacRecipe, step
from vla_stack.policies.critics import Ensemble
from vla_stack.training.recipe_tree import Positive

PAIRS = 8  # noises of a decision whose chunks are kept


@dataclass(frozen=True)
class DsrlNa(OnFlow):
    """An actor that chooses the noise of a frozen flow policy, learnt from actions: DSRL-NA (arXiv:2506.15799).

    Attributes:
        magnitude: Largest entry of the noise that is chosen.
    """

    # With a tenth of that temperature success fell from 40 to about 5 % for five iterations, and after 12,000 control
    # steps it was no better (an arm whose horns are off, in simulation, from pictures, one seed).
    name: Literal["dsrl_na"] = "dsrl_na"
    sac: SacRecipe = field(default_factory=lambda: small_sac(0.1))
    magnitude: Positive = 1.5

    def learner(self, base: Any, seen: int, steps: int, offline: Decisions | None, seed: int) -> AliasingLearner:
        return AliasingLearner(self, base, seen, steps, offline, seed)


class AliasingLearner(SteeringLearner):
    """The learner; see :class:`~vla_stack.methods.on_flow.learner.FlowLearner`.

    Args:
        method: Options.
        base: The frozen flow policy.
        seen: Width of what it observes.
        steps: Actions of a chunk that are executed.
        offline: Demonstrations.
        seed: Of weights, noise and batches.
    """

    present = True

    def __init__(self, method: DsrlNa, base: Any, seen: int, steps: int, offline: Decisions | None, seed: int) -> None:
        noise, actions = base.horizon * base.noise_dim, steps * base.action_dim
        super().__init__(method.sac, base, seen, noise, steps, offline, seed, "noise", method.magnitude)
        sac, agent = self.sac, self.agent
        self.store = Decisions.none(seen, PAIRS, actions, noise + actions)
        # Q^A has no target network: nothing bootstraps from it but Q^W, which follows it at every step.
        norm: dict[str, Any] = {"layer_norm": sac.layer_norm, "norm_eps": sac.norm_eps}
        self.of_actions = Ensemble(sac.num_critics, seen + actions, sac.critic, generator=agent.generator, **norm).to(
            agent.device
        )
        self.optimizers["of_actions"] = torch.optim.Adam(self.of_actions.parameters(), lr=sac.lr_critic, fused=True)
        self.modules["of_actions"] = self.of_actions

    def critic_step(self, drawn: Drawn) -> dict[str, Tensor]:
        """A step of Q^A, then one of Q^W: each of its networks towards that of Q^A of the same number."""
        batch = drawn.batch
        q = self.of_actions(torch.cat([batch.obs, batch.actions], -1))
        loss = (q - self.target(drawn)).square().mean()
        step(self.optimizers["of_actions"], loss, [*self.of_actions.parameters()])
        rows = torch.arange(len(batch.obs))  # one pair of each
        pairs = drawn.offered[rows, torch.randint(drawn.offered.shape[1], rows.shape, generator=self.agent.generator)]
        noises, became = pairs.split((self.width, batch.actions.shape[1]), -1)
        with torch.no_grad():
            aim = self.of_actions(torch.cat([batch.obs, became], -1))
        distilled = self.agent.critic_step(batch._replace(actions=noises), aim)
        return {"td": loss.detach(), "q": q.detach().mean(), "distilled": distilled["td"]}

    def explorer(self) -> Any:
        from vla_stack.policies.steered_pairs import SteeredPairs  # on demand, as in :meth:`network`

        network = self.network(learnt=False, explores=True)
        return SteeredPairs(network.config, self.base, self.agent.actor, PAIRS)

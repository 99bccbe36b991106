"""RAVL: soft actor-critic on imagined rollouts, with critics that are pessimistic where rollouts end.

Sims et al., "The Edge-of-Reach Problem in Offline Model-Based Reinforcement Learning" (arXiv:2402.12527). Rollouts of k
steps from recorded states reach some states in their last step alone: these are bootstrapped from and never updated,
and values explode there, even in a true model, where penalties of the model's doubt see nothing. Therefore

    y = r + gamma (1 - d) [min over all N of Q'(s', a') - alpha log pi(a'|s')]

and the critics are kept diverse by EDAC's term (An et al., arXiv:2110.01548), added to the critics' loss,

    eta / (N - 1) * sum over n != m of cos(grad_a Q_n(s, a), grad_a Q_m(s, a)).

Only success ends an episode (d = 1); where a rollout is cut, by its length or by a guard, its value goes on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from vla_stack.methods.replay_buffer import Batch
from vla_stack.methods.sac import Sac, SacRecipe

NUM_CRITICS = 10


@dataclass(frozen=True)
class RavlRecipe:
    """A run.

    Attributes:
        sac: Networks and rates; all critics make the target.
        diversity: eta.
        horizon: k, chunks of an imagined rollout.
        real: Share of recorded transitions in a batch.
        gamma: Discount of a chunk.
    """

    sac: SacRecipe = field(default_factory=lambda: SacRecipe(num_critics=NUM_CRITICS, subset=NUM_CRITICS))
    diversity: float = 1.0
    horizon: int = 5
    real: float = 0.05
    gamma: float = 0.95


def update(agent: Sac, batch: Batch, recipe: RavlRecipe) -> dict[str, Tensor]:
    """One step of the critics and one of the actor; the temporal difference is the mean over critics, so eta is
    divided by their number."""
    return agent.update(batch, term=partial(term, weight=recipe.diversity / recipe.sac.num_critics))


def term(agent: Sac, batch: Batch, q: Tensor, subset: Tensor | None, weight: float) -> Tensor:
    """The diversity term of a slice; has no use for its values and the subset of the critics."""
    x = torch.cat([batch.obs, batch.actions], -1).expand(agent.recipe.num_critics, -1, -1).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(agent.critic(x).sum(), x, create_graph=True)
    return weight * similarity(gradient[..., batch.obs.shape[-1] :])


def similarity(gradients: Tensor) -> Tensor:
    """1 / (N - 1) times the sum of cosines of all ordered pairs n != m of [N, b, a], the mean over b."""
    unit = F.normalize(gradients, dim=-1)
    pairs = unit.sum(0).square().sum(-1) - unit.square().sum((0, -1))
    return pairs.mean() / (len(gradients) - 1)


def blend(imagined: Batch, recorded: Batch) -> Batch:
    """Rows of both."""
    return Batch(*(torch.cat(pair) for pair in zip(imagined, recorded, strict=True)))

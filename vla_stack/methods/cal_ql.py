"""Cal-QL: critics that are pessimistic about the actor's actions, but never below the return that was seen.

Nakamoto et al., "Cal-QL: Calibrated Offline RL Pre-Training for Efficient Online Fine-Tuning" (arXiv:2303.05479), over
CQL (Kumar et al., arXiv:2006.04779). The uniform density of a chunk in [-1, 1]^D is 2^-D.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
from torch import Tensor

from vla_stack.methods.replay_buffer import Batch
from vla_stack.methods.sac import Sac
from vla_stack.training.recipe_tree import AtLeast


@dataclass(frozen=True)
class CalQlRecipe:
    """The conservative term.

    Attributes:
        weight: Of the term beside the temporal difference.
        draws: Actions of each group: uniform, of the policy here, of the policy at the next observation.
        calibrate: Cal-QL; without it plain CQL.
        importance: Subtract each group's log-density; without it the action of the data joins the log-sum.
        max_backup: Targets take the best of ``draws`` actions.
    """

    weight: float = 5.0
    draws: Annotated[int, AtLeast(2)] = 10
    calibrate: bool = True
    importance: bool = True
    max_backup: bool = True


def update(agent: Sac, batch: Batch, recipe: CalQlRecipe, steps: int = 1) -> dict[str, Tensor]:
    """Critic steps on slices of a batch whose Monte-Carlo returns are known, then one step of the actor."""
    target = partial(max_backup, draws=recipe.draws) if recipe.max_backup else None
    return agent.update(batch, steps, partial(term, recipe=recipe), target)


@torch.no_grad()
def max_backup(agent: Sac, batch: Batch, draws: int) -> Tensor:
    """y = R + gamma^k max over drawn a' of min over a drawn subset of Q'(o', a'); no entropy. [b]."""
    actions, _ = agent.actor.sample(batch.next_obs, agent.generator, max(2, draws))
    n, b, d = actions.shape
    obs = batch.next_obs.expand(n, b, -1).reshape(n * b, -1)
    values = agent.target_value(obs, actions.reshape(n * b, d)).view(n, b)
    return batch.reward + batch.discount * values.amax(0)


def term(agent: Sac, batch: Batch, q: Tensor, subset: Tensor | None, recipe: CalQlRecipe) -> Tensor:
    """weight * mean of :func:`difference`, on a subset of the critics alone.

    Args:
        agent: Actor and critics.
        batch: Rows of the critics' step.
        q: Their values of the data's actions, [E, b].
        subset: Of the critics, int64 [n]; None for all.
        recipe: The term.
    """
    n, (b, d) = max(2, recipe.draws), batch.actions.shape
    with torch.no_grad():
        here, log_here = agent.actor.sample(batch.obs, agent.generator, n)
        there, log_there = agent.actor.sample(batch.next_obs, agent.generator, n)
        anywhere = 2.0 * torch.rand(n, b, d, generator=agent.generator).to(here.device) - 1.0
        log_any = torch.full((n, b), d * math.log(0.5), device=here.device)
        actions = torch.cat([anywhere, here, there])  # all evaluated at the observation, not at the next one
        obs = batch.obs.expand(3 * n, b, -1).reshape(3 * n * b, -1)
    values = agent.critic(torch.cat([obs, actions.reshape(3 * n * b, d)], -1), subset).view(-1, 3 * n, b)
    floor = batch.returns if recipe.calibrate else torch.full((b,), -math.inf, device=q.device)
    values = torch.cat([values[:, :n], calibrated(values[:, n:], floor)], 1)
    data = q if subset is None else q[subset]
    log_p = torch.cat([log_any, log_here, log_there]) if recipe.importance else None
    return recipe.weight * difference(values, data, log_p).mean()


def calibrated(values: Tensor, returns: Tensor) -> Tensor:
    """max(Q, G): values [E, n, b] of the policy's actions, returns [b]. No gradient where the return is larger."""
    return torch.maximum(values, returns)


def difference(values: Tensor, data: Tensor, log_p: Tensor | None) -> Tensor:
    """log sum_j exp(Q_j - log p_j) - Q(s, a), [E, b].

    Args:
        values: Values of n sampled actions, [E, n, b].
        data: Values of the data's actions, [E, b].
        log_p: Their log-densities, [n, b]. None: the data's action joins the sum, which becomes a mean.
    """
    if log_p is not None:
        return torch.logsumexp(values - log_p, 1) - data
    values = torch.cat([values, data[:, None]], 1)
    return torch.logsumexp(values, 1) - math.log(values.shape[1]) - data

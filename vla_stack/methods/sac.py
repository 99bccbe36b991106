"""Soft actor-critic with an ensemble of critics: the core of every off-policy method here.

Haarnoja et al., "Soft Actor-Critic Algorithms and Applications" (arXiv:1812.05905), on chunk views: an action is a
chunk of h steps, the discount gamma^k. With ten critics, a random pair in the target, layer norm and many critic steps
a control step it is the online half of WSRL (arXiv:2412.07762), and with half of each batch from stored data RLPD
(arXiv:2302.02948).

Where the reference code of WSRL gives networks that are not updated a zero gradient, so that Adam's momentum goes on
moving them, here a network that is not updated stands still. The temperature is exp of its parameter, there softplus.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from vla_stack.errors import UserError
from vla_stack.methods.replay_buffer import Batch
from vla_stack.policies.critics import NORM_EPS, Ensemble, polyak, sample_critics
from vla_stack.policies.gaussian import LOG_STD, GaussianActor
from vla_stack.training.recipe_tree import AtLeast, Count, Positive


@dataclass(frozen=True)
class SacRecipe:
    """Sizes and rates; the defaults are those of arXiv:1812.05905, as stable-baselines3 has them.

    Attributes:
        actor: Hidden widths of the actor.
        critic: Hidden widths of each critic.
        num_critics: Critics, E.
        subset: Critics drawn for a target.
        layer_norm: Layer norm in actor and critics.
        norm_eps: Added to the variance of a layer norm.
        log_std: Bounds of the actor's log sigma.
        tau: Step of the target's Polyak average.
        lr_actor: Learning rate of the actor.
        lr_critic: Learning rate of the critics.
        lr_temperature: Learning rate of the temperature.
        temperature: Temperature at the start.
        target_entropy: Of the policy, for each dimension of a chunk.
        entropy_backup: Whether a target counts the entropy.
        actor_q: What the actor maximises of its critics: their minimum, or their mean.
        batch: Rows of a critic step.
        utd: Critic steps for each step of the actor.
        actor_rows: Whether the actor's step sees ``all`` rows of its critic steps, or the ``last`` ones.
    """

    actor: tuple[int, ...] = (256, 256)
    critic: tuple[int, ...] = (256, 256)
    num_critics: Count = 2
    subset: Count = 2
    layer_norm: bool = False
    norm_eps: Positive = NORM_EPS
    log_std: tuple[float, float] = LOG_STD
    tau: Positive = 0.005
    lr_actor: Positive = 3e-4
    lr_critic: Positive = 3e-4
    lr_temperature: Positive = 3e-4
    temperature: Positive = 1.0
    target_entropy: float = -1.0
    entropy_backup: bool = True
    actor_q: Literal["min", "mean"] = "min"
    batch: Annotated[int, AtLeast(2)] = 256  # half of it may be of the stored episodes
    utd: Count = 1
    actor_rows: Literal["all", "last"] = "all"

    def check(self) -> None:
        """A target's critics are some of all, and sigma has a range; raises :class:`UserError`."""
        if not self.log_std[0] < self.log_std[1]:
            raise UserError(
                f"'sac.log_std' is {list(self.log_std)}, expected a lower and an upper bound", "set log_std=[-20,2]"
            )
        if self.subset > self.num_critics:
            raise UserError(
                f"'sac.subset' is {self.subset}, 'sac.num_critics' is {self.num_critics}",
                f"set subset={self.num_critics} or less",
            )


CriticTerm = Callable[["Sac", Batch, Tensor, Tensor | None], Tensor]
Target = Callable[["Sac", Batch], Tensor]


class Sac(nn.Module):
    """Networks, optimisers and their one update.

    Args:
        recipe: Sizes and rates.
        obs: Width of an observation, o.
        actions: Width of a chunk, h * a.
        seed: Of weights and noise.
        actor_inputs: Width of what the actor sees where that is more than the observation.
        device: Where the networks are. Random numbers are drawn on the CPU, so that they are the same anywhere.
    """

    def __init__(
        self,
        recipe: SacRecipe,
        obs: int,
        actions: int,
        seed: int = 0,
        actor_inputs: int | None = None,
        device: str = "cpu",
    ) -> None:
        super().__init__()
        self.recipe, self.width, self.device = recipe, actions, device
        self.generator = torch.Generator().manual_seed(seed)
        self.explorer = torch.Generator().manual_seed(seed + 1)  # of acting, wherever the actor runs
        ln, eps = recipe.layer_norm, recipe.norm_eps
        bounds = recipe.log_std
        self.actor = GaussianActor(actor_inputs or obs, actions, recipe.actor, ln, self.generator, bounds, eps)
        shape = (recipe.num_critics, obs + actions, recipe.critic)
        self.critic = Ensemble(*shape, layer_norm=ln, generator=self.generator, norm_eps=eps)
        self.target = Ensemble(*shape, layer_norm=ln, generator=self.generator, norm_eps=eps).requires_grad_(False)
        self.target.load_state_dict(self.critic.state_dict())
        self.log_temperature = nn.Parameter(torch.tensor(math.log(recipe.temperature)))
        self.target_entropy = recipe.target_entropy * actions
        self.to(device)
        groups = [
            {"params": [*self.actor.parameters()], "lr": recipe.lr_actor},
            {"params": [self.log_temperature], "lr": recipe.lr_temperature},
        ]
        # One fused call a network: at these sizes a loop over tensors costs as much as the arithmetic.
        self.actor_optimizer = torch.optim.Adam(groups, fused=True)
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), lr=recipe.lr_critic, fused=True)

    @property
    def temperature(self) -> Tensor:
        return self.log_temperature.exp()

    @torch.no_grad()
    def act(self, obs: Tensor, explore: bool = True) -> Tensor:
        """Chunks ``[b, h * a]``: drawn, or the mode."""
        return self.actor.sample(obs, self.explorer)[0] if explore else self.actor.mode(obs)

    def update(
        self, batch: Batch, steps: int = 1, term: CriticTerm | None = None, target: Target | None = None
    ) -> dict[str, Tensor]:
        """Critic steps on equal slices of a batch, then one step of the actor.

        Args:
            batch: Chunk views, ``steps`` times a critic step's rows.
            steps: Critic steps.
            term: Added to the critics' loss, of (agent, slice, its values [E, b], subset of the critics).
            target: What the critics' values go towards, of (agent, slice); by default :meth:`sac_target`.
        """
        rows = len(batch.obs) // steps
        for i in range(steps):
            part = Batch(*(x[i * rows : (i + 1) * rows] for x in batch))
            y = self.sac_target(part) if target is None else target(self, part)
            metrics = self.critic_step(part, y, term)
        return metrics | self.actor_step(batch.obs if self.recipe.actor_rows == "all" else part.obs)

    @torch.no_grad()
    def sac_target(self, batch: Batch) -> Tensor:
        """y = R + gamma^k (min over a drawn subset of Q'(o', a') [- alpha log pi(a'|o')]), [b]."""
        actions, log_p = self.actor.sample(batch.next_obs, self.generator)
        value = self.target_value(batch.next_obs, actions)
        if self.recipe.entropy_backup:
            value = value - self.temperature * log_p
        return batch.reward + batch.discount * value

    def target_value(self, obs: Tensor, actions: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Minimum of a drawn subset of the target critics, [b]."""
        return self.target(torch.cat([obs, actions], -1), self.draw(generator)).amin(0)

    def draw(self, generator: torch.Generator | None = None) -> Tensor | None:
        """The critics of a target; None for all of them."""
        return sample_critics(self.recipe.num_critics, self.recipe.subset, generator or self.generator)

    def critic_step(self, batch: Batch, target: Tensor, term: CriticTerm | None = None) -> dict[str, Tensor]:
        """One step of the critics towards ``target`` [b], and of their Polyak average."""
        q = self.critic(torch.cat([batch.obs, batch.actions], -1))
        loss = (q - target).square().mean()
        metrics = {"td": loss.detach(), "q": q.detach().mean()}
        if term is not None:
            extra = term(self, batch, q, self.draw())
            metrics["term"] = extra.detach()
            loss = loss + extra
        step(self.critic_optimizer, loss, [*self.critic.parameters()])
        polyak(self.target, self.critic, self.recipe.tau)
        return metrics

    def actor_step(self, obs: Tensor) -> dict[str, Tensor]:
        """One step of the actor on E[alpha log pi - Q], and of the temperature."""
        actions, log_p = self.actor.sample(obs, self.generator)
        q = self.critic(torch.cat([obs, actions], -1))
        value = q.amin(0) if self.recipe.actor_q == "min" else q.mean(0)
        loss = (self.temperature.detach() * log_p - value).mean()
        gap = log_p.detach().mean() + self.target_entropy
        self.log_temperature.grad = -gap  # of -log alpha (log pi + target), by log alpha
        step(self.actor_optimizer, loss, [*self.actor.parameters()])
        return {"entropy": -log_p.detach().mean(), "temperature": self.temperature.detach()}


def step(optimizer: torch.optim.Optimizer, loss: Tensor, parameters: list[nn.Parameter]) -> None:
    """One step on the gradient of ``loss`` by ``parameters`` alone; what lies behind them is not differentiated."""
    for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        p.grad = g
    optimizer.step()

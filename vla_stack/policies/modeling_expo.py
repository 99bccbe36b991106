"""EXPO's policy (Dong et al., arXiv:2507.07986) around any flow policy."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from vla_stack.errors import UserError
from vla_stack.lerobot_core import PreTrainedPolicy
from vla_stack.policies import flow
from vla_stack.policies.action_queue import ActionQueue
from vla_stack.policies.configuration_expo import ExpoConfig
from vla_stack.policies.contract import FlowPolicy, NoisePolicy
from vla_stack.policies.critics import Ensemble, best
from vla_stack.policies.decided import Decided
from vla_stack.policies.gaussian import GaussianActor
from vla_stack.policies.registry import blank_policy
from vla_stack.schema import ACTION, OBS_STATE


class ExpoPolicy(PreTrainedPolicy, NoisePolicy):
    """Draws chunks of the base, edits some, and gives the one that the critics value most.

    Args:
        config: Configuration with features filled in.
        base: A flow policy; None makes one to read weights into.
        edit: The edit policy, of [what is observed, chunk]; None makes one.
        critics: Values of the same; None makes some.

    Raises:
        UserError: The base is no flow policy.
    """

    config_class = ExpoConfig
    name = "expo"

    def __init__(
        self,
        config: ExpoConfig,
        base: PreTrainedPolicy | None = None,
        edit: GaussianActor | None = None,
        critics: Ensemble | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config)
        config.validate_features()
        self.config = config
        self.base: Any = blank_policy(config.base) if base is None else base
        if not isinstance(self.base, FlowPolicy) or self.base.one_step:
            raise UserError(f"policy '{config.base.type}' cannot be the base of EXPO", "it has no flow of actions")
        self.horizon, self.action_dim = self.base.horizon, self.base.action_dim
        self.width = (config.edited_steps or self.horizon) * self.action_dim  # of what is edited and judged
        norm: dict[str, Any] = {"layer_norm": config.layer_norm, "norm_eps": config.norm_eps}
        seen = config.feature_dim + self.width
        self.edit = edit or GaussianActor(seen, self.width, config.edit_hidden, log_std=config.log_std, **norm)
        self.critics = critics or Ensemble(config.num_critics, seen, config.critic_hidden, **norm)
        # Noise of an observation, side by side: of each base chunk, of each edit, of the choice of critics.
        self._draws = math.ceil(config.num_critics / self.horizon) if config.subset < config.num_critics else 0
        self._widths = (config.samples * self.base.noise_dim, config.edits * self.action_dim, self._draws)
        self.noise_dim = sum(self._widths)
        self._queue = ActionQueue()

    @torch.no_grad()
    def predict_action_chunk(
        self, batch: dict[str, Any], noise: Tensor | None = None, **_: Any
    ) -> Float[Tensor, "b h a"]:
        """One chunk an observation; all that is drawn for it follows from its ``noise`` [b, h, noise_dim]."""
        if noise is None:
            state = batch[OBS_STATE]
            noise = torch.randn(len(state), self.horizon, self.noise_dim, device=state.device)
        return self.decide(batch, noise).chunk

    @torch.no_grad()
    def decide(self, batch: dict[str, Any], noise: Float[Tensor, "b h w"], alone: bool = False) -> Decided:
        """What is chosen, and from what; ``alone`` takes the base's first chunk, whatever the critics say of it."""
        of_base, of_edits, of_critics = noise.split(self._widths, -1)
        context = self.base.encode(batch)
        seen = self.base.observed(context, batch)
        drawn = self.draw(context, of_base)
        offered = drawn[:, :1] if alone else self.offered(seen, drawn, of_edits)
        if offered.shape[1] > 1:
            offered = best(offered, self.values(seen, offered, of_critics))[:, None]
        chunk = offered[:, 0]
        shape = (self.horizon, self.action_dim)
        return Decided(seen, chunk[:, : self.width], chunk.unflatten(1, shape), drawn[..., : self.width])

    def candidates(self, context: Any, features: Tensor, of_base: Tensor, of_edits: Tensor) -> Float[Tensor, "b n d"]:
        """What may be chosen for each observation, chunks of d = h * a."""
        return self.offered(features, self.draw(context, of_base), of_edits)

    def draw(self, context: Any, of_base: Float[Tensor, "b h w"]) -> Float[Tensor, "b n d"]:
        """Chunks of the base."""
        c, limit = self.config, self.config.action_limit
        of_base = of_base * self.base.noise_scale
        starts = of_base.unflatten(-1, (c.samples, -1)).transpose(1, 2)  # [b, N, h, p]
        many = context.repeat(c.samples)
        drawn = flow.euler(lambda x, t: self.base.velocity(many, x, t), starts.flatten(0, 1), self.base.inference_steps)
        return drawn[..., : self.action_dim].clamp(-limit, limit).flatten(1).unflatten(0, (-1, c.samples))

    def offered(self, features: Tensor, drawn: Float[Tensor, "b m d"], of_edits: Tensor) -> Float[Tensor, "b n d"]:
        """Chunks of the base and edits of some of them, in the first ``width`` entries."""
        c, limit, width = self.config, self.config.action_limit, self.width
        groups = [drawn] if c.unedited else []
        if c.edits:
            noise = of_edits.unflatten(-1, (c.edits, -1)).transpose(1, 2).flatten(2)[..., :width]  # [b, M, d]
            first = drawn[:, : c.edits, :width]
            mean, log_std = self.edit(torch.cat([_each(features, c.edits), first], -1).flatten(0, 1))
            y = torch.tanh(mean + log_std.exp() * noise.flatten(0, 1)).view_as(first)
            edited = (first + c.beta * y).clamp(-limit, limit)
            rest = drawn[:, : c.edits, width:]
            groups.append(torch.cat([edited, rest], -1) if rest.shape[-1] else edited)
        return torch.cat(groups, 1)

    def bounded(self, given: Float[Tensor, "b d"]) -> Float[Tensor, "b d"]:
        """Actions as the policy could have given them."""
        return given.clamp(-self.config.action_limit, self.config.action_limit)

    def values(
        self, features: Float[Tensor, "b f"], offered: Float[Tensor, "b n d"], of_critics: Float[Tensor, "b h w"]
    ) -> Float[Tensor, "b n"]:
        """The least value of each candidate, by a subset of the critics that is drawn for each observation."""
        c = self.config
        q = self.critics.judge(features, offered[..., : self.width])  # [E, b, n]
        if self._draws:
            order = of_critics.flatten(1)[:, : c.num_critics].argsort(1)  # of independent draws: a permutation
            drawn = torch.zeros_like(order, dtype=torch.bool).scatter_(1, order[:, : c.subset], True)
            q = q.masked_fill(~drawn.T[..., None], math.inf)
        return q.amin(0)

    @torch.no_grad()
    def select_action(self, batch: dict[str, Any], noise: Tensor | None = None, **_: Any) -> Float[Tensor, "b a"]:
        """The next action of a queue that is refilled every ``n_action_steps`` calls."""
        given = batch.get(ACTION)  # where the base has relative actions, see `ActionQueue`
        origin = torch.zeros((), device=batch[OBS_STATE].device) if given is None else given[:, 0]
        steps = self.config.n_action_steps
        return self._queue.next(origin, lambda: self.predict_action_chunk(batch, noise)[:, :steps])

    def forward(self, batch: dict[str, Any], **_: Any) -> tuple[Tensor, dict[str, float]]:
        """The base's own loss, for LeRobot's training loop; edits and critics are learnt from experience alone."""
        return self.base.forward(batch)

    def reset(self) -> None:
        """Forget the queued actions."""
        self._queue.clear()

    def get_optim_params(self) -> Any:
        return self.base.get_optim_params()


def _each(x: Float[Tensor, "b f"], n: int) -> Float[Tensor, "b n f"]:
    """Each row ``n`` times."""
    return x[:, None].expand(-1, n, -1)

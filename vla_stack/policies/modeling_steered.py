"""A frozen flow policy that a small actor steers: by its noise, or by acting in its place on what it sees.

Wagenmaker et al., "Steering Your Diffusion Policy with Latent Space Reinforcement Learning" (DSRL, arXiv:2506.15799):
the chunk of a flow is a function of the noise that it starts from, so an actor that chooses the noise chooses among
what the policy would do anyway. ``methods/dsrl.py`` trains one, ``methods/rlpd_vla.py`` one that gives the actions.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from vla_stack.errors import UserError
from vla_stack.lerobot_core import PreTrainedPolicy
from vla_stack.policies import flow
from vla_stack.policies.action_queue import ActionQueue
from vla_stack.policies.configuration_steered import SteeredConfig
from vla_stack.policies.contract import FlowPolicy, NoisePolicy
from vla_stack.policies.decided import Decided
from vla_stack.policies.gaussian import GaussianActor
from vla_stack.policies.registry import blank_policy
from vla_stack.schema import ACTION, OBS_STATE

INSIDE = 0.999  # how far inside its bound the base's own noise is taken to lie, where values are of what an actor gives


class SteeredPolicy(PreTrainedPolicy, NoisePolicy):
    """The base's chunk from the noise that the actor gives, or the actor's own.

    Args:
        config: Configuration with features filled in.
        base: A flow policy; None makes one to read weights into.
        actor: The actor, of what the base observed; None makes one.

    Raises:
        UserError: The base is no flow policy.
    """

    config_class = SteeredConfig
    name = "steered"

    def __init__(
        self,
        config: SteeredConfig,
        base: PreTrainedPolicy | None = None,
        actor: GaussianActor | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config)
        config.validate_features()
        self.config = config
        self.base: Any = blank_policy(config.base) if base is None else base
        if not isinstance(self.base, FlowPolicy) or self.base.one_step:
            raise UserError(f"policy '{config.base.type}' cannot be steered", "it has no flow of actions")
        self.horizon, self.action_dim, self.noise_dim = self.base.horizon, self.base.action_dim, self.base.noise_dim
        self.noise_scale = 1.0 if config.alone else config.noise_scale
        # The shape of what is given: the noise of the whole chunk, or the executed actions.
        acts = config.gives == "actions"
        self.given = (config.n_action_steps, self.action_dim) if acts else (self.horizon, self.noise_dim)
        width = self.given[0] * self.given[1]
        self.actor = actor or GaussianActor(
            config.feature_dim, width, config.hidden, config.layer_norm, None, config.log_std, config.norm_eps
        )
        self._queue = ActionQueue()

    @torch.no_grad()
    def predict_action_chunk(
        self, batch: dict[str, Any], noise: Tensor | None = None, **_: Any
    ) -> Float[Tensor, "b h a"]:
        """One chunk an observation; what is drawn for it is its ``noise`` [b, h, noise_dim], of ``noise_scale``."""
        if noise is None:
            state = batch[OBS_STATE]
            noise = torch.randn(len(state), self.horizon, self.noise_dim, device=state.device) * self.noise_scale
        return self.decide(batch, noise).chunk

    @torch.no_grad()
    def decide(self, batch: dict[str, Any], noise: Float[Tensor, "b h w"], alone: bool = False) -> Decided:
        """What is given, in [-1, 1] of its bound, and the chunk; ``alone``: the base, of its own noise."""
        context = self.base.encode(batch)
        return self.decided(context, self.base.observed(context, batch), noise, alone)

    def decided(self, context: Any, seen: Tensor, noise: Float[Tensor, "b h w"], alone: bool) -> Decided:
        """:meth:`decide`, of what the base made of an observation."""
        steps, width = self.given
        if alone or self.config.alone:
            own = noise * self.base.noise_scale
            chunk = self.flow(context, own)
            given = chunk[:, :steps] if self.config.gives == "actions" else own
            bounded = self.bounded(given.flatten(1))
            return Decided(seen, bounded, chunk, bounded[:, None][:, :0])
        y = self.drawn(seen, noise[:, :steps, :width].flatten(1))
        shaped = y.unflatten(1, self.given)
        if self.config.gives == "noise":
            chunk = self.flow(context, self.config.magnitude * shaped)
        else:
            chunk = self.config.action_limit * torch.cat(
                [shaped, shaped[:, -1:].expand(-1, self.horizon - steps, -1)], 1
            )
        return Decided(seen, y, chunk, y[:, None][:, :0])

    def drawn(self, seen: Float[Tensor, "b f"], noise: Float[Tensor, "b d"]) -> Float[Tensor, "b d"]:
        """What the actor gives, in [-1, 1]."""
        mean, log_std = self.actor(seen)
        return torch.tanh(mean + log_std.exp() * noise)

    def bounded(self, given: Float[Tensor, "b d"]) -> Float[Tensor, "b d"]:
        """Noise or actions as the actor would have given them, strictly inside [-1, 1]."""
        most = self.config.action_limit if self.config.gives == "actions" else self.config.magnitude
        return (given / most).clamp(-INSIDE, INSIDE)

    def flow(self, context: Any, noise: Float[Tensor, "b h w"]) -> Float[Tensor, "b h a"]:
        """The base's chunk from a noise."""
        chunk = flow.euler(lambda x, t: self.base.velocity(context, x, t), noise, self.base.inference_steps)
        return chunk[..., : self.action_dim]

    @torch.no_grad()
    def select_action(self, batch: dict[str, Any], noise: Tensor | None = None, **_: Any) -> Float[Tensor, "b a"]:
        """The next action of a queue that is refilled every ``n_action_steps`` calls."""
        given = batch.get(ACTION)  # where the base has relative actions, see `ActionQueue`
        origin = torch.zeros((), device=batch[OBS_STATE].device) if given is None else given[:, 0]
        steps = self.config.n_action_steps
        return self._queue.next(origin, lambda: self.predict_action_chunk(batch, noise)[:, :steps])

    def forward(self, batch: dict[str, Any], **_: Any) -> tuple[Tensor, dict[str, float]]:
        """The base's own loss, for LeRobot's training loop; the actor is learnt from experience alone."""
        return self.base.forward(batch)

    def reset(self) -> None:
        """Forget the queued actions."""
        self._queue.clear()

    def get_optim_params(self) -> Any:
        return self.base.get_optim_params()

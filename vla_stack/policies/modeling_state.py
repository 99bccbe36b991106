"""Small policies on states as LeRobot policies: a squashed Gaussian, and a flow."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from vla_stack.lerobot_core import PreTrainedPolicy
from vla_stack.policies.action_queue import ActionQueue
from vla_stack.policies.configuration_state import StateConfig, StateFlowConfig, StateGaussianConfig
from vla_stack.policies.contract import FlowPolicy, NoisePolicy
from vla_stack.policies.gaussian import GaussianActor
from vla_stack.policies.observer import Observer
from vla_stack.policies.state_flow import StateContext, StateFlow
from vla_stack.schema import ACTION


class StateGaussianPolicy(PreTrainedPolicy, NoisePolicy):
    """Chunks tanh(mu + noise_scale * sigma * z), in [-1, 1] of the robot's range.

    Args:
        config: Configuration with features filled in.
        actor: Its network; None makes a new one.
        encoder: Its encoder, where ``config.encoder`` says that it has one; None makes one to read weights into.
    """

    config_class = StateGaussianConfig
    name = "state_gaussian"

    def __init__(
        self,
        config: StateGaussianConfig,
        actor: GaussianActor | None = None,
        encoder: PreTrainedPolicy | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config)
        self.config, self.horizon, self.action_dim = config, *_sizes(config)
        self.noise_dim, self.noise_scale = self.action_dim, config.noise_scale
        self.observer = Observer(config, encoder)
        width = self.horizon * self.action_dim
        self.actor = actor or GaussianActor(
            config.obs_dim, width, config.hidden, config.layer_norm, log_std=config.log_std, norm_eps=config.norm_eps
        )
        self._queue = ActionQueue()

    @torch.no_grad()
    def predict_action_chunk(
        self, batch: dict[str, Any], noise: Tensor | None = None, **_: Any
    ) -> Float[Tensor, "b h a"]:
        """One chunk an observation, from ``noise`` [b, h, a] of scale ``noise_scale``."""
        mean, log_std = self.actor(self.observer(batch))
        noise = torch.randn_like(mean) * self.noise_scale if noise is None else noise.flatten(1)
        return torch.tanh(mean + log_std.exp() * noise).unflatten(1, (self.horizon, self.action_dim))

    @torch.no_grad()
    def select_action(self, batch: dict[str, Any], noise: Tensor | None = None, **_: Any) -> Float[Tensor, "b a"]:
        """The next action of a queue that is refilled every ``n_action_steps`` calls."""
        return _next(self, batch, noise)

    def forward(self, batch: dict[str, Any], **_: Any) -> tuple[Tensor, dict[str, float]]:
        """Likelihood of a batch's chunks, for LeRobot's training loop."""
        nll, _log_std = self.actor.nll(self.observer(batch), batch[ACTION].flatten(1))
        return nll.mean(), {"nll": nll.mean().item()}

    def reset(self) -> None:
        """Forget the queued actions."""
        self._queue.clear()

    def get_optim_params(self) -> list[dict[str, Any]]:
        return [{"params": [*self.actor.parameters()]}]


class StateFlowPolicy(PreTrainedPolicy, FlowPolicy[StateContext]):
    """A flow on states; what samplers and methods need of a flow policy (``contract.FlowPolicy``), token states aside.

    Args:
        config: Configuration with features filled in.
        net: Its network; None makes a new one.
        encoder: As of :class:`StateGaussianPolicy`.
    """

    config_class = StateFlowConfig
    name = "state_flow"

    def __init__(
        self, config: StateFlowConfig, net: StateFlow | None = None, encoder: PreTrainedPolicy | None = None, **_: Any
    ) -> None:
        super().__init__(config)
        self.config, self.horizon, self.action_dim = config, *_sizes(config)
        self.noise_dim, self.state_width = self.action_dim, config.obs_dim
        self.observer = Observer(config, encoder)
        shape = (config.obs_dim, self.horizon, self.action_dim, config.hidden, config.num_inference_steps)
        self.net = net or StateFlow(*shape)
        self._queue = ActionQueue()

    def encode(self, batch: dict[str, Any]) -> StateContext:
        """What the network sees of a preprocessed batch."""
        return StateContext(self.observer(batch))

    def velocity(
        self, context: StateContext, x: Float[Tensor, "b h a"], t: Float[Tensor, " b"]
    ) -> Float[Tensor, "b h a"]:
        """See :meth:`FlowPolicy.velocity`."""
        return self.net.velocity(context, x, t)

    def features(self, context: StateContext) -> Float[Tensor, "b o"]:
        """What the network sees."""
        return context.obs

    def observed(self, context: StateContext, batch: dict[str, Any]) -> Float[Tensor, "b o"]:
        """What the network sees: the state is in it, and normalised."""
        return context.obs

    @property
    def inference_steps(self) -> int:
        return self.config.num_inference_steps

    @torch.no_grad()
    def predict_action_chunk(
        self, batch: dict[str, Any], noise: Tensor | None = None, **_: Any
    ) -> Float[Tensor, "b h a"]:
        """One chunk an observation, from ``noise`` [b, h, a], or fresh noise; in [-1, 1]."""
        context = self.encode(batch)
        if noise is None:
            noise = torch.randn(len(context.obs), self.horizon, self.action_dim, device=context.obs.device)
        return self.net.integrate(context, noise)

    @torch.no_grad()
    def select_action(self, batch: dict[str, Any], noise: Tensor | None = None, **_: Any) -> Float[Tensor, "b a"]:
        """The next action of a queue that is refilled every ``n_action_steps`` calls."""
        return _next(self, batch, noise)

    def forward(self, batch: dict[str, Any], **_: Any) -> tuple[Tensor, dict[str, float]]:
        """Flow matching error of a batch's chunks, for LeRobot's training loop."""
        loss = self.net.imitation_loss(self.observer(batch), batch[ACTION], torch.default_generator)
        return loss, {"flow_loss": loss.item()}

    def reset(self) -> None:
        """Forget the queued actions."""
        self._queue.clear()

    def get_optim_params(self) -> list[dict[str, Any]]:
        return [{"params": [*self.net.parameters()]}]


def _sizes(config: StateConfig) -> tuple[int, int]:
    """Actions of a chunk and entries of an action."""
    config.validate_features()
    assert config.action_feature is not None
    return config.chunk_size, config.action_feature.shape[0]


def _next(policy: StateGaussianPolicy | StateFlowPolicy, batch: dict[str, Any], noise: Tensor | None) -> Tensor:
    steps = policy.config.n_action_steps
    return policy._queue.next(torch.zeros(()), lambda: policy.predict_action_chunk(batch, noise)[:, :steps])

"""A small flow policy on state vectors: a plain network as velocity field, for reinforcement learning at CPU scale.

What is written against :class:`~vla_stack.policies.contract.FlowPolicy` runs on it and on a VLA, mixtures of horizons
apart. Observations and actions are normalised, actions in [-1, 1].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from vla_stack.policies import flow
from vla_stack.policies.contract import FlowPolicy
from vla_stack.policies.critics import Ensemble
from vla_stack.schema import OBS_STATE

FREQUENCIES = 4


class StateContext(NamedTuple):
    """An encoded observation: itself."""

    obs: Tensor  # float32 [b, o]

    def repeat(self, n: int) -> StateContext:
        """Each observation ``n`` times."""
        return StateContext(self.obs.repeat_interleave(n, 0))


class StateFlow(torch.nn.Module, FlowPolicy[StateContext]):
    """Velocity v(x, t | o) of a chunk, from one network of [x, o, sines and cosines of t].

    Args:
        obs: Width of an observation, o.
        horizon: Steps of a chunk, h.
        actions: Width of an action, a.
        hidden: Widths of the hidden layers.
        inference_steps: Euler steps of a sample.
        generator: Source of the initial weights.
    """

    def __init__(
        self,
        obs: int,
        horizon: int,
        actions: int,
        hidden: Sequence[int] = (256, 256, 256),
        inference_steps: int = 4,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.horizon, self.action_dim, self.noise_dim, self.state_width = horizon, actions, actions, obs
        self._inference_steps = inference_steps
        width = horizon * actions
        self.net = Ensemble(1, width + obs + 2 * FREQUENCIES, hidden, width, True, generator)
        self.register_buffer("frequencies", 0.5 * math.pi * 2.0 ** torch.arange(FREQUENCIES), persistent=False)

    @property
    def inference_steps(self) -> int:
        return self._inference_steps

    def encode(self, batch: dict[str, Any]) -> StateContext:
        """The observation of a batch with ``observation.state`` float32 [b, o]."""
        return StateContext(batch[OBS_STATE])

    def features(self, context: StateContext) -> Float[Tensor, "b o"]:
        """The observation."""
        return context.obs

    def velocity(
        self, context: StateContext, x: Float[Tensor, "b h a"], t: Float[Tensor, " b"]
    ) -> Float[Tensor, "b h a"]:
        """Velocity of the flow at x."""
        phase = t[:, None] * self.frequencies
        out = self.net(torch.cat([x.flatten(1), context.obs, phase.sin(), phase.cos()], -1))[0]
        return out.view_as(x)

    def sample(self, obs: Float[Tensor, "b o"], generator: torch.Generator) -> Float[Tensor, "b h a"]:
        """Chunks in [-1, 1]."""
        noise = flow.sample_noise((len(obs), self.horizon, self.action_dim), generator, obs.device)
        context = StateContext(obs)
        return self.integrate(context, noise)

    def integrate(self, context: StateContext, noise: Float[Tensor, "b h a"]) -> Float[Tensor, "b h a"]:
        """Chunks in [-1, 1] of the noise that they start from."""
        return flow.euler(lambda x, t: self.velocity(context, x, t), noise, self.inference_steps).clamp(-1.0, 1.0)

    def imitation_loss(
        self, obs: Float[Tensor, "b o"], actions: Float[Tensor, "b h a"], generator: torch.Generator
    ) -> Tensor:
        """Flow matching error of chunks, times uniform."""
        noise = flow.sample_noise(tuple(actions.shape), generator, actions.device)
        t = torch.rand(len(obs), generator=generator).to(actions.device)
        x = flow.interpolate(actions, noise, t)
        return F.mse_loss(self.velocity(StateContext(obs), x, t), flow.target(actions, noise))

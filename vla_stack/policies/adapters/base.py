"""What the adapters share: the public side of a flow policy, its sampler, and loading that insists on weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from lerobot.policies.common.vla_utils import create_sinusoidal_pos_embedding
from torch import Tensor, nn

from vla_stack.errors import UserError
from vla_stack.lerobot_core import PreTrainedConfig
from vla_stack.policies import flow
from vla_stack.policies.contract import FlowPolicy, Time
from vla_stack.policies.reading import find_weights
from vla_stack.policies.transformer import PrefixContext
from vla_stack.policies.weights import load_weights, read_weights


class FlowAdapter(nn.Module, FlowPolicy[PrefixContext]):
    """A LeRobot policy as a flow policy; mixed in before LeRobot's class.

    Raises:
        UserError: The robot's state or action is larger than what the policy pads to.

    LeRobot pads states and actions with zeros to ``max_action_dim``, and its flow carries noise in all of these
    dimensions. So does this one: points of either width are accepted, narrower ones are taken to be 0 beyond
    ``action_dim``, and a velocity is as wide as the point it was asked for.

    Attributes:
        horizon: Actions per chunk; chunks of any other length are accepted.
        action_dim: Real entries of an action.
        noise_dim: Entries of the noise that sampling and training start from, padding included.
        causal_actions: Whether an action token reads no later ones, as SmolVLA was pretrained. The directory does not
            record it: whoever changes it has to.
    """

    pads = True

    def __init__(self, config: Any, **kwargs: Any) -> None:
        real = {"max_state_dim": config.robot_state_feature, "max_action_dim": config.action_feature}
        for limit, feature in real.items():
            size, most = feature.shape[0] if feature else 0, getattr(config, limit)
            if size > most:
                raise UserError(f"{config.type} pads to {limit}={most}, the robot has {size}", f"set {limit} to {size}")
        super().__init__(config, **kwargs)
        self.horizon, self.action_dim = config.chunk_size, config.action_feature.shape[0]
        self.noise_dim, self.state_width = config.max_action_dim, self.model.action_out_proj.in_features
        for module in self.unread():
            module.requires_grad_(False)

    def unread(self) -> list[nn.Module]:
        """Modules that no action depends on: they are saved and loaded, not trained."""
        raise NotImplementedError

    def for_inference(self) -> None:
        """Drop what no action depends on, 1.8 GB of pi0 in bfloat16; it cannot be saved any more."""
        unread = set(self.unread())
        for name in [name for name, module in self.named_modules() if module in unread]:
            self.set_submodule(name, nn.Identity())

    # --- FlowPolicy -----------------------------------------------------------------------------------------------

    def velocity(self, context: PrefixContext, x: Float[Tensor, "b h a"], t: Time) -> Float[Tensor, "b h a"]:
        """See :meth:`FlowPolicy.velocity`; ``a`` is ``action_dim`` or ``noise_dim``."""
        return self.action_head(self.action_states(context, x, t))[..., : x.shape[-1]]

    def action_states(
        self,
        context: PrefixContext,
        x: Float[Tensor, "b n a"],
        t: Time,
        blocks: Sequence[int] | None = None,
        valid: Bool[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b n d"]:
        """See :meth:`FlowPolicy.action_states`."""
        raise NotImplementedError

    def action_head(self, states: Float[Tensor, "b n d"]) -> Float[Tensor, "b n p"]:
        """Velocities of states, ``noise_dim`` wide."""
        return self.model.action_out_proj(states.float())

    def features(self, context: PrefixContext) -> Float[Tensor, "b d"]:
        return context.summary

    def _embed_actions(self, x: Float[Tensor, "b n a"]) -> Float[Tensor, "b n d"]:
        return self.model.action_in_proj(F.pad(x, (0, self.noise_dim - x.shape[-1])))

    def _embed_time(self, t: Time, width: int) -> Float[Tensor, "b n_or_1 d"]:
        """Sine and cosine of the time, float32, one a token or one a sample."""
        t, c = flow.per_token(t), self.config
        flat = create_sinusoidal_pos_embedding(t.flatten(), width, c.min_period, c.max_period, device=t.device)
        return flat.view(*t.shape, width).float()

    def _embed_suffix(self, x: Float[Tensor, "b n a"], t: Time) -> Float[Tensor, "b n d"]:
        """Actions and time through one network, as in SmolVLA and pi0."""
        action = self._embed_actions(x)
        time = self._embed_time(t, action.shape[-1]).to(action.dtype).expand_as(action)
        hidden = F.silu(self.model.action_time_mlp_in(torch.cat((action, time), dim=-1)))
        return self.model.action_time_mlp_out(hidden)

    # --- LeRobot --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def predict_action_chunk(
        self, batch: dict[str, Any], noise: Tensor | None = None, prefix: flow.ActionPrefix | None = None
    ) -> Float[Tensor, "b h a"]:
        """Sample one normalised chunk an observation from ``noise`` [b, h, noise_dim], or from fresh noise."""
        self.eval()
        context = self.encode(batch)
        if noise is None:
            noise = torch.randn(len(context.mask), self.horizon, self.noise_dim, device=context.mask.device)
        if prefix is not None:
            padding = (0, noise.shape[-1] - prefix.actions.shape[-1])
            prefix = flow.ActionPrefix(F.pad(prefix.actions, padding), prefix.mask)
        chunk = flow.euler(lambda x, t: self.velocity(context, x, t), noise, self.inference_steps, prefix)
        return chunk[..., : self.action_dim]

    @classmethod
    def from_pretrained(
        cls, pretrained_name_or_path: str | Path, *, config: Any = None, revision: str | None = None, **_: Any
    ) -> FlowAdapter:
        """Load a policy directory or hub repository; unlike LeRobot's loading, every weight must be there.

        Raises:
            UserError: There are no weights, they cannot be read, or they are those of another model.
        """
        file = find_weights(pretrained_name_or_path, revision)
        config = config or PreTrainedConfig.from_pretrained(pretrained_name_or_path, revision=revision)
        policy = cls.blank(config)
        load_weights(policy, policy.rename(read_weights(file)), file)
        return policy.to(config.device).eval()

    @classmethod
    def blank(cls, config: Any) -> FlowAdapter:
        """A policy whose weights are about to be replaced."""
        return cls(config)

    def rename(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Weights under the names of this policy's parameters."""
        return weights

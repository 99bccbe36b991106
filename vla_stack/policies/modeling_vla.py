"""The native VLA as a LeRobot policy: images, instruction and state to a prefix, the prefix to an action chunk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from lerobot.policies import PreTrainedPolicy
from torch import Tensor

import vla_stack.policies.processor_vla  # noqa: F401  registers the steps that a saved policy's processors name
from vla_stack.errors import UserError
from vla_stack.policies import flow
from vla_stack.policies.action_queue import ActionQueue
from vla_stack.policies.configuration_vla import VlaConfig
from vla_stack.policies.contract import Time
from vla_stack.policies.dataset_facts import adopt_dataset
from vla_stack.policies.expert import ActionExpert, Geometry
from vla_stack.policies.prefix import ScratchPrefix
from vla_stack.policies.transformer import PrefixContext
from vla_stack.schema import ACTION, OBS_STATE


class VlaPolicy(PreTrainedPolicy):
    """Flow-matching VLA; implements :class:`~vla_stack.policies.contract.FlowPolicy`.

    Args:
        config: Configuration with features filled in.
        dataset_meta: LeRobot's metadata of the training data, passed by LeRobot's own tools. The statistics of its
            actions are replaced, in memory, by those of chunk-relative actions, which the processors then use.
    """

    config_class = VlaConfig
    name = "vla"
    causal_actions = False

    def __init__(self, config: VlaConfig, dataset_meta: Any = None, **_: Any) -> None:
        super().__init__(config)
        config.validate_features()
        if dataset_meta is not None:
            adopt_dataset(config, dataset_meta)
        self.config = config
        self.horizon, self.action_dim = config.chunk_size, config.action_feature.shape[0]
        self.state_width = config.expert_width
        self.prefix = ScratchPrefix(config)
        geometry = Geometry(config.depth, config.heads, config.head_dim, config.heads)
        self.expert = ActionExpert(self.horizon, self.action_dim, config.expert_width, geometry)
        self._queue = ActionQueue()

    # --- FlowPolicy -----------------------------------------------------------------------------------------------

    def encode(self, batch: dict[str, Any]) -> PrefixContext:
        """Prefix of a preprocessed batch.

        Raises:
            SchemaError: A camera is missing or has another size than the policy was trained with.
        """
        return self.prefix(batch)

    def velocity(self, context: PrefixContext, x: Float[Tensor, "b h a"], t: Time) -> Float[Tensor, "b h a"]:
        """See :meth:`FlowPolicy.velocity`; a chunk shorter than the horizon is accepted."""
        return self.action_head(self.action_states(context, x, t))

    def action_states(
        self,
        context: PrefixContext,
        x: Float[Tensor, "b n a"],
        t: Time,
        blocks: Sequence[int] | None = None,
        valid: Bool[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b n d"]:
        """See :meth:`FlowPolicy.action_states`."""
        return self.expert(context, x, t, blocks, valid)

    def action_head(self, states: Float[Tensor, "b n d"]) -> Float[Tensor, "b n a"]:
        return self.expert.head(states)

    def features(self, context: PrefixContext) -> Float[Tensor, "b d"]:
        return context.summary

    # --- LeRobot --------------------------------------------------------------------------------------------------

    def forward(
        self, batch: dict[str, Any], reduction: Literal["mean", "none"] = "mean"
    ) -> tuple[Tensor, dict[str, float]]:
        """Flow-matching loss on torch's global generator, for LeRobot's training loop; ours is methods/imitation.py.

        Returns:
            The loss, a scalar or ``[b]``, and values to log.
        """
        actions = batch[ACTION]
        generator = torch.default_generator
        noise = flow.sample_noise(tuple(actions.shape), generator, actions.device)
        t = flow.sample_time(len(actions), generator, actions.device)
        loss = flow.masked_mean(
            flow.squared_error(self, self.encode(batch), actions, noise, t), flow.valid_entries(batch)
        )
        return (loss if reduction == "none" else loss.mean()), {"flow_loss": loss.mean().item()}

    @torch.no_grad()
    def predict_action_chunk(
        self, batch: dict[str, Any], noise: Tensor | None = None, prefix: flow.ActionPrefix | None = None, **_: Any
    ) -> Float[Tensor, "b h a"]:
        """Sample one normalised chunk an observation from ``noise`` [b, h, a], or noise of the configured scale."""
        self.eval()
        context = self.encode(batch)
        if noise is None:
            state = batch[OBS_STATE]
            noise = torch.randn(len(state), self.horizon, self.action_dim, dtype=state.dtype, device=state.device)
            noise *= self.config.noise_scale
        return flow.euler(lambda x, t: self.velocity(context, x, t), noise, self.config.num_inference_steps, prefix)

    @torch.no_grad()
    def select_action(self, batch: dict[str, Any], noise: Tensor | None = None, **_: Any) -> Float[Tensor, "b a"]:
        """The next action of a queue that is refilled every ``n_action_steps`` calls."""
        return self._queue.next(
            batch[ACTION][:, 0], lambda: self.predict_action_chunk(batch, noise)[:, : self.config.n_action_steps]
        )

    def reset(self) -> None:
        """Forget the queued actions."""
        self._queue.clear()

    def get_optim_params(self) -> list[dict[str, Any]]:
        """Parameter groups: weight decay on matrices alone."""
        matrices = [p for p in self.parameters() if p.requires_grad and p.ndim >= 2]
        vectors = [p for p in self.parameters() if p.requires_grad and p.ndim < 2]
        return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]

    @classmethod
    def from_pretrained(cls, pretrained_name_or_path: str | Path, **kwargs: Any) -> VlaPolicy:
        """Load a policy directory; unlike LeRobot's default, every weight must be there.

        Raises:
            UserError: The directory holds no weights.
        """
        path = Path(pretrained_name_or_path)
        if path.is_dir() and not (path / "model.safetensors").is_file():
            raise UserError(f"{path} has no model.safetensors", "give the pretrained_model folder of a checkpoint")
        return super().from_pretrained(pretrained_name_or_path, **{**kwargs, "strict": True})

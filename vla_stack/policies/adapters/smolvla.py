"""SmolVLA (Shukor et al. 2025, arXiv:2506.01844): SmolVLM2's lower layers and an action expert beside them.

Every second expert layer attends to prefix and actions together, as in pi0; the others read the prefix alone, through
projections of their own of the cached keys and values. These projections do not depend on the actions, so they are made
once an observation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig
from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy
from lerobot.utils.constants import OBS_LANGUAGE_ATTENTION_MASK, OBS_LANGUAGE_TOKENS
from torch import Tensor, nn

from vla_stack.errors import UserError
from vla_stack.policies.adapters.base import FlowAdapter
from vla_stack.policies.adapters.decoder import (
    action_mask,
    action_positions,
    attend,
    feed_forward,
    heads,
    masked_mean,
    normalise,
    prefill,
    rotate,
    rotation,
    run_layer,
)
from vla_stack.policies.contract import Time
from vla_stack.policies.transformer import KeyValue, PrefixContext


class SmolVLA(FlowAdapter, SmolVLAPolicy):
    """LeRobot's SmolVLA as a flow policy.

    Raises:
        UserError: ``adapt_to_pi_aloha`` is set: it changes actions between the network and the processors.
    """

    config_class = SmolVLAConfig
    name = "smolvla"
    causal_actions = True

    def __init__(self, config: SmolVLAConfig, **kwargs: Any) -> None:
        if config.adapt_to_pi_aloha:
            raise UserError("SmolVLA's option adapt_to_pi_aloha is not supported", "train on joints in radians instead")
        super().__init__(config, **kwargs)

    @property
    def inference_steps(self) -> int:
        return self.config.num_steps

    @property
    def frame(self) -> tuple[int, int] | None:
        size = self.config.resize_imgs_with_padding  # width first
        return (size[1], size[0]) if size else None

    def unread(self) -> list[nn.Module]:
        vlm, last = self.model.vlm_with_expert.vlm, self._layers()[-1][0]
        after = (last.self_attn.q_proj, last.self_attn.o_proj, last.post_attention_layernorm, last.mlp)
        return [vlm.lm_head, vlm.model.text_model.norm, *after]

    def encode(self, batch: dict[str, Any]) -> PrefixContext:
        """Images, instruction and state; the state is the prefix's last token, which no earlier one reads."""
        images, image_masks = self.prepare_images(batch)
        words, word_mask = batch[OBS_LANGUAGE_TOKENS], batch[OBS_LANGUAGE_ATTENTION_MASK]
        tokens, real, group = self.model.embed_prefix(
            images, image_masks, words, word_mask, state=self.prepare_state(batch)
        )
        group = group.cumsum(1)
        mask = (group[:, None] <= group[:, :, None]) & real[:, None]
        layers = [vlm for vlm, _ in self._layers()]
        cache, summary = prefill(layers, tokens, real.cumsum(1) - 1, mask)
        return PrefixContext(tuple(self._read_by_expert(cache)), real, masked_mean(summary, real))

    def action_states(
        self,
        context: PrefixContext,
        x: Float[Tensor, "b n a"],
        t: Time,
        blocks: Sequence[int] | None = None,
        valid: Bool[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b n d"]:
        lengths = (x.shape[1],) if blocks is None else tuple(blocks)
        positions = action_positions(context.mask, lengths)
        mask = action_mask(context.mask, lengths, valid, self.causal_actions)
        here = self._expert_layers()
        by = rotation(positions, here[0][1].self_attn.head_dim)
        by_step = rotation(positions - context.mask.sum(1, keepdim=True), here[0][1].self_attn.head_dim)

        y = self._embed_suffix(x, t).to(here[0][1].self_attn.o_proj.weight.dtype)
        for (i, layer), kv in zip(here, context.keys_values, strict=True):
            if self._reads_prefix_alone(i):
                y = self._cross_attend(layer, y, by_step, kv, context.mask[:, None])
            else:
                y, _ = run_layer(layer, y, by, mask, kv)
        return self.model.vlm_with_expert.lm_expert.norm(y)

    def _cross_attend(self, layer: nn.Module, x: Tensor, by: Any, kv: KeyValue, mask: Tensor) -> Tensor:
        y, _ = normalise(layer.input_layernorm, x, None)
        q = rotate(heads(layer.self_attn.q_proj, y, layer.self_attn.head_dim), by)
        return feed_forward(layer, x, attend(q, *kv, mask), None)

    def _read_by_expert(self, cache: Sequence[KeyValue]) -> Iterator[KeyValue]:
        """Keys and values as the expert's layers read them, one pair an expert layer."""
        for i, layer in self._expert_layers():
            k, v = cache[i]
            if self._reads_prefix_alone(i):
                a = layer.self_attn
                k, v = (heads(p, z.transpose(1, 2).flatten(2), a.head_dim) for p, z in ((a.k_proj, k), (a.v_proj, v)))
            yield k, v

    def _layers(self) -> list[tuple[nn.Module, nn.Module | None]]:
        """Layers of the language model, each with the expert's layer beside it (an expert may have fewer)."""
        m = self.model.vlm_with_expert
        return list(zip(*m.get_model_layers([m.get_vlm_model().text_model, m.lm_expert]), strict=True))

    def _expert_layers(self) -> list[tuple[int, nn.Module]]:
        return [(i, expert) for i, (_, expert) in enumerate(self._layers()) if expert is not None]

    def _reads_prefix_alone(self, i: int) -> bool:
        m = self.model.vlm_with_expert
        every = m.self_attn_every_n_layers
        return "cross" in m.attention_mode and not (every > 0 and i % every == 0)

    @classmethod
    def blank(cls, config: SmolVLAConfig) -> SmolVLA:
        """Without the language model's own weights, which are part of the policy's."""
        policy = cls(replace(config, load_vlm_weights=False))
        policy.config = policy.model.config = config
        if config.load_vlm_weights:  # LeRobot reads them in bfloat16
            policy.model.vlm_with_expert.vlm.to(torch.bfloat16)
        return policy

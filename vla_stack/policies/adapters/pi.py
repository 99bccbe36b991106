"""pi0 (Black et al. 2024, arXiv:2410.24164) and pi0.5 (2025, arXiv:2504.16054): PaliGemma and a Gemma action expert.

pi0's state is a token of the expert that reads the prefix and itself: neither the actions nor their time. So it is part
of the context here, its keys and values cached after the prefix's. pi0.5 has its state in the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from lerobot.policies.pi0.configuration_pi0 import PI0Config
from lerobot.policies.pi0.modeling_pi0 import PI0Policy
from lerobot.policies.pi05.configuration_pi05 import PI05Config
from lerobot.policies.pi05.modeling_pi05 import PI05Policy
from lerobot.utils.constants import OBS_LANGUAGE_ATTENTION_MASK, OBS_LANGUAGE_TOKENS
from torch import Tensor, nn

from vla_stack.policies.adapters.base import FlowAdapter
from vla_stack.policies.adapters.decoder import (
    action_mask,
    action_positions,
    masked_mean,
    normalise,
    prefill,
    rotation,
    run_layer,
)
from vla_stack.policies.contract import Time
from vla_stack.policies.transformer import PrefixContext
from vla_stack.schema import OBS_STATE


class PiAdapter(FlowAdapter):
    """What pi0 and pi0.5 share: the prefix, and the expert's layers over it.

    Attributes:
        padded_positions: Whether what follows the prefix counts its positions from the end of its padding. openpi and
            LeRobot count from its last real token; the directory does not record it: whoever changes it has to.
    """

    padded_positions = False

    @property
    def inference_steps(self) -> int:
        return self.config.num_inference_steps

    @property
    def frame(self) -> tuple[int, int]:
        return self.config.image_resolution

    @property
    def _vlm(self) -> nn.Module:
        return self.model.paligemma_with_expert.paligemma

    @property
    def _expert(self) -> nn.Module:
        return self.model.paligemma_with_expert.gemma_expert.model

    def unread(self) -> list[nn.Module]:
        language = self._vlm.model.language_model
        last = language.layers[-1]
        heads = [self.model.paligemma_with_expert.gemma_expert.lm_head]
        if self._vlm.lm_head.weight is not language.embed_tokens.weight:
            heads.append(self._vlm.lm_head)
        after = (last.self_attn.q_proj, last.self_attn.o_proj, last.post_attention_layernorm, last.mlp)
        return [*heads, *after, language.norm]

    def encode(self, batch: dict[str, Any]) -> PrefixContext:
        """Images and text, all of which read each other."""
        images, image_masks = self._preprocess_images(batch)
        words, word_mask = batch[OBS_LANGUAGE_TOKENS], batch[OBS_LANGUAGE_ATTENTION_MASK]
        tokens, real, _ = self.model.embed_prefix(images, image_masks, words, word_mask)
        layers = self._vlm.model.language_model.layers
        cache, summary = prefill(layers, tokens, real.cumsum(1) - 1, real[:, None], recompute=self._recomputes())
        return PrefixContext(cache, real, masked_mean(summary, real))

    def action_states(
        self,
        context: PrefixContext,
        x: Float[Tensor, "b n a"],
        t: Time,
        blocks: Sequence[int] | None = None,
        valid: Bool[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b n d"]:
        lengths = (x.shape[1],) if blocks is None else tuple(blocks)
        layers = self._expert.layers
        mask = action_mask(context.mask, lengths, valid, self.causal_actions)
        by = rotation(action_positions(self._counted(context.mask), lengths), layers[0].self_attn.head_dim)
        y, condition = self._embed(x, t)
        y = y.to(layers[0].self_attn.o_proj.weight.dtype)
        for layer, kv in zip(layers, context.keys_values, strict=True):
            y, _ = run_layer(layer, y, by, mask, kv, condition)
        return normalise(self._expert.norm, y, condition)[0]

    def _counted(self, prefix: Bool[Tensor, "b m"]) -> Bool[Tensor, "b m"]:
        """Tokens of the prefix that count in the positions of what follows."""
        return torch.ones_like(prefix) if self.padded_positions else prefix

    def _embed(self, x: Float[Tensor, "b n a"], t: Time) -> tuple[Tensor, Tensor | None]:
        """Action tokens, and what conditions the expert's norms."""
        raise NotImplementedError

    def _recomputes(self) -> bool:
        """Whether activations are recomputed in the backward pass (LeRobot's option ``gradient_checkpointing``)."""
        return self.model.gradient_checkpointing_enabled and self.training and torch.is_grad_enabled()

    def rename(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        fixed = self._fix_pytorch_state_dict_keys(weights, self.config)
        return {name if name.startswith("model.") else f"model.{name}": value for name, value in fixed.items()}


class Pi0(PiAdapter, PI0Policy):
    """LeRobot's pi0 as a flow policy."""

    config_class = PI0Config
    name = "pi0"

    def encode(self, batch: dict[str, Any]) -> PrefixContext:
        """Images and text, then the state, which reads both."""
        return self._with_state(super().encode(batch), batch)

    def renewed(self, context: PrefixContext, state: Float[Tensor, "b s"]) -> PrefixContext:
        """A context with its state token made anew, with gradients.

        The token goes through the action expert's layers, so it changes when these are trained; images and text do not.

        Args:
            context: What :meth:`encode` once gave.
            state: Normalised states of the same observations.
        """
        kept = tuple((k[:, :, :-1], v[:, :, :-1]) for k, v in context.keys_values)
        return self._with_state(PrefixContext(kept, context.mask[:, :-1], context.summary), {OBS_STATE: state})

    def _with_state(self, prefix: PrefixContext, batch: dict[str, Any]) -> PrefixContext:
        state = self.model.state_proj(self.prepare_state(batch).float())[:, None]
        mask = F.pad(prefix.mask, (0, 1), value=True)
        position = self._counted(prefix.mask).sum(1, keepdim=True)
        cache, _ = prefill(self._expert.layers, state, position, mask[:, None], prefix.keys_values)
        both = tuple(
            (torch.cat((k, own_k), dim=2), torch.cat((v, own_v), dim=2))
            for (k, v), (own_k, own_v) in zip(prefix.keys_values, cache, strict=True)
        )
        return PrefixContext(both, mask, prefix.summary)

    def _embed(self, x: Float[Tensor, "b n a"], t: Time) -> tuple[Tensor, None]:
        return self._embed_suffix(x, t), None


class Pi05(PiAdapter, PI05Policy):
    """LeRobot's pi0.5 as a flow policy."""

    config_class = PI05Config
    name = "pi05"

    def _embed(self, x: Float[Tensor, "b n a"], t: Time) -> tuple[Tensor, Tensor]:
        time = self._embed_time(t, self.model.time_mlp_in.in_features)
        return self._embed_actions(x), F.silu(self.model.time_mlp_out(F.silu(self.model.time_mlp_in(time))))

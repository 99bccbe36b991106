"""A backbone's image encoder and text layers for inference, in about half of the operations that transformers takes.

Queries, keys and values are one product, gate and up another; the scale of an RMS norm is part of the matrix behind it,
a sum with what a block was given part of the product before it. Positions are rotary as in ``unrolled.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from vla_stack.policies.transformer import KeyValue, attention
from vla_stack.policies.unrolled import additive_padded, angles_of, by_group, by_token, turned, with_turned


class TextLayer(NamedTuple):
    """Matrices [in, out] of a decoder layer; of ``qkv`` see :func:`~vla_stack.policies.unrolled.with_turned`."""

    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor


class UnrolledText:
    """All text layers but the last over prefix tokens; their weights must not change any more.

    Args:
        text: The text model of a Gemma or Llama; its layers are not needed any more.
        head_dim: Width of a head.
    """

    def __init__(self, text: Any, head_dim: int) -> None:
        config, layers = text.config, text.layers[:-1]
        self.heads, self.kv_heads, self.head_dim = config.num_attention_heads, config.num_key_value_heads, head_dim
        self.eps, self.act = config.rms_norm_eps, text.layers[0].mlp.act_fn
        self.layers = [self._joined(layer) for layer in layers]

    def _joined(self, layer: Any) -> TextLayer:
        attend, mlp = layer.self_attn, layer.mlp
        qkv = torch.cat((attend.q_proj.weight, attend.k_proj.weight, attend.v_proj.weight))
        qkv = with_turned(qkv, (self.heads, self.kv_heads, self.kv_heads), self.head_dim)
        gate_up = torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight))
        return TextLayer(
            _scaled(qkv, layer.input_layernorm).T,
            attend.o_proj.weight.T,
            _scaled(gate_up, layer.post_attention_layernorm).T,
            mlp.down_proj.weight.T,
        )

    @torch.no_grad()
    def run(
        self, tokens: Float[Tensor, "b m d"], mask: Bool[Tensor, "b m"], rotary: tuple[Tensor, Tensor]
    ) -> tuple[Float[Tensor, "b m d"], list[KeyValue]]:
        """What the last layer is given, and keys and values of those before it.

        Args:
            tokens: Embedded prefix.
            mask: Which of them are there.
            rotary: Cosine and sine of their positions, each [b, m, head_dim].
        """
        b, m, width = tokens.shape
        tokens = tokens.to(self.layers[0].out.dtype)
        cos, sin = (angle[:, :, None].float() for angle in rotary)
        angles = angles_of(cos, sin, self.heads, self.kv_heads, tokens.dtype)
        readable = additive_padded(mask, tokens.dtype)
        x, cache = tokens.reshape(b * m, width), []
        with torch.autocast(tokens.device.type, enabled=False):  # everything is in its type
            for layer in self.layers:
                own = tokens.new_empty(b, m, 2 * self.kv_heads, self.head_dim)
                qkv = torch.mm(self._normed(x), layer.qkv).view(b, m, -1, self.head_dim)
                queries = by_group(turned(qkv, self.heads, angles, own), self.kv_heads)
                k, v = own.transpose(1, 2).chunk(2, dim=1)
                x = torch.addmm(x, by_token(attention(queries, k, v, readable), m), layer.out)
                gate, up = torch.mm(self._normed(x), layer.gate_up).chunk(2, dim=1)
                x = torch.addmm(x, self.act(gate) * up, layer.down)
                cache.append((k, v))
        return x.view(b, m, width), cache

    def _normed(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        return F.rms_norm(x, (x.shape[1],), eps=self.eps)


class ImageLayer(NamedTuple):
    """A layer of an image encoder: weights and biases of norms, matrices [in, out] and their biases."""

    norm1: tuple[Tensor, Tensor]
    qkv: tuple[Tensor, Tensor]
    out: tuple[Tensor, Tensor]
    norm2: tuple[Tensor, Tensor]
    up: tuple[Tensor, Tensor]
    down: tuple[Tensor, Tensor]


class UnrolledEncoder(nn.Module):
    """A SigLIP's layers over patches, in place of transformers' encoder.

    Args:
        encoder: What it replaces.
    """

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.heads, self.act = encoder.layers[0].self_attn.num_heads, encoder.layers[0].mlp.activation_fn
        self.eps, kind = encoder.layers[0].layer_norm1.eps, encoder.layers[0].mlp.fc1.weight.dtype
        self._layers = [
            ImageLayer(
                (layer.layer_norm1.weight.to(kind), layer.layer_norm1.bias.to(kind)),
                _stacked((layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)),
                _stacked((layer.self_attn.out_proj,)),
                (layer.layer_norm2.weight.to(kind), layer.layer_norm2.bias.to(kind)),
                _stacked((layer.mlp.fc1,)),
                _stacked((layer.mlp.fc2,)),
            )
            for layer in encoder.layers
        ]

    @torch.no_grad()
    def forward(self, inputs_embeds: Float[Tensor, "b n d"], **_: Any) -> BaseModelOutput:
        b, n, width = inputs_embeds.shape
        x = inputs_embeds.reshape(b * n, width).to(self._layers[0].out[0].dtype)
        with torch.autocast(x.device.type, enabled=False):
            for layer in self._layers:
                qkv = _linear(F.layer_norm(x, (width,), *layer.norm1, self.eps), layer.qkv)
                q, k, v = qkv.view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
                read = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b * n, width)
                x = x + _linear(read, layer.out)
                hidden = self.act(_linear(F.layer_norm(x, (width,), *layer.norm2, self.eps), layer.up))
                x = x + _linear(hidden, layer.down)
        return BaseModelOutput(last_hidden_state=x.view(b, n, width))


def _linear(x: Float[Tensor, "m d"], weights: tuple[Tensor, Tensor]) -> Float[Tensor, "m e"]:
    matrix, bias = weights
    return torch.addmm(bias, x, matrix)


def _scaled(matrix: Float[Tensor, "r d"], norm: Any) -> Float[Tensor, "r d"]:
    """A matrix that does what a norm's weight does before it; Gemma's weight is what is added to 1."""
    weight = norm.weight.float()
    scale = 1.0 + weight if "Gemma" in type(norm).__name__ else weight
    return (matrix.float() * scale).to(matrix.dtype)


def _stacked(layers: Sequence[nn.Linear]) -> tuple[Tensor, Tensor]:
    """Matrix [in, out] and bias of linear layers that read the same."""
    return torch.cat([layer.weight for layer in layers]).T, torch.cat([layer.bias for layer in layers])

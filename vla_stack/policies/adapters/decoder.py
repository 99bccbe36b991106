"""Decoder layers of LeRobot's VLAs (Llama's and Gemma's), run over keys and values that were computed before.

The layers are the modules of transformers and LeRobot with their weights; only their order of calls is ours. LeRobot
runs them over a cache object that each call grows, with one time a sample; here the cache is a tuple of tensors that
nothing writes to, and time is one number a token where that is wanted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vla_stack.policies.action_attention import block_steps, same_block
from vla_stack.policies.transformer import KeyValue, attention

MAX_WAVELENGTH = 10_000.0

Rotation = tuple[Tensor, Tensor]  # cosine and sine, each float32 [b, 1, n, head_dim / 2]


def rotation(positions: Int[Tensor, "b n"], head_dim: int) -> Rotation:
    """Angles of rotary position embeddings (Su et al. 2021), for queries and keys of ``head_dim``.

    In float32 whatever the weights are, as these VLAs were pretrained; a bfloat16 model of LeRobot rounds the
    frequencies to eight bits, which turns far tokens against each other.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = positions[:, None, :, None].float() / MAX_WAVELENGTH**exponent
    return angles.cos(), angles.sin()


def rotate(x: Float[Tensor, "b heads n d"], by: Rotation) -> Float[Tensor, "b heads n d"]:
    """Rotate the pairs (x[i], x[i + d/2]), in float32."""
    cos, sin = by
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Bool[Tensor, "b n_or_1 m"]) -> Float[Tensor, "b n d"]:
    """Grouped-query attention: several heads of ``q`` [b, heads, n, d] share one head of ``k`` and ``v`` [b, kv, m, d].

    The heads of a group are laid out as further queries, so that keys and values need no copies.
    """
    groups = q.shape[1] // k.shape[1]
    folded = q.unflatten(1, (-1, groups)).flatten(2, 3)
    out = attention(folded, k, v, mask[:, None] if mask.shape[1] == 1 else mask.repeat(1, groups, 1)[:, None])
    return out.reshape(q.shape).transpose(1, 2).flatten(2)


def heads(projection: nn.Module, y: Float[Tensor, "b n d"], head_dim: int) -> Float[Tensor, "b heads n head_dim"]:
    """A projection in the precision of its weights, cut into heads."""
    return projection(y.to(projection.weight.dtype)).unflatten(-1, (-1, head_dim)).transpose(1, 2)


def project(layer: nn.Module, y: Float[Tensor, "b n d"], by: Rotation) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries and keys, and values, each [b, heads, n, head_dim]."""
    a = layer.self_attn
    q, k, v = (heads(p, y, a.head_dim) for p in (a.q_proj, a.k_proj, a.v_proj))
    return rotate(q, by), rotate(k, by), v


def normalise(norm: nn.Module, x: Tensor, condition: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """A layer's norm, and the gate of what is added next; None where the norm is not adaptive.

    Args:
        norm: RMS norm, with a layer ``dense`` to scale, shift and gate where it is adaptive (pi0.5).
        x: float [b, n, d].
        condition: float [b, n or 1, d], the embedded time; None where the norm is not adaptive.
    """
    if condition is None:
        y = norm(x)
        return (y[0] if isinstance(y, tuple) else y), None
    scale, shift, gate = norm.dense(condition).chunk(3, dim=-1)
    y = F.rms_norm(x.float(), (x.shape[-1],), eps=norm.eps) * (1.0 + scale.float()) + shift.float()
    return y.to(x.dtype), gate.to(x.dtype)


def run_layer(
    layer: nn.Module,
    x: Float[Tensor, "b n d"],
    by: Rotation,
    mask: Bool[Tensor, "b n_or_1 m"],
    past: KeyValue | None = None,
    condition: Tensor | None = None,
) -> tuple[Float[Tensor, "b n d"], KeyValue]:
    """One layer over tokens that read ``past`` and each other; also returns the tokens' own keys and values."""
    y, gate = normalise(layer.input_layernorm, x, condition)
    q, k, v = project(layer, y, by)
    keys, values = (k, v) if past is None else (torch.cat((past[0], k), dim=2), torch.cat((past[1], v), dim=2))
    return feed_forward(layer, x, attend(q, keys, values, mask), gate, condition), (k, v)


def feed_forward(
    layer: nn.Module, x: Tensor, attended: Tensor, gate: Tensor | None, condition: Tensor | None = None
) -> Float[Tensor, "b n d"]:
    """What follows attention in a layer: its output projection, the residual, and the feed-forward network."""
    dtype = layer.self_attn.o_proj.weight.dtype
    x = x + gated(layer.self_attn.o_proj(attended.to(dtype)), gate)
    y, gate = normalise(layer.post_attention_layernorm, x, condition)
    return x + gated(layer.mlp(y.to(dtype)), gate)


def gated(y: Tensor, gate: Tensor | None) -> Tensor:
    """What a residual adds."""
    return y if gate is None else gate * y


def prefill(
    layers: Sequence[nn.Module],
    x: Float[Tensor, "b n d"],
    positions: Int[Tensor, "b n"],
    mask: Bool[Tensor, "b n_or_1 m"],
    past: Sequence[KeyValue] | None = None,
    recompute: bool = False,
) -> tuple[tuple[KeyValue, ...], Float[Tensor, "b n d"]]:
    """Keys and values of tokens that later ones will read, layer by layer, and the tokens as the last layer sees them.

    Of the last layer only keys and values are computed: nothing reads what would follow.

    Args:
        layers: The decoder's layers.
        x: Embedded tokens.
        positions: Their positions.
        mask: What each may read: ``past`` and one another.
        past: Keys and values of earlier tokens.
        recompute: Recompute activations in the backward pass instead of keeping them.
    """
    by = rotation(positions, layers[0].self_attn.head_dim)
    x = x.to(layers[0].self_attn.k_proj.weight.dtype)
    cache = []
    for i, layer in enumerate(layers[:-1]):
        args = (layer, x, by, mask, past[i] if past else None)
        x, kv = checkpoint(run_layer, *args, use_reentrant=False) if recompute else run_layer(*args)
        cache.append(kv)
    y, _ = normalise(layers[-1].input_layernorm, x, None)
    last = layers[-1].self_attn
    k, v = (heads(p, y, last.head_dim) for p in (last.k_proj, last.v_proj))
    return (*cache, (rotate(k, by), v)), y


def action_mask(
    prefix: Bool[Tensor, "b m"], lengths: Sequence[int], valid: Bool[Tensor, "b n"] | None, causal: bool
) -> Bool[Tensor, "b n_or_1 m_and_n"]:
    """What action tokens may read: the prefix, and valid tokens of their own chunk.

    Args:
        prefix: True on the prefix's real tokens.
        lengths: Lengths of the chunks that lie end to end, together n.
        valid: Action tokens that may be read; None is all.
        causal: A token reads no later ones.
    """
    n = sum(lengths)
    mask = F.pad(prefix, (0, n), value=True)[:, None]
    if valid is not None:
        mask[:, :, -n:] = valid[:, None]
    if causal or len(lengths) > 1:
        own = same_block(tuple(lengths), prefix.device)
        mask = mask & F.pad(own.tril() if causal else own, (prefix.shape[1], 0), value=True)
    return mask


def action_positions(prefix: Bool[Tensor, "b m"], lengths: Sequence[int]) -> Int[Tensor, "b n"]:
    """Positions of action tokens: each chunk counts on from the prefix's real tokens."""
    steps = torch.arange(lengths[0], device=prefix.device)
    if len(lengths) > 1:
        steps = block_steps(tuple(lengths), prefix.device)
    return prefix.sum(1, keepdim=True) + steps


def masked_mean(x: Float[Tensor, "b n d"], mask: Bool[Tensor, "b n"]) -> Float[Tensor, "b d"]:
    """Mean over the real tokens, in float32."""
    return torch.where(mask[..., None], x.float(), 0.0).sum(1) / mask.sum(1, keepdim=True)

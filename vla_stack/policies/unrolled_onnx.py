"""The sampling of ``unrolled.py`` in ONNX Runtime's own operations, for a traced graph.

Attention over the prefix's keys and values and the action tokens' own is one operation here, which also adds the bias
of queries, keys and values; a sum and the norm behind it are another. ONNX Runtime finds neither by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from vla_stack.policies.flow import ActionPrefix
from vla_stack.policies.transformer import PrefixContext

if TYPE_CHECKING:
    from vla_stack.policies.unrolled import UnrolledExpert

EPSILON = torch.finfo(torch.float32).eps  # of torch's RMS norm
Shape = Sequence[int | torch.SymInt]


def sample(
    expert: UnrolledExpert, context: PrefixContext, noise: Float[Tensor, "b n a"], prefix: ActionPrefix | None = None
) -> Float[Tensor, "b n a"]:
    """:meth:`~vla_stack.policies.unrolled.UnrolledExpert.sample` of an expert without rotary positions."""
    n, x = noise.shape[1], noise
    there = F.pad(context.mask, (0, n), value=True)[:, None, None]
    mask = torch.where(there, 0.0, torch.finfo(x.dtype).min).expand(-1, -1, n, -1)
    for noisy in expert.noisy:
        rows = tuple(row[None] for row in noisy)
        if prefix is not None:  # every token then has rows of its own
            given = prefix.mask[..., None]
            x = torch.where(given, prefix.actions, x)
            rows = tuple(torch.where(given, c, r) for c, r in zip(expert.clean, rows, strict=True))
        x = x - velocity(expert, context, x, rows, mask) * (1.0 / len(expert.noisy))
    return x if prefix is None else torch.where(prefix.mask[..., None], prefix.actions, x)


def velocity(
    expert: UnrolledExpert,
    context: PrefixContext,
    x: Float[Tensor, "b n a"],
    rows: tuple[Float[Tensor, "b_or_1 n_or_1 e"], ...],
    mask: Float[Tensor, "b 1 n m"],
) -> Float[Tensor, "b n a"]:
    """One evaluation; ``rows`` are a step's of :class:`~vla_stack.policies.unrolled.Schedule`."""
    parts = iter(rows[0].split(expert.sizes, dim=2))
    y, change, more = x @ expert.embed, expert.positions[: x.shape[1]], None
    for layer, (keys, values) in zip(expert.layers, context.keys_values, strict=True):
        scale, bias, gate = next(parts), next(parts), next(parts)
        y, z = summed(y, change, more, scale)
        change = attended(z @ layer.qkv, bias, keys, values, mask) @ layer.out * gate
        scale, bias, gate = next(parts), next(parts), next(parts)
        y, z = summed(y, change, None, scale)
        change, more = gelu(z @ layer.up, bias) @ layer.down * gate, layer.down_bias * gate
    scale, bias = rows[1].split((expert.width, expert.head.shape[1]), dim=2)
    return summed(y, change, more, scale)[1] @ expert.head + bias


def summed(
    y: Float[Tensor, "b n d"], change: Tensor, more: Tensor | None, scale: Float[Tensor, "b_or_1 n_or_1 d"]
) -> tuple[Tensor, Tensor]:
    """``y + change + more``, and its RMS norm times ``scale``, which includes the root of the width."""
    b, n, d = y.shape
    if more is not None and not shared(more):
        change, more = change + more, None
    gamma = scale[0, 0] * d**-0.5 if shared(scale) else torch.full_like(scale[0, 0], d**-0.5)
    row = None if more is None else more[0, 0]
    inputs, shapes = (y, change, gamma, row), [y.shape, (b, n, 1), (b, n, 1), y.shape]
    z, _, _, y = fused("SkipSimplifiedLayerNormalization", inputs, shapes, epsilon=EPSILON)
    return y, z if shared(scale) else z * scale


def attended(
    qkv: Float[Tensor, "b n e"],
    bias: Float[Tensor, "b_or_1 n_or_1 e"],
    keys: Float[Tensor, "b heads m d"],
    values: Float[Tensor, "b heads m d"],
    mask: Tensor,
) -> Float[Tensor, "b n d"]:
    """What the action tokens read of the prefix's ``keys`` and ``values``, and of their own."""
    b, heads, m, d = keys.shape
    q, k, v = (qkv if shared(bias) else qkv + bias).chunk(3, dim=2)
    inputs = (q, k, v, bias[0, 0] if shared(bias) else None, None, mask, keys, values)
    every = (b, heads, m + q.shape[1], d)
    return fused("MultiHeadAttention", inputs, [q.shape, every, every], num_heads=heads)[0]


def gelu(x: Float[Tensor, "b n d"], bias: Float[Tensor, "b_or_1 n_or_1 d"]) -> Float[Tensor, "b n d"]:
    """GELU of ``x + bias``, by its approximation with tanh."""
    return fused("FastGelu", (x, bias[0, 0]) if shared(bias) else (x + bias,), [x.shape])[0]


def shared(row: Float[Tensor, "b_or_1 n_or_1 e"]) -> bool:
    """Whether all tokens have the same; operations take it as a parameter then."""
    return row.shape[1] == 1


def fused(name: str, inputs: Sequence[Tensor | None], shapes: list[Shape], **attributes: float) -> Sequence[Tensor]:
    """An operation that only ONNX Runtime has; ``shapes`` are those of its outputs."""
    first = inputs[0]
    assert first is not None
    return torch.onnx.ops.symbolic_multi_out(
        f"com.microsoft::{name}", inputs, attributes, dtypes=[first.dtype] * len(shapes), shapes=shapes, version=1
    )

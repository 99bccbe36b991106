"""The prefix transformer and what it shares with the action expert: attention over cached keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

KeyValue = tuple[Tensor, Tensor]  # each [b, heads, n, head_dim]


@dataclass(frozen=True)
class PrefixContext:
    """Keys and values that the expert reads, layer by layer.

    Attributes:
        keys_values: One pair a layer, each float [b, heads, n, head_dim].
        mask: bool [b, n], false on padding.
        summary: float [b, d], mean of the last layer's tokens.
    """

    keys_values: tuple[KeyValue, ...]
    mask: Tensor
    summary: Tensor

    def repeat(self, n: int) -> PrefixContext:
        """Each observation ``n`` times in a row."""
        return PrefixContext(
            tuple((k.repeat_interleave(n, 0), v.repeat_interleave(n, 0)) for k, v in self.keys_values),
            self.mask.repeat_interleave(n, 0),
            self.summary.repeat_interleave(n, 0),
        )


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Bool[Tensor, "b 1 n_or_1 m"]
) -> Float[Tensor, "b heads n head_dim"]:
    """Scaled dot-product attention; ``mask`` is true on the keys that may be read."""
    if q.device.type == "cpu" and q.dtype == torch.bfloat16:
        # For a few dozen tokens the fused kernel's bfloat16 backward takes six times as long as plain products.
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
        return scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(-1).to(v.dtype) @ v
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Attention(nn.Module):
    """Multi-head attention, split so that keys and values can come from elsewhere or be kept."""

    def __init__(self, width: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * heads * head_dim, bias=False)
        self.out = nn.Linear(heads * head_dim, width, bias=False)

    def project(self, x: Float[Tensor, "b n d"]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of ``x``, each [b, heads, n, head_dim]."""
        b, n, _ = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        return q, k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Bool[Tensor, "b n_or_1 m"]) -> Float[Tensor, "b n d"]:
        """Every query reads the keys that ``mask`` allows it."""
        return self.out(attention(q, k, v, mask[:, None]).transpose(1, 2).flatten(2))


def mlp(width: int) -> nn.Sequential:
    """The feed-forward half of a block."""
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, heads, head_dim)
        self.mlp = mlp(width)

    def forward(self, x: Float[Tensor, "b n d"], mask: Bool[Tensor, "b n"]) -> Float[Tensor, "b n d"]:
        return self.forward_cached(x, mask)[0]

    def forward_cached(self, x: Float[Tensor, "b n d"], mask: Bool[Tensor, "b n"]) -> tuple[Tensor, KeyValue]:
        """The block's output, and the keys and values that it computed on the way."""
        q, k, v = self.attention.project(self.norm1(x))
        x = x + self.attention.attend(q, k, v, mask[:, None])
        return x + self.mlp(self.norm2(x)), (k, v)


class PrefixTransformer(nn.Module):
    """Full self-attention over prefix tokens; keeps each layer's keys and values.

    The prefix never reads action tokens, so it is computed once an observation, whatever the number of Euler steps.
    The last layer is keys and values alone: nothing reads what would follow.
    """

    def __init__(self, depth: int, width: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, heads, head_dim) for _ in range(depth - 1))
        self.last_norm = nn.RMSNorm(width)
        self.last_kv = nn.Linear(width, 2 * heads * head_dim, bias=False)
        self.heads = heads

    def forward(self, x: Float[Tensor, "b n d"], mask: Bool[Tensor, "b n"]) -> PrefixContext:
        cache = []
        for block in self.blocks:
            x, kv = block.forward_cached(x, mask)
            cache.append(kv)
        x = self.last_norm(x)
        k, v = self.last_kv(x).view(*x.shape[:2], 2, self.heads, -1).permute(2, 0, 3, 1, 4)
        count = mask.sum(1, keepdim=True)
        summary = torch.where(mask[..., None], x, 0.0).sum(1) / count
        return PrefixContext((*cache, (k, v)), mask, summary)
